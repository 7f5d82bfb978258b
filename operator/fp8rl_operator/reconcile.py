"""One pass over one job, the same for every event, for the timer and for every world."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.cluster import Cluster, Outcome
from fp8rl_operator.manifests import Images, build_objects
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import Plan, compute_plan
from fp8rl_operator.plan_memory import condition
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status import next_status
from fp8rl_operator.status_events import events


@dataclass(frozen=True)
class Pass:
    """What a pass saw, decided and did. `status` is what the job's status now is."""

    seen: Observed
    plan: Plan
    outcome: Outcome
    status: dict[str, Any]


async def reconcile(
    cluster: Cluster, job: FP8RLJob, now: float, images: Images | None = None, operator_namespace: str | None = None
) -> Pass:
    """Observe, plan, build, apply, write the status. `now` in Unix seconds. For the rest see `build_objects`.

    A decision that no later pass could find out again is written before anything is done for it: an operator that is killed
    in between carries it out. What that apply found is told by the next pass.

    Raises:
        ClusterError: the cluster cannot be read or written.
    """
    seen = await cluster.observe(job)
    plan = compute_plan(job, seen, now)
    if plan.hands_off:
        return Pass(seen, plan, Outcome(), job.status)
    first = decides(job, plan)
    status = await written(cluster, job, plan, next_status(job, seen, plan, now)) if first else job.status
    token = seen.token or secrets.token_urlsafe(32)
    objects = build_objects(job, plan, token, images, operator_namespace=operator_namespace)
    outcome = await cluster.apply(job, objects, plan)
    if not first:
        status = await written(cluster, job, plan, next_status(job, seen, plan, now, outcome))
    return Pass(seen, plan, outcome, status)


def decides(job: FP8RLJob, plan: Plan) -> bool:
    """Whether the plan says what no later pass could find out again: a new attempt, an end, a suspension, counted refusals."""
    old = job.status
    attempts = (old.get("attempt", 0), old.get("fleetAttempt", old.get("attempt", 0)))
    ends = plan.verdict is not None and "completionTime" not in old
    suspends = plan.suspended and condition(old, names.SUSPENDED) is None
    return ends or suspends or plan.refused or (plan.attempt, plan.fleet_attempt) != attempts


async def written(cluster: Cluster, job: FP8RLJob, plan: Plan, status: dict[str, Any] | None) -> dict[str, Any]:
    """Write a status if there is something to write, and then tell what is new; what the job's status now is."""
    if status is None:
        return job.status
    await cluster.write_status(job, status)
    for told in events(job, plan, status):
        await cluster.record(job, told.reason, told.message, warning=told.warning)
    return status
