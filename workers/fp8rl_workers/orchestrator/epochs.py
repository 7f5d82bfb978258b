"""Membership of the weight-sync group: who forms the next epoch, with which ranks, and what is to be done next. Pure.

The operator's document says who may belong; what the engines report says who can. Ranks: the trainer's pods first, by
their ordinal (the first hosts the store), then engines by pod UID; world sizes are the engines' real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fp8rl_workers.orchestrator.lineage import Published
from fp8rl_workers.places import Transport
from fp8rl_workers.protocol import EngineState, Epoch, GroupDocument, GroupMember, Member, TrainerState


@dataclass(frozen=True)
class Participant:
    """An engine that can belong to an epoch now."""

    member: GroupMember
    state: EngineState


@dataclass(frozen=True)
class GroupView:
    """All that the next action depends on.

    `trainer` is None while it does not answer; `serving`: uids of replicas that serve `newest` and are not fenced;
    `unready`: engines of the document that do not take part; `patient`: the group has not served in this
    attempt, and engines that are still booting are waited for; `paused`: uids that are left alone for a while after
    they failed, as long as others serve; `held`: why nothing is tried now, empty when something may be; `stepping`: the
    step that the trainer was told to take, until it says that it has: before its optimizer the old weights can be sent.
    """

    document: GroupDocument | None
    trainer: TrainerState | None
    epoch: Epoch | None
    newest: Published | None
    participants: tuple[Participant, ...] = ()
    serving: frozenset[str] = frozenset()
    unready: tuple[str, ...] = ()
    patient: bool = False
    paused: frozenset[str] = frozenset()
    held: str = ""
    stepping: int | None = None


@dataclass(frozen=True)
class NextAction:
    """What to do about the group; `text` says what is waited for or why."""

    kind: Literal["wait", "form", "publish", "none"]
    text: str = ""


def trainers_of(document: GroupDocument) -> list[GroupMember]:
    """The trainer's pods, by ordinal: the first speaks for the trainer and hosts the store."""
    return sorted((item for item in document.members if item.role == "trainer"), key=lambda item: ordinal(item.pod))


def ordinal(pod: str) -> tuple[int, str]:
    """Sort key of a StatefulSet's pod: its number, then its name."""
    match = re.search(r"-(\d+)$", pod)
    return (int(match.group(1)) if match else 0, pod)


def participants(
    document: GroupDocument, states: Mapping[str, EngineState], shed: Iterable[str]
) -> tuple[Participant, ...]:
    """Engines of the document that have booted and are not shed, by pod UID."""
    away = set(shed)
    engines = sorted((item for item in document.members if item.role == "inference"), key=lambda item: item.uid)
    return tuple(
        Participant(item, states[item.uid])
        for item in engines
        if item.uid in states and item.uid not in away and can_join(states[item.uid])
    )


def can_join(state: EngineState) -> bool:
    """Whether an engine has booted with the layers quantized that the plan says."""
    return state.phase == "serving" and state.audit_passed


def form_epoch(
    document: GroupDocument,
    members: Iterable[Participant],
    number: int,
    port: int,
    timeout_seconds: float,
    *,
    transport: Transport = "gloo",
) -> Epoch:
    """The epoch of these members: consecutive ranks, trainer first."""
    ranked: list[Member] = []
    rank = 0
    worlds = [(item, item.world_size) for item in trainers_of(document)]
    worlds += [(item.member, item.state.world_size) for item in members]
    for item, size in worlds:
        ranks = list(range(rank, rank + size))
        ranked.append(
            Member(pod=item.pod, uid=item.uid, role=item.role, address=item.address, ranks=ranks, transport=transport)
        )
        rank += size
    return Epoch(
        job_uid=document.job_uid,
        attempt=document.attempt,
        epoch=number,
        world_size=rank,
        store_host=ranked[0].address,
        store_port=port,
        timeout_seconds=timeout_seconds,
        members=ranked,
    )


def fits(epoch: Epoch, document: GroupDocument, members: Iterable[Participant]) -> bool:
    """Whether an epoch is still the right one: same attempt, same pods, and every engine says it is in it."""
    engines = list(members)
    wanted = [item.uid for item in trainers_of(document)] + [item.member.uid for item in engines]
    return (
        epoch.attempt == document.attempt
        and [item.uid for item in epoch.members] == wanted
        and all(item.state.epoch == epoch.epoch for item in engines)
    )


def next_action(view: GroupView) -> NextAction:
    """The next action about the group, or what is waited for."""
    document, trainer = view.document, view.trainer
    if document is None:
        return NextAction("wait", "the operator's group document (PUT /v1/group)")
    missing = trainer_missing(document, trainer, view.stepping)
    if missing or trainer is None:
        return NextAction("wait", missing)
    if not view.participants or (view.patient and view.unready):
        names = ", ".join(view.unready) or "any engine in the group document"
        return NextAction("wait", f"engines to boot: {names}")
    return _act(view, document, trainer)


def trainer_missing(document: GroupDocument, trainer: TrainerState | None, stepping: int | None) -> str:
    """What the group waits for on the trainer's side; empty when it is of the document's attempt and can send its weights."""
    pods = trainers_of(document)
    if not pods:
        return "a trainer in the operator's group document"
    if trainer is None:
        return f"the trainer {pods[0].pod} to answer"
    if trainer.attempt < document.attempt:
        return f"the trainer of attempt {document.attempt} (it is at {trainer.attempt})"
    if trainer.phase == "training" and stepping is not None and trainer.step < stepping:
        return ""
    number = trainer.step + 1 if stepping is None else stepping
    waits = {"loading": "load the model", "training": f"finish step {number}", "failed": "be restarted"}
    return f"the trainer {pods[0].pod} to {waits[trainer.phase]}" if trainer.phase in waits else ""


def in_sync(view: GroupView) -> bool:
    """Whether every engine that takes part serves what the trainer holds, also while it takes its next step."""
    return view.trainer is not None and bool(view.participants) and not _unpublished(view, view.trainer)


def _act(view: GroupView, document: GroupDocument, trainer: TrainerState) -> NextAction:
    action = NextAction("none")
    if text := _unpublished(view, trainer):
        action = NextAction("publish", text)
    if view.epoch is None or not fits(view.epoch, document, view.participants):
        joining = f"{len(view.participants)} engines to join the weight-sync group"
        action = NextAction("form", f"{action.text}: {joining}" if action.text else joining)
    if view.held and action.kind != "none":
        return NextAction("wait", f"{text or action.text}: {view.held}")
    return action


def _unpublished(view: GroupView, trainer: TrainerState) -> str:
    """Which weights have yet to reach whom, empty when none."""
    newest = view.newest
    if newest is None or (newest.attempt, newest.step) != (trainer.attempt, trainer.step):
        return f"the weights of step {trainer.step} to reach the engines"
    behind = [item.member for item in view.participants if item.member.uid not in view.serving]
    if len(behind) < len(view.participants):
        behind = [member for member in behind if member.uid not in view.paused]
    return f"version {newest.version} to reach {', '.join(member.pod for member in behind)}" if behind else ""
