"""The figures of a run, computed from its records. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from fp8rl_operator.report.records import Record, Run


def summarize(run: Run) -> dict[str, Any]:
    """summary.json. Seconds, nats, counts; None where nothing was measured.

    Beside the last steps nothing is left to sample: their zero is no speed. `reward_first` and `reward_last` are held out; `mismatch_kl_max` is the largest mean of a step; `wall_seconds` counts
    from the engines' readiness to the last record, summed over attempts.
    """
    steps, syncs, evaluations = (run.of_kind(kind) for kind in ("step", "sync", "evaluation"))
    heldout = values(evaluations, "reward_heldout")
    kl, tokens = values(steps, "mismatch_kl"), [speed for speed in values(steps, "tokens_per_second") if speed > 0]
    sync_seconds = values(syncs, "sync_seconds") or values(steps, "sync_seconds")
    return {
        "name": run.name,
        "reward_first": heldout[0] if heldout else None,
        "reward_last": heldout[-1] if heldout else None,
        "steps": steps[-1].step if steps else 0,
        "mismatch_kl_mean": mean(kl),
        "mismatch_kl_max": max(kl, default=None),
        "entropy_mean": mean(values(steps, "entropy")),
        "off_policy_max": max(values(steps, "off_policy_max"), default=None),
        "dropped": int(sum(values(steps, "dropped"))),
        "weight_sync_seconds_p50": quantile(sync_seconds, 0.5),
        "weight_versions": len({record.version for record in syncs if record.version > 0}),
        "wire": run.status.get("precision", {}).get("wire"),
        "wall_seconds": wall_seconds(run),
        "weight_sync_seconds_p90": quantile(sync_seconds, 0.9),
        "weight_sync_stages_p50": stages(syncs),
        "tokens_per_second_p50": quantile(tokens, 0.5),
        "step_seconds_p50": quantile(values(steps, "step_seconds"), 0.5),
        "logprob_diff_p99_max": max(values(steps, "logprob_diff_p99"), default=None),
        "recipe": run.status.get("precision", {}).get("recipe"),
        "seed": run.spec.get("seed", 0),
        "attempts": run.status.get("attempt", 0) + 1,
        "restarts": run.status.get("restarts", 0),
        "result": result(run.status),
    }


def values(records: Iterable[Record], key: str) -> list[float]:
    """Finite values of one metric, in order."""
    found = (record.metrics[key] for record in records if key in record.metrics)
    return [value for value in found if math.isfinite(value)]


def mean(numbers: list[float]) -> float | None:
    """Mean, None of nothing."""
    return fmean(numbers) if numbers else None


def quantile(numbers: list[float], share: float) -> float | None:
    """Linear interpolation between the sorted numbers, None of nothing."""
    if not numbers:
        return None
    ordered = sorted(numbers)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def stages(syncs: list[Record]) -> dict[str, float | None]:
    """Median seconds of each stage of the syncs; stages are disjoint."""
    found = [record.stages for record in syncs]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: quantile([one[name] for one in found if name in one], 0.5) for name in names}


def wall_seconds(run: Run) -> float | None:
    """From readiness to the last record of each attempt; without a note of it, from the attempt's first record."""
    total = 0.0
    attempts = sorted({record.attempt for record in run.records})
    for attempt in attempts:
        times = [record.time for record in run.records if record.attempt == attempt]
        total += max(times) - min(run.ready.get(attempt, min(times)), max(times))
    return round(total, 3) if attempts else None


def result(status: dict[str, Any]) -> str:
    """Complete, the reason of Failed, or `unfinished`."""
    for item in status.get("conditions", []):
        if item["type"] in {"Complete", "Failed"} and item["status"] == "True":
            return str(item["type"] if item["type"] == "Complete" else item["reason"])
    return "unfinished"
