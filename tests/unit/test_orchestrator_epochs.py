"""Who forms an epoch, with which ranks, and what is done next about the group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp8rl_workers.errors import StaleError
from fp8rl_workers.orchestrator.epochs import (
    GroupView,
    NextAction,
    fits,
    form_epoch,
    in_sync,
    next_action,
    participants,
)
from fp8rl_workers.orchestrator.lineage import Lineage, Published
from fp8rl_workers.protocol import EngineState, GroupDocument, GroupMember, TrainerState


def member(pod: str, uid: str, role: str = "inference", world: int = 1) -> GroupMember:
    return GroupMember.model_validate({"pod": pod, "uid": uid, "role": role, "address": uid, "world_size": world})


DOCUMENT = GroupDocument(
    job_uid="job",
    attempt=1,
    generation=1,
    members=[member("engine-b", "2"), member("engine-a", "1"), member("trainer-0", "9", "trainer")],
)


def state(uid: str, **changes: Any) -> EngineState:
    fields = {"phase": "serving", "pod": f"pod-{uid}", "uid": uid, "epoch": 4, "version": 7}
    return EngineState.model_validate(fields | changes)


def trainer(**changes: Any) -> TrainerState:
    return TrainerState.model_validate({"job_uid": "job", "attempt": 1, "phase": "idle", "step": 3} | changes)


STATES = {"1": state("1", world_size=2), "2": state("2")}
EPOCH = form_epoch(DOCUMENT, participants(DOCUMENT, STATES, ()), 4, 29500, 5.0)
VIEW = GroupView(
    document=DOCUMENT,
    trainer=trainer(),
    epoch=EPOCH,
    newest=Published(version=7, attempt=1, step=3),
    participants=participants(DOCUMENT, STATES, ()),
    serving=frozenset({"1", "2"}),
)


def test_ranks_go_to_the_trainer_first_then_to_engines_by_uid_with_their_real_world_size() -> None:
    assert [(item.uid, item.ranks) for item in EPOCH.members] == [("9", [0]), ("1", [1, 2]), ("2", [3])]
    assert (EPOCH.world_size, EPOCH.store_host, EPOCH.epoch) == (4, "9", 4)


def test_trainers_are_ranked_by_their_ordinal() -> None:
    pods = [member(f"trainer-{number}", uid, "trainer") for number, uid in ((10, "a"), (2, "b"), (0, "c"))]
    document = DOCUMENT.model_copy(update={"members": pods})
    assert [item.pod for item in form_epoch(document, [], 1, 1, 1.0).members] == [
        "trainer-0",
        "trainer-2",
        "trainer-10",
    ]


@pytest.mark.parametrize(
    ("states", "shed", "expected"),
    [
        (STATES, (), ["1", "2"]),
        (STATES, ("1",), ["2"]),
        ({"2": STATES["2"]}, (), ["2"]),
        ({"1": state("1", phase="booting"), "2": state("2")}, (), ["2"]),
        ({"1": state("1", audit_passed=False), "2": state("2")}, (), ["2"]),
    ],
)
def test_engines_take_part_when_they_have_booted_and_are_not_shed(
    states: dict[str, EngineState], shed: tuple[str, ...], expected: list[str]
) -> None:
    assert [item.member.uid for item in participants(DOCUMENT, states, shed)] == expected


def test_an_epoch_fits_until_a_pod_changes_or_an_engine_forgets_it() -> None:
    assert fits(EPOCH, DOCUMENT, VIEW.participants)
    assert not fits(EPOCH, DOCUMENT.model_copy(update={"attempt": 2}), VIEW.participants)
    assert not fits(EPOCH, DOCUMENT, VIEW.participants[:1])
    restarted = participants(DOCUMENT, STATES | {"2": state("2", epoch=None)}, ())
    assert not fits(EPOCH, DOCUMENT, restarted)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({}, "none", ""),
        ({"document": None}, "wait", "group document"),
        ({"trainer": None}, "wait", "the trainer trainer-0 to answer"),
        ({"trainer": trainer(attempt=0)}, "wait", "the trainer of attempt 1"),
        ({"trainer": trainer(phase="loading")}, "wait", "to load the model"),
        ({"trainer": trainer(phase="training")}, "wait", "to finish step 4"),
        ({"participants": (), "unready": ("engine-a",)}, "wait", "engines to boot: engine-a"),
        ({"patient": True, "unready": ("engine-a",)}, "wait", "engines to boot: engine-a"),
        ({"patient": False, "unready": ("engine-a",)}, "none", ""),
        ({"epoch": None}, "form", "2 engines"),
        ({"participants": VIEW.participants[:1]}, "form", "1 engines"),
        ({"newest": None}, "publish", "step 3"),
        ({"newest": Published(version=7, attempt=1, step=2)}, "publish", "step 3"),
        ({"newest": Published(version=7, attempt=0, step=3)}, "publish", "step 3"),
        ({"serving": frozenset({"1"})}, "publish", "version 7 to reach engine-b"),
        ({"serving": frozenset({"1"}), "paused": frozenset({"2"})}, "none", ""),
        ({"serving": frozenset(), "paused": frozenset({"1", "2"})}, "publish", "version 7 to reach engine-a, engine-b"),
        ({"serving": frozenset(), "held": "engine-a: no memory"}, "wait", "to reach engine-a, engine-b: engine-a: no"),
        (
            {"epoch": None, "newest": None, "held": "bad digest"},
            "wait",
            "the weights of step 3 to reach the engines: bad",
        ),
        ({"held": "engine-a: no memory"}, "none", ""),
        ({"trainer": trainer(phase="training"), "stepping": 4, "serving": frozenset({"1"})}, "publish", "engine-b"),
        ({"trainer": trainer(phase="training"), "stepping": 4}, "none", ""),
        ({"trainer": trainer(phase="training", step=4), "stepping": 4}, "wait", "to finish step 4"),
    ],
)
def test_the_next_action_follows_from_what_is_seen(changes: dict[str, Any], kind: str, text: str) -> None:
    action = next_action(replace(VIEW, **changes))
    assert action.kind == kind
    assert text in action.text
    assert action == NextAction("none") or action.text


def test_the_group_is_in_sync_while_the_trainer_computes_its_next_step() -> None:
    assert in_sync(VIEW)
    assert in_sync(replace(VIEW, trainer=trainer(phase="training")))
    assert not in_sync(replace(VIEW, trainer=trainer(step=4)))
    assert not in_sync(replace(VIEW, trainer=None))
    assert not in_sync(replace(VIEW, serving=frozenset({"1"})))
    assert in_sync(replace(VIEW, serving=frozenset({"1"}), paused=frozenset({"2"})))
    assert not in_sync(replace(VIEW, participants=()))


def test_a_version_is_never_used_twice_and_knows_its_attempt() -> None:
    lineage = Lineage.of([Published(version=2, attempt=0, step=5), Published(version=1, attempt=0, step=4)])
    lineage.add(Published(version=4, attempt=1, step=4))
    assert [lineage.step_of(version, 1) for version in (1, 2, 3, 4)] == [None, None, None, 4]
    with pytest.raises(StaleError, match="version 4 was used already"):
        lineage.add(Published(version=4, attempt=1, step=5))


def test_versions_of_steps_that_the_trainer_lost_are_forgotten() -> None:
    lineage = Lineage.of(Published(version=number, attempt=0, step=number) for number in range(1, 5))
    lineage.abandon_above(2)
    assert [lineage.step_of(version, 0) for version in range(1, 5)] == [1, 2, None, None]
