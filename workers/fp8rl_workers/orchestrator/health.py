"""Judges a step's figures against the job's limits: warnings, and the one that ends the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8rl_workers.config import LimitsConfig

MISMATCH_LIMIT = "MismatchLimit"
WAIT_SHARE = 0.5
WAIT_WINDOW = 5


@dataclass(frozen=True)
class Verdict:
    """Warnings by what they are about; `reason` and `message` when the job must end."""

    warnings: dict[str, str]
    reason: str = ""
    message: str = ""


def judge(metrics: Mapping[str, float], limits: LimitsConfig) -> Verdict:
    """Compare a step's metrics (keys of `metrics.STEP_METRICS`) with the limits."""
    bounds = (
        ("mismatch_kl", limits.mismatch_kl_warn, "limits.mismatchKL.warn"),
        ("logprob_diff_p99", limits.logprob_diff_p99, "limits.logprobDiffP99"),
        ("tis_truncated", limits.tis_truncated, "limits.tisTruncated"),
        ("ratio_deviation", limits.ratio_deviation, "limits.ratioDeviation"),
    )
    warnings = {
        key: f"{key} {metrics[key]:.4g} is over {field} {bound:g}"
        for key, bound, field in bounds
        if key in metrics and metrics[key] > bound
    }
    broken = sorted(key for key in ("loss", "grad_norm", "mismatch_kl") if not math.isfinite(metrics.get(key, 0.0)))
    if broken:
        return Verdict(warnings, "NaN", f"not finite on the trainer: {', '.join(broken)}")
    stop = limits.mismatch_kl_stop
    if stop is not None and metrics.get("mismatch_kl", 0.0) > stop:
        message = f"mismatch_kl {metrics['mismatch_kl']:.4g} is over limits.mismatchKL.stop {stop:g}"
        return Verdict(warnings, MISMATCH_LIMIT, message)
    return Verdict(warnings)


def waiting_warning(wait_seconds: Sequence[float], step_seconds: Sequence[float]) -> str | None:
    """Text when the trainer waited for rollouts for over half of the last WAIT_WINDOW steps' time."""
    waited, total = sum(wait_seconds[-WAIT_WINDOW:]), sum(step_seconds[-WAIT_WINDOW:])
    if len(step_seconds) < WAIT_WINDOW or waited <= WAIT_SHARE * total:
        return None
    share = 100 * waited / total
    return (
        f"the trainer waited for rollouts {share:.0f} % of the last {WAIT_WINDOW} steps "
        f"({waited:.1f} of {total:.1f} s): raise inference.replicas"
    )


def context_length(max_model_len: int | None, bound: int, max_tokens: int) -> int:
    """The context that engines serve: maxModelLen, or the longest trajectory when it is unset (rule 14).

    Raises:
        ValueError: the longest trajectory does not fit maxModelLen.
    """
    if max_model_len is None:
        return bound
    if bound > max_model_len:
        raise ValueError(
            f"longest prompt {bound - max_tokens} + rollout.maxTokens {max_tokens} = {bound} tokens is over "
            f"model.maxModelLen {max_model_len}: raise model.maxModelLen to {bound} or lower rollout.maxTokens"
        )
    return max_model_len
