"""The job's status, as a pure function; None means that nothing is worth a write.

Conditions and counters are written at once, progress at most every `PROGRESS_SECONDS`. Decimals are strings, as the
API has no floats. What the plan must remember (`plan_memory`) stands here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from fp8rl_operator import names
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan_memory import from_time, to_time
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status_conditions import conditions
from fp8rl_workers.protocol import MemberStatus, OrchestratorStatus, ResolvedPrecision

PROGRESS_SECONDS = 15.0
PROGRESS_FIELDS = ("step", "version", "weightSyncGroup", "mismatch", "offPolicy", "lastStepTime")

Status = dict[str, Any]


def next_status(job: FP8RLJob, seen: Observed, plan: Plan, now: float) -> Status | None:
    """The status that follows from this pass, None if there is nothing to write. `now` in Unix seconds."""
    if plan.hands_off:
        return None
    old = job.status
    new = {**old, **counters(old, plan, now), **roles(job, seen, plan), **progress(old, seen, plan)}
    new["observedGeneration"] = job.metadata.generation
    new["conditions"] = conditions(job, seen, plan, now)
    if firm(new) == firm(old) and (new == old or now - (to_time(old.get("lastStepTime")) or 0.0) < PROGRESS_SECONDS):
        return None
    return new


def firm(status: Status) -> Status:
    """What is written at once: all but progress and the words of conditions."""
    kept = {key: value for key, value in status.items() if key not in {*PROGRESS_FIELDS, "conditions"}}
    kept["conditions"] = [(item["type"], item["status"], item["reason"]) for item in status.get("conditions", [])]
    return kept


def counters(old: Status, plan: Plan, now: float) -> Status:
    """Attempt, restarts and the times of the job's life."""
    found: Status = {"attempt": plan.attempt, "fleetAttempt": plan.fleet_attempt, "restarts": plan.restarts}
    found["attemptTime"] = from_time(plan.attempt_time)
    if plan.resumed or "startTime" not in old:
        found["startTime"] = from_time(now)
    if plan.verdict is not None and "completionTime" not in old:
        found["completionTime"] = from_time(now)
    if plan.loss is not None:
        found["lastFailure"] = {"reason": plan.loss.reason, "message": plan.loss.message, "time": from_time(now)}
    return found


def roles(job: FP8RLJob, seen: Observed, plan: Plan) -> Status:
    """Desired and ready pods of each role; uids of the pods that this attempt has had running."""
    wanted = {
        names.TRAINER: job.spec.trainer.replicas,
        names.INFERENCE: job.spec.inference.replicas,
        names.ORCHESTRATOR: 1,
    }
    found: Status = {}
    for role, count in wanted.items():
        pods = seen.of_role(role, plan.attempt_of(role))
        found[role] = {
            "desired": plan.replicas(role, count),
            "ready": sum(pod.ready for pod in pods),
            "updated": len(pods),
            "restarts": sum(pod.restarts for pod in pods),
            "uids": sorted(pod.uid for pod in pods if not pod.starting),
        }
    return found


def progress(old: Status, seen: Observed, plan: Plan) -> Status:
    """What orchestrator and trainer report; nothing when they are silent or of an old attempt."""
    status = seen.orchestrator
    if status is None or status.attempt != plan.attempt:
        return {}
    found: Status = {
        "step": status.step,
        "version": max(status.version, old.get("version", 0)),
        "weightSyncGroup": group(status),
        "mismatch": decimals(status.mismatch, ("kl", "logprobDiffP99", "maskedRatio")),
        "offPolicy": decimals(status.off_policy, ("mean",)) | counts(status.off_policy, ("max", "dropped")),
    }
    if status.last_step_time:
        found["lastStepTime"] = from_time(status.last_step_time)
    resolved = status.resolved or (seen.trainer.resolved if seen.trainer is not None else None)
    return found if resolved is None else found | {"precision": precision(resolved)}


def group(status: OrchestratorStatus) -> Status:
    """The weight-sync group as the orchestrator formed it."""
    wire = {} if status.resolved is None else {"wire": status.resolved.wire}
    return {
        "epoch": status.epoch,
        **wire,
        "worldSize": status.world_size,
        "members": [member(item) for item in status.members],
    }


def member(item: MemberStatus) -> Status:
    """One member of the group."""
    version = {} if item.version is None else {"version": item.version}
    return {
        "pod": item.pod,
        "role": item.role,
        "ranks": list(item.ranks),
        "transport": item.transport,
        **version,
        "state": item.state,
    }


def precision(resolved: ResolvedPrecision) -> Status:
    """What `auto` became."""
    return {
        "recipe": resolved.recipe,
        "wire": resolved.wire,
        "scaleFormat": resolved.scale_format,
        "quantizeAt": resolved.quantize_at,
        "quantizedLayers": len(resolved.quantized_layers),
        "ignoredLayers": [f"{name}: {reason}" for name, reason in sorted(resolved.ignored_layers.items())],
    }


def decimals(values: dict[str, float], keys: tuple[str, ...]) -> Status:
    """Floats as decimal strings, those that are there."""
    return {key: repr(float(f"{values[key]:.6g}")) for key in keys if key in values}


def counts(values: dict[str, float], keys: tuple[str, ...]) -> Status:
    """Whole numbers, those that are there."""
    return {key: int(values[key]) for key in keys if key in values}
