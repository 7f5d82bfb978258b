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
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status import next_status


@dataclass(frozen=True)
class Pass:
    """What a pass saw, decided and did. `status` is what the job's status now is."""

    seen: Observed
    plan: Plan
    outcome: Outcome
    status: dict[str, Any]


async def reconcile(cluster: Cluster, job: FP8RLJob, now: float, images: Images | None = None) -> Pass:
    """Observe, plan, build, apply, write the status. `now` in Unix seconds.

    Raises:
        ClusterError: the cluster cannot be read or written.
    """
    seen = await cluster.observe(job)
    plan = compute_plan(job, seen, now)
    outcome = Outcome()
    if not plan.hands_off:
        objects = build_objects(job, plan, seen.token or secrets.token_urlsafe(32), images)
        outcome = await cluster.apply(job, objects, plan)
    status = next_status(job, seen, plan, now)
    if status is not None:
        await cluster.write_status(job, status)
        await tell(cluster, job, plan, status)
    return Pass(seen, plan, outcome, job.status if status is None else status)


def setback(job: FP8RLJob, status: dict[str, Any]) -> str | None:
    """What is told when more steps are gone than lie between two checkpoints: the trainer did not find its newest one."""
    checkpoint = job.spec.trainer.checkpoint
    before, step = job.status.get("step", 0), status.get("step", 0)
    if before - step <= max(0, checkpoint.every_steps - 1):
        return None
    kept = checkpoint.claim_name is not None or checkpoint.volume_claim_template is not None
    way = "" if kept else "; in a cluster set trainer.checkpoint.claimName or volumeClaimTemplate, which outlive a pod"
    return (
        f"goes on at step {step}, step {before} was done: no newer checkpoint was found, trainer.checkpoint.everySteps is"
        f" {checkpoint.every_steps}{way}"
    )


async def tell(cluster: Cluster, job: FP8RLJob, plan: Plan, status: dict[str, Any]) -> None:
    """Events, after the status stands."""
    if (lost := setback(job, status)) is not None:
        await cluster.record(job, names.STEPS_LOST, lost, warning=True)
    if plan.loss is not None:
        await cluster.record(job, plan.loss.reason, plan.loss.message, warning=True)
    if plan.loss is not None and plan.verdict is None:
        await cluster.record(job, names.RESTARTING, f"attempt {plan.attempt}", warning=True)
    if plan.verdict is not None and "completionTime" not in job.status:
        reason = names.COMPLETE if plan.verdict.complete else names.FAILED
        text = f"{plan.verdict.reason}: {plan.verdict.message}"
        await cluster.record(job, reason, text, warning=not plan.verdict.complete)
