"""Who may belong to the weight-sync group, and what the orchestrator last said of the running attempt. Pure."""

from __future__ import annotations

from fp8rl_operator import names
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.protocol import GroupDocument, GroupMember, OrchestratorStatus


def current_status(memory: Memory, seen: Observed) -> OrchestratorStatus | None:
    """The orchestrator's word, if it is of this attempt."""
    status = seen.orchestrator
    return status if status is not None and status.attempt == memory.attempt else None


def group_document(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> GroupDocument | None:
    """Started pods of this attempt and its fleet, by uid, trainer first. None without an orchestrator.

    `generation` is the time in milliseconds, or one more than the orchestrator's document has: it grows also where clocks differ
    or step back.
    """
    if not any(pod.ip and not pod.starting for pod in seen.of_role(names.ORCHESTRATOR, memory.fleet_attempt)):
        return None
    engine = job.spec.inference.parallelism.tensor
    members = [
        *members_of(seen.of_role(names.TRAINER, memory.attempt), "trainer", max(1, job.spec.trainer.gpus_per_replica)),
        *members_of(seen.of_role(names.INFERENCE, memory.fleet_attempt), "inference", engine),
    ]
    held = seen.orchestrator.group_generation if seen.orchestrator is not None else 0
    return GroupDocument(
        job_uid=job.uid,
        attempt=memory.attempt,
        generation=max(int(now * 1000), held + 1),
        members=members,
        min_replicas=job.spec.inference.min_replicas,
    )


def members_of(pods: tuple[PodState, ...], role: str, world_size: int) -> list[GroupMember]:
    """Members of one role, by uid."""
    started = sorted(
        (pod for pod in pods if pod.ip and not pod.starting and pod.phase == "Running"), key=lambda p: p.uid
    )
    return [
        GroupMember.model_validate(
            {"pod": pod.name, "uid": pod.uid, "role": role, "address": pod.ip, "world_size": world_size}
        )
        for pod in started
    ]
