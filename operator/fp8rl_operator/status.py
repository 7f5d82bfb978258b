"""The job's status, as a pure function; None means that nothing is worth a write.

Conditions and counters are written at once, progress and the words of conditions at most every `PROGRESS_SECONDS`. Decimals are strings, as the
API has no floats. What the plan must remember (`plan_memory`) stands here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import wanted_pods
from fp8rl_operator.plan_memory import from_time, to_time
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.status import MAX_COUNTED
from fp8rl_operator.status_conditions import conditions
from fp8rl_workers.protocol import MemberStatus, OrchestratorStatus, ResolvedPrecision

PROGRESS_SECONDS = 15.0
MAX_LAYERS = 4096
MAX_LAYER_LENGTH = 512
PROGRESS_FIELDS = ("progressTime", "step", "version", "weightSyncGroup", "mismatch", "offPolicy", "lastStepTime")

NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)")

Status = dict[str, Any]


def next_status(job: FP8RLJob, seen: Observed, plan: Plan, now: float) -> Status | None:
    """The status that follows from this pass, None if there is nothing to write. `now` in Unix seconds."""
    if plan.hands_off:
        return None
    old = job.status
    new = {**old, **counters(old, plan, now), **progress(old, seen, plan)}
    new |= roles(job, seen, plan, advanced=new.get("step", 0) > old.get("step", 0))
    new["observedGeneration"] = job.metadata.generation
    new["conditions"] = conditions(job, seen, plan, now)
    recent = now - (to_time(old.get("progressTime")) or 0.0) < PROGRESS_SECONDS
    if firm(new) == firm(old) and (new == old or recent):
        return None
    return new | {"progressTime": from_time(now)}


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


def roles(job: FP8RLJob, seen: Observed, plan: Plan, *, advanced: bool) -> Status:
    """Desired and ready pods of each role; uids of the pods that this attempt has had running. `advanced`: a step has ended."""
    found: Status = {}
    for role, count in wanted_pods(job).items():
        pods = seen.of_role(role, plan.attempt_of(role))
        found[role] = {
            "desired": plan.replicas(role, count),
            "ready": sum(pod.ready for pod in pods),
            "updated": len(pods),
            "restarts": sum(pod.restarts for pod in pods),
            "uids": sorted(pod.uid for pod in pods if not pod.starting),
        }
        before = job.status.get(role, {}).get("restartsBefore", {})
        counts = {pod.uid: pod.restarts if advanced else min(pod.restarts, before.get(pod.uid, 0)) for pod in pods}
        if any(counts.values()):
            highest = sorted(counts, key=lambda uid: -counts[uid])[:MAX_COUNTED]
            found[role]["restartsBefore"] = {uid: counts[uid] for uid in sorted(highest) if counts[uid]}
    return found


def progress(old: Status, seen: Observed, plan: Plan) -> Status:
    """What orchestrator and trainer report; nothing when they are silent or of an old attempt."""
    status = seen.orchestrator
    if status is None or status.attempt != plan.attempt:
        return {}
    tells = status.phase in {
        "running",
        "complete",
    }  # one that has just started does not know yet what the trainer resumed at
    found: Status = {
        "step": status.step if tells else max(status.step, old.get("step", 0)),
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
        "ignoredLayers": layers(resolved.ignored_layers),
    }


def layers(reasons: Mapping[str, str]) -> list[str]:
    """Ignored layers with their reasons, those that differ in numbers only as one; as long as the API allows.

    `reasons`: module name to reason. A mixture of experts has tens of thousands of modules.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in sorted(reasons.items()):
        alike.setdefault((NUMBERED.sub("*", name), reason), []).append(name)
    lines = [
        f"{name if len(same) > 1 else same[0]}: {reason}"[: MAX_LAYER_LENGTH - 20]
        + (f" ({len(same)} layers)" if len(same) > 1 else "")
        for (name, reason), same in alike.items()
    ]
    if len(lines) <= MAX_LAYERS:
        return lines
    return [*lines[: MAX_LAYERS - 1], f"and {len(lines) - MAX_LAYERS + 1} more"]


def decimals(values: dict[str, float], keys: tuple[str, ...]) -> Status:
    """Floats as decimal strings, those that are there."""
    return {key: repr(float(f"{values[key]:.6g}")) for key in keys if key in values}


def counts(values: dict[str, float], keys: tuple[str, ...]) -> Status:
    """Whole numbers, those that are there."""
    return {key: int(values[key]) for key in keys if key in values}
