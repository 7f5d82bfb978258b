"""Conditions of a job, metav1 shape: `lastTransitionTime` moves only when the status flips. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan_memory import from_time
from fp8rl_operator.plan_troubles import of_outcome
from fp8rl_operator.plan_types import Outcome, Plan, Waiting
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.protocol import OrchestratorStatus

MAX_MESSAGE = 2048
MAX_REASON = 256


@dataclass(frozen=True)
class Word:
    """Status, reason and message of one condition."""

    status: bool | None
    reason: str
    message: str

    @property
    def text(self) -> str:
        """True, False or Unknown."""
        return "Unknown" if self.status is None else str(self.status)


def conditions(job: FP8RLJob, seen: Observed, plan: Plan, now: float, outcome: Outcome) -> list[dict[str, Any]]:
    """All conditions that can be told, in the order of `names.CONDITIONS`."""
    words = life(plan) | limits(job, seen, plan)
    words[names.READY] = with_warnings(words[names.READY], seen, plan)
    if plan.verdict is None and (hindered := of_outcome(job, outcome)) is not None:
        words |= standing(hindered)
    return merged(job.status, words, job.metadata.generation, now)


def merged(status: Mapping[str, Any], words: Mapping[str, Word], generation: int, now: float) -> list[dict[str, Any]]:
    """Conditions with these words; those that nothing is said of stay as they are."""
    old = {item["type"]: item for item in status.get("conditions", [])}
    return [
        stamped(kind, words[kind], old.get(kind), generation, now) if kind in words else dict(old[kind])
        for kind in names.CONDITIONS
        if kind in words or kind in old
    ]


def standing(word: Waiting) -> dict[str, Word]:
    """Ready, Reconciling and Stalled of a job that something is in the way of; kstatus wants one of the latter two."""
    return {
        names.READY: Word(False, word.reason, word.message),
        names.RECONCILING: Word(not word.person, word.reason, word.message),
        names.STALLED: Word(word.person, word.reason, word.message),
    }


def with_warnings(ready: Word, seen: Observed, plan: Plan) -> Word:
    """Ready with what the orchestrator warns of, such as too few engines for the samples of a step; none once the job has ended."""
    status = seen.orchestrator
    if status is None or status.attempt != plan.attempt or plan.verdict is not None or not status.warnings:
        return ready
    return Word(ready.status, ready.reason, f"{ready.message}; warning: {'; '.join(status.warnings)}")


def stamped(kind: str, word: Word, old: Mapping[str, Any] | None, generation: int, now: float) -> dict[str, Any]:
    """A metav1.Condition."""
    flipped = old is None or old["status"] != word.text
    return {
        "type": kind,
        "status": word.text,
        "observedGeneration": generation,
        "lastTransitionTime": from_time(now) if flipped or old is None else old["lastTransitionTime"],
        "reason": reason_of(word.reason),
        "message": word.message[:MAX_MESSAGE],
    }


def reason_of(text: str) -> str:
    """A reason as the API takes it: what a worker or a cluster says may have other letters."""
    return re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9_]|_+$", "", text)[:MAX_REASON] or "Unknown"


def life(plan: Plan) -> dict[str, Word]:
    """Ready, Reconciling, Stalled, Suspended, Complete and Failed."""
    if plan.verdict is not None:
        verdict = plan.verdict
        end = Word(True, verdict.reason, verdict.message)
        no = Word(False, verdict.reason, verdict.message)
        complete = (
            {names.COMPLETE: end, names.FAILED: no} if verdict.complete else {names.COMPLETE: no, names.FAILED: end}
        )
        # kstatus: a finished job is current, a failed one stalled
        return {
            names.READY: Word(verdict.complete, verdict.reason, verdict.message),
            names.RECONCILING: no,
            names.STALLED: no if verdict.complete else end,
            names.SUSPENDED: no,
            **complete,
        }
    if plan.suspended:
        word = Waiting(names.SUSPENDED_BY_USER, "spec.suspend is true")
        return going(word, ready=False, reconciling=False) | {names.SUSPENDED: Word(True, word.reason, word.message)}
    waiting = plan.waiting or Waiting(names.CREATING, "the job's objects are being made")
    ready = waiting.reason == names.RUNNING
    words = going(waiting, ready=ready, reconciling=not ready)
    if waiting.person:
        return words | standing(waiting)
    if plan.stalled is not None:  # Reconciling would hide it from kstatus
        words[names.RECONCILING] = Word(False, plan.stalled.reason, plan.stalled.message)
        words[names.STALLED] = Word(True, plan.stalled.reason, plan.stalled.message)
    return words


def going(word: Waiting, *, ready: bool, reconciling: bool) -> dict[str, Word]:
    """Conditions of a job that has not ended."""
    return {
        names.READY: Word(ready, word.reason, word.message),
        names.RECONCILING: Word(reconciling, word.reason, word.message),
        names.STALLED: Word(False, word.reason, word.message),
        names.SUSPENDED: Word(False, word.reason, word.message),
        names.COMPLETE: Word(False, word.reason, word.message),
        names.FAILED: Word(False, word.reason, word.message),
    }


def limits(job: FP8RLJob, seen: Observed, plan: Plan) -> dict[str, Word]:
    """WeightsInSync, OffPolicyWithinLimit and MismatchWithinLimit, once the orchestrator tells."""
    status = seen.orchestrator
    if status is None or status.attempt != plan.attempt or status.phase in {"waiting", "booting"}:
        return {}
    return {
        names.WEIGHTS_IN_SYNC: in_sync(status),
        names.OFF_POLICY_WITHIN_LIMIT: off_policy(job, status),
        names.MISMATCH_WITHIN_LIMIT: mismatch(job, status),
    }


def in_sync(status: OrchestratorStatus) -> Word:
    """Whether every serving engine serves the newest committed version."""
    if status.weights_in_sync:
        return Word(True, names.IN_SYNC, f"every engine serves version {status.version}")
    versions = ", ".join(f"{m.pod}: {m.version} ({m.state})" for m in status.members if m.role == "inference")
    return Word(False, names.OUT_OF_SYNC, f"newest version {status.version}; {versions}")


def off_policy(job: FP8RLJob, status: OrchestratorStatus) -> Word:
    """Whether all consumed samples were young enough."""
    limit = job.spec.rollout.max_off_policy_steps
    oldest = status.off_policy.get("max", 0.0)
    text = f"oldest consumed sample {oldest:g} steps, rollout.maxOffPolicySteps {limit}"
    inside = oldest <= limit
    return Word(inside, names.WITHIN_LIMIT if inside else names.OFF_POLICY_LIMIT, text)


def mismatch(job: FP8RLJob, status: OrchestratorStatus) -> Word:
    """Whether the mismatch of trainer and engines is under the limits."""
    asked = job.spec.limits
    checks = (
        ("mismatch KL", status.mismatch.get("kl"), "limits.mismatchKL.warn", asked.mismatch_kl.warn),
        ("p99 of |r|", status.mismatch.get("logprobDiffP99"), "limits.logprobDiffP99", asked.logprob_diff_p99),
        ("truncated share", status.progress.get("tis_truncated"), "limits.tisTruncated", asked.tis_truncated),
        ("|ratio - 1|", status.progress.get("ratio_deviation"), "limits.ratioDeviation", asked.ratio_deviation),
    )
    over = [
        f"{what} {value:.4g} over {field} {limit:g}"
        for what, value, field, limit in checks
        if value is not None and value > limit
    ]
    if over:
        return Word(False, names.MISMATCH_LIMIT, "; ".join(over))
    kl = status.mismatch.get("kl")
    return Word(True, names.WITHIN_LIMIT, "no step measured yet" if kl is None else f"mismatch KL {kl:.4g}")
