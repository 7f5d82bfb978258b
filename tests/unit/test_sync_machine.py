"""The two-phase commit, as tables of events and actions."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl_workers.orchestrator import sync as machine
from fp8rl_workers.orchestrator.sync import (
    Abort,
    Commit,
    CommitFailed,
    Committed,
    Fence,
    Lost,
    Prepared,
    PrepareFailed,
    Record,
    Recorded,
    Recovery,
    Sync,
)
from fp8rl_workers.protocol import CommitReport, Decision, EngineState, Member, MemberReport, SyncReport, SyncRequest

REQUEST = SyncRequest(job_uid="job", epoch=3, sync_id=7, version=12, timeout_seconds=5.0)
DECIDED = Decision(job_uid="job", epoch=3, sync_id=7, version=12, step=4, attempt=1, digest="d", committed=True)
ABORTED = Decision(job_uid="job", epoch=3, sync_id=7, version=12, committed=False)
MEMBERS = [
    Member(pod="trainer-0", uid="t", role="trainer", address="127.0.0.1", ranks=[0]),
    Member(pod="engine-0", uid="a", role="inference", address="127.0.0.2", ranks=[1, 2]),
    Member(pod="engine-1", uid="b", role="inference", address="127.0.0.3", ranks=[3]),
]


def said(rank: int, **changes: Any) -> MemberReport:
    fields = {"sync_id": 7, "epoch": 3, "rank": rank, "state": "prepared", "version": 12, "digest": "d"}
    return MemberReport.model_validate(fields | changes)


def report(*members: MemberReport, **changes: Any) -> SyncReport:
    fields = {"sync_id": 7, "epoch": 3, "version": 12, "step": 4, "attempt": 1, "digest": "d"}
    members = members or (said(1), said(2), said(3))
    return SyncReport.model_validate(fields | {"wire_bytes": 1, "stages": {}, "members": list(members)} | changes)


def committed(uid: str, version: int = 12, digest: str = "d") -> Committed:
    return Committed(uid, CommitReport(version=version, digest=digest))


def play(*events: machine.Event) -> tuple[Sync, list[machine.Action]]:
    sync, actions = machine.begin(REQUEST, MEMBERS), []
    for event in events:
        sync, more = machine.advance(sync, event)
        actions += more
    return sync, actions


def test_a_sync_records_its_decision_then_commits_on_all_then_is_done() -> None:
    sync, actions = play(Prepared(report()), Recorded(), committed("a"), committed("b"))
    assert actions == [Record(DECIDED), Commit(DECIDED, ("a", "b"))]
    assert (sync.phase, sync.committed) == ("done", {"a", "b"})


def test_nobody_commits_before_the_decision_is_on_disk() -> None:
    sync, actions = play(Prepared(report()), committed("a"))
    assert sync.phase == "recording"
    assert actions == [Record(DECIDED)]


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([said(1), said(2)], "engine-1 rank 3: no report"),
        ([said(1), said(2), said(3, state="failed", digest="", error="wire timed out")], "wire timed out"),
        ([said(1), said(2, digest="x"), said(3)], "engine-0 rank 2: digest x, sent was d"),
        ([said(1), said(2), said(3, version=11)], "engine-1 rank 3: reports sync 7 of epoch 3"),
        ([said(1), said(2), said(3, sync_id=6)], "engine-1 rank 3: reports sync 6"),
    ],
)
def test_one_member_that_is_not_prepared_aborts_the_sync_for_all(members: list[MemberReport], why: str) -> None:
    sync, actions = play(Prepared(report(*members)))
    assert sync.phase == "aborted"
    assert why in sync.error
    assert actions == [Abort(ABORTED, ("a", "b"))]


def test_a_trainer_that_fails_or_reports_another_sync_aborts() -> None:
    assert play(PrepareFailed("gone"))[0].error == "gone"
    assert play(Prepared(report(sync_id=6)))[0].phase == "aborted"
    assert play(Prepared(report(epoch=2)))[0].phase == "aborted"


def test_a_member_lost_while_the_others_prepare_is_left_out() -> None:
    sync, actions = play(Lost("b"), Prepared(report(said(1), said(2))), Recorded(), committed("a"))
    assert sync.phase == "done"
    assert actions == [Fence("b", "lost"), Record(DECIDED), Commit(DECIDED, ("a",))]


def test_a_sync_whose_members_are_all_lost_aborts() -> None:
    sync, _ = play(Lost("a"), Lost("b"), Prepared(report()))
    assert (sync.phase, sync.error) == ("aborted", "no engine is left")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (CommitFailed("b", "no answer in 5 s"), "no answer in 5 s"),
        (Lost("b"), "lost"),
        (committed("b", digest="x"), "committed version 12 with digest x, not the decided one"),
        (committed("b", version=11), "committed version 11 with digest d, not the decided one"),
    ],
)
def test_after_the_decision_a_member_that_does_not_commit_is_fenced(event: machine.Event, reason: str) -> None:
    sync, actions = play(Prepared(report()), Recorded(), event, committed("a"))
    assert (sync.phase, sync.committed, sync.fenced) == ("done", {"a"}, {"b"})
    assert actions[-1] == Fence("b", reason)


def test_a_commit_that_comes_after_its_member_was_fenced_changes_nothing() -> None:
    sync, _ = play(Prepared(report()), Recorded(), CommitFailed("b", "late"), committed("b"), committed("a"))
    assert (sync.committed, sync.fenced) == ({"a"}, {"b"})


def test_events_after_the_end_change_nothing() -> None:
    sync, actions = play(PrepareFailed("gone"), Prepared(report()), Recorded(), committed("a"))
    assert sync.phase == "aborted"
    assert actions == [Abort(ABORTED, ("a", "b"))]


def engine(version: int | None, prepared: int | None = None) -> EngineState:
    return EngineState(
        phase="serving",
        pod="e",
        uid="u",
        epoch=3,
        version=version,
        step=4 if version == 12 else 3,
        digest="d" if version == 12 else "c",
        prepared_sync_id=prepared,
        prepared_version=12 if prepared == 7 else None,
    )


@pytest.mark.parametrize(
    ("decision", "engines", "expected"),
    [
        (None, {"a": engine(11, 7), "b": engine(11, 7)}, Recovery(ABORTED)),
        (None, {"a": engine(11), "b": engine(11)}, Recovery(ABORTED)),
        (ABORTED, {"a": engine(11, 7)}, Recovery(ABORTED)),
        (DECIDED, {"a": engine(11, 7), "b": engine(11, 7)}, Recovery(DECIDED, commit=("a", "b"))),
        (DECIDED, {"a": engine(12), "b": engine(11, 7)}, Recovery(DECIDED, commit=("b",), done=("a",))),
        (DECIDED, {"a": engine(12), "b": engine(11)}, Recovery(DECIDED, fence=("b",), done=("a",))),
        (DECIDED, {"a": engine(12), "b": engine(11, 6)}, Recovery(DECIDED, fence=("b",), done=("a",))),
        (DECIDED, {}, Recovery(DECIDED)),
        (None, {"a": engine(12), "b": engine(11, 7)}, Recovery(DECIDED, commit=("b",), done=("a",))),
    ],
)
def test_after_a_crash_a_sync_rolls_forward_if_decided_or_anybody_committed_else_it_aborts(
    decision: Decision | None, engines: dict[str, EngineState], expected: Recovery
) -> None:
    assert machine.recover(REQUEST, decision, 1, engines) == expected


def test_a_sync_that_only_the_engines_remember_is_found() -> None:
    assert machine.orphan("job", [engine(11), engine(11, 7)], 5.0) == REQUEST
    assert machine.orphan("job", [engine(11), engine(12)], 5.0) is None
