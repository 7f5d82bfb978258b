"""What people are told by an Event, each thing once: the difference of two statuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.plan_memory import condition
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob

HINDRANCES = frozenset(
    {
        names.NODE_REFUSED,
        names.NAME_CLASH,
        names.APPLY_FAILED,
        names.INVALID_OBJECT,
        names.QUOTA_EXCEEDED,
        names.ADMISSION_REFUSED,
        names.IMAGE_PULL,
        names.UNSCHEDULABLE,
        names.VOLUME_NOT_BOUND,
        names.VOLUME_NOT_MOUNTED,
        names.CONTAINER_CONFIG,
        names.HOST_OUT_OF_MEMORY,
    }
)

Status = Mapping[str, Any]


@dataclass(frozen=True)
class Told:
    """One Event."""

    reason: str
    message: str
    warning: bool = False


def events(job: FP8RLJob, plan: Plan, new: Status) -> list[Told]:
    """Events of a pass that has written `new` over the job's status."""
    old = job.status
    told = [*setback(job, new), *losses(plan), *changes(plan), *life(old, new, plan), *excluded(old, new)]
    return [*told, *hindrances(old, new), *scaled(old, new, plan), *ending(old, plan)]


def invalid_event(old: Status, new: Status) -> Told | None:
    """What is told of a spec that `status_invalid` refuses; None if the same was told before."""
    now, was = said(new, names.READY), said(old, names.READY)
    if (now["reason"], now["message"]) == (was.get("reason"), was.get("message")):
        return None
    return Told(now["reason"], now["message"], warning=True)


def setback(job: FP8RLJob, new: Status) -> list[Told]:
    """More steps are gone than lie between two checkpoints: the trainer did not find its newest one."""
    checkpoint = job.spec.trainer.checkpoint
    before, step = job.status.get("step", 0), new.get("step", 0)
    if before - step <= max(0, checkpoint.every_steps - 1):
        return []
    kept = checkpoint.claim_name is not None or checkpoint.volume_claim_template is not None
    way = "" if kept else "; in a cluster set trainer.checkpoint.claimName or volumeClaimTemplate, which outlive a pod"
    text = (
        f"goes on at step {step}, step {before} was done: no newer checkpoint was found, trainer.checkpoint.everySteps is"
        f" {checkpoint.every_steps}{way}"
    )
    return [Told(names.STEPS_LOST, text, warning=True)]


def losses(plan: Plan) -> list[Told]:
    """A loss, and the attempt that it costs."""
    if plan.loss is None:
        return []
    lost = Told(plan.loss.reason, plan.loss.message, warning=True)
    return (
        [lost] if plan.verdict is not None else [lost, Told(names.RESTARTING, f"attempt {plan.attempt}", warning=True)]
    )


def changes(plan: Plan) -> list[Told]:
    """A new attempt because the spec has changed."""
    return [Told(names.SPEC_CHANGED, plan.waiting.message)] if plan.changed and plan.waiting is not None else []


def life(old: Status, new: Status, plan: Plan) -> list[Told]:
    """Start, suspension, resumption, the first step."""
    told = []
    if "startTime" not in old and "startTime" in new and plan.verdict is None:
        told.append(Told(names.STARTED, "the job's pods are being made"))
    elif plan.resumed:
        told.append(Told(names.RESUMED, f"attempt {plan.attempt} goes on from the newest checkpoint"))
    if plan.suspended and condition(old, names.SUSPENDED) is None:
        told.append(Told(names.SUSPENDED, "spec.suspend is true: the pods go, the checkpoints stay"))
    ready, was = said(new, names.READY), said(old, names.READY)
    if ready.get("reason") == names.RUNNING != was.get("reason"):
        told.append(Told(names.RUNNING, ready["message"]))
    return told


def excluded(old: Status, new: Status) -> list[Told]:
    """Nodes that the job keeps away from as of now."""
    before = {item["name"] for item in old.get("nodes", ()) if item["excluded"]}
    return [
        Told(
            names.NODE_EXCLUDED,
            f"node {item['name']} refused pods {item['refusals']} times and is excluded for this job: {item['reason']}:"
            f" {item['message']}; once it is repaired, suspend and resume the job to use it again",
            warning=True,
        )
        for item in new.get("nodes", ())
        if item["excluded"] and item["name"] not in before
    ]


def hindrances(old: Status, new: Status) -> list[Told]:
    """Something has come in the way."""
    now, was = said(new, names.READY), said(old, names.READY)
    if now.get("reason") not in HINDRANCES or now["reason"] == was.get("reason"):
        return []
    return [Told(now["reason"], now["message"], warning=True)]


def scaled(old: Status, new: Status, plan: Plan) -> list[Told]:
    """Engines are added or taken away while the job runs."""
    before, after = (status.get(names.INFERENCE, {}).get("desired", 0) for status in (old, new))
    moved = plan.attempt == old.get("attempt") and plan.verdict is None and not plan.suspended
    if not moved or not before or not after or before == after:
        return []
    return [Told(names.SCALED, f"engines: {before} -> {after}")]


def ending(old: Status, plan: Plan) -> list[Told]:
    """The end of the job."""
    if plan.verdict is None or "completionTime" in old:
        return []
    reason = names.COMPLETE if plan.verdict.complete else names.FAILED
    return [Told(reason, f"{plan.verdict.reason}: {plan.verdict.message}", warning=not plan.verdict.complete)]


def said(status: Status, kind: str) -> Mapping[str, Any]:
    """A condition, whatever its status; empty where it is not told."""
    found: Mapping[str, Any] = next((item for item in status.get("conditions", ()) if item["type"] == kind), {})
    return found
