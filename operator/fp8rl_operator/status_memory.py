"""The part of the status that the plan reads back (`plan_memory`): counters, times, what was applied, refusals. Pure."""

from __future__ import annotations

from typing import Any

from fp8rl_operator import names
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import wanted_pods
from fp8rl_operator.plan_memory import from_time
from fp8rl_operator.plan_revisions import applied
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.status import MAX_COUNTED, MAX_UIDS

Status = dict[str, Any]
MAX_FAILURE = 4096
WHILE_IT_LASTS = frozenset({"suspendTime", "refusals", "nodes"})


def remembered(job: FP8RLJob, plan: Plan, now: float) -> Status:
    """The old status with what this pass has decided."""
    kept = {key: value for key, value in job.status.items() if key not in WHILE_IT_LASTS}
    new = kept | counters(job.status, plan, now) | refusals(plan)
    if plan.verdict is None and not plan.suspended:
        new["applied"] = applied(job)
    return new


def counters(old: Status, plan: Plan, now: float) -> Status:
    """Attempt, restarts and the times of the job's life."""
    found: Status = {"attempt": plan.attempt, "fleetAttempt": plan.fleet_attempt, "restarts": plan.restarts}
    found["attemptTime"] = from_time(plan.attempt_time)
    if plan.suspended:
        found["suspendTime"] = old.get("suspendTime", from_time(now))
    elif "startTime" not in old:
        found["startTime"] = from_time(now)
    elif "suspendTime" in old:
        found["suspendedSeconds"] = round(plan.suspended_seconds)
    if plan.verdict is not None and "completionTime" not in old:
        found["completionTime"] = from_time(now)
    if plan.loss is not None:
        found["lastFailure"] = {
            "reason": plan.loss.reason,
            "message": plan.loss.message[:MAX_FAILURE],
            "time": from_time(now),
            "attempt": old.get("attempt", 0),
        }
    return found


def refusals(plan: Plan) -> Status:
    """Refusals so far, and the nodes that they name; nothing where there are none."""
    known = plan.refusals
    kept: Status = {
        "rounds": known.rounds,
        "until": from_time(known.until) if known.until else None,
        "roles": list(known.roles),
        "uids": list(known.uids),
        "keptEngines": known.kept_engines,
        "enginesAvoid": list(known.engines_avoid),
    }
    nodes = [
        {
            "name": node.name,
            "refusals": node.refusals,
            "excluded": node.excluded,
            "reason": node.reason,
            "message": node.message,
            "lastTime": from_time(node.last_time),
        }
        for node in known.nodes
    ]
    found = {"refusals": {key: value for key, value in kept.items() if value}, "nodes": nodes}
    return {key: value for key, value in found.items() if value}


def roles(job: FP8RLJob, seen: Observed, plan: Plan, *, advanced: bool) -> Status:
    """Desired and ready pods of each role; uids of the pods that this attempt has had running. `advanced`: a step has ended."""
    found: Status = {}
    for role, count in wanted_pods(job).items():
        pods = seen.of_role(role, plan.attempt_of(role))
        desired = plan.replicas(role, count)
        uids = sorted(pod.uid for pod in pods if not pod.starting) if desired else []
        found[role] = {
            "desired": desired,
            "ready": sum(pod.ready for pod in pods),
            "updated": len(pods),
            "restarts": sum(pod.restarts for pod in pods),
            "uids": uids[:MAX_UIDS],
        }
        before = job.status.get(role, {}).get("restartsBefore", {})
        counts = {pod.uid: pod.restarts if advanced else min(pod.restarts, before.get(pod.uid, 0)) for pod in pods}
        if any(counts.values()):
            highest = sorted(counts, key=lambda uid: -counts[uid])[:MAX_COUNTED]
            found[role]["restartsBefore"] = {uid: counts[uid] for uid in sorted(highest) if counts[uid]}
    engines = found[names.INFERENCE]
    return found | {"engines": f"{engines['ready']}/{engines['desired']}"}
