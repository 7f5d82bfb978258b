"""The status that the operator mirrors: what is, and always what is waited for. Pure over the parts' fields."""

from __future__ import annotations

from typing import Literal

from fp8rl_workers.orchestrator.parts import Parts
from fp8rl_workers.orchestrator.trouble import one_line
from fp8rl_workers.protocol import EngineState, Epoch, GroupMember, MemberStatus, OrchestratorStatus

MemberPhase = Literal["waiting", "booting", "joining", "serving", "fenced", "lost"]

MISMATCH_KEYS = {"kl": "mismatch_kl", "logprobDiffP99": "logprob_diff_p99", "maskedRatio": "masked_ratio"}


def build_status(parts: Parts) -> OrchestratorStatus:
    """The whole status."""
    progress, group, epoch = parts.progress, parts.group, parts.group.epoch
    metrics = progress.metrics
    off_policy = {"dropped": float(sum(parts.rollouts.counts.dropped.values()))}
    if "off_policy_max" in metrics:
        off_policy |= {"max": metrics["off_policy_max"], "mean": metrics["off_policy_mean"]}
    newest, document = parts.lineage.newest, parts.members.document
    return OrchestratorStatus(
        job_uid=parts.config.uid,
        attempt=progress.attempt,
        phase=progress.phase,
        step=progress.step,
        steps=progress.steps,
        version=newest.version if newest is not None else 0,
        epoch=parts.journal.data.epoch_number,
        world_size=epoch.world_size if epoch is not None else 0,
        group_attempt=document.attempt if document is not None else 0,
        group_generation=document.generation if document is not None else 0,
        members=member_statuses(parts),
        resolved=parts.members.resolved,
        waiting_for=waiting_for(parts),
        last_step_time=progress.last_step_time,
        engines_ready_time=progress.engines_ready_time,
        weights_in_sync=group.in_sync,
        mismatch={name: metrics[key] for name, key in MISMATCH_KEYS.items() if key in metrics},
        off_policy=off_policy,
        progress=progress.figures(),
        warnings=list(progress.warnings.values()),
        reason=progress.reason,
        message=progress.message,
    )


def waiting_for(parts: Parts) -> str:
    """What the run waits for now; empty only when it is over."""
    progress = parts.progress
    if progress.phase in {"complete", "failed"}:
        return ""
    if parts.group.waiting_for:
        return parts.group.waiting_for
    serving = sum(item.serving for item in parts.dispatcher.replicas.values())
    if serving < parts.min_replicas:
        return f"{parts.min_replicas} serving engines (inference.minReplicas), {serving} serve"
    if progress.activity.startswith("rollouts"):
        return f"{progress.activity}: {parts.rollouts.num_queued} of {parts.config.batch_size} samples are finished"
    return progress.activity or "the run to start"


def member_statuses(parts: Parts) -> list[MemberStatus]:
    """Every pod of the operator's document as the orchestrator sees it."""
    document, epoch = parts.members.document, parts.group.epoch
    if document is None:
        return []
    joined = {item.uid: item for item in epoch.members} if epoch is not None else {}
    return [
        MemberStatus(
            pod=item.pod,
            uid=item.uid,
            role=item.role,
            ranks=joined[item.uid].ranks if item.uid in joined else [],
            transport=joined[item.uid].transport if item.uid in joined else "",
            version=version_of(parts, item),
            state=trainer_phase(parts) if item.role == "trainer" else engine_phase(parts, item, epoch),
            message=message_of(parts, item),
        )
        for item in document.members
    ]


def version_of(parts: Parts, member: GroupMember) -> int | None:
    """The version that a member serves; the trainer's is the newest published one."""
    if member.role == "trainer":
        newest = parts.lineage.newest
        return newest.version if newest is not None else None
    replica = parts.dispatcher.replicas.get(member.uid)
    return replica.version if replica is not None else None


def message_of(parts: Parts, member: GroupMember) -> str:
    """The last error of a member, in one line; empty when nothing is wrong."""
    if member.role == "trainer":
        trainer = parts.members.trainer_state
        return one_line(trainer.message) if trainer is not None else ""
    failed, state = parts.group.trouble.members.get(member.uid), parts.members.states.get(member.uid)
    return failed.error if failed is not None else one_line(state.error) if state is not None else ""


def trainer_phase(parts: Parts) -> MemberPhase:
    """The trainer's state in a member's words."""
    state = parts.members.trainer_state
    if state is None:
        return "waiting" if parts.progress.phase == "waiting" else "lost"
    if state.phase == "failed":
        return "lost"
    return "booting" if state.phase == "loading" else "serving"


def engine_phase(parts: Parts, member: GroupMember, epoch: Epoch | None) -> MemberPhase:
    """An engine's state in a member's words."""
    state: EngineState | None = parts.members.states.get(member.uid)
    replica = parts.dispatcher.replicas.get(member.uid)
    served = replica is not None and replica.version is not None
    if state is None:
        return "lost" if served else "booting"
    if state.phase != "serving":
        return "waiting" if state.phase == "waiting" else "booting"
    if replica is not None and replica.serving:
        return "serving"
    if replica is not None and (served or replica.fenced):
        return "fenced"
    return "joining" if epoch is not None else "booting"
