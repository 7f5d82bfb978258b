"""The two-phase commit of a weight sync as a state machine: `advance(sync, event) -> (sync, actions)`. Pure.

    preparing --every member prepared with equal (version, digest)--> recording --on disk--> committing --> done
        |                                                               (from here it only rolls forward)
        +--any member failed, or nobody is left--> aborted: the old version goes on serving

A member that is lost while the others prepare is left out; the sync goes on without it. After the recorded decision a
member that does not commit is fenced. `recover` says what a restarted orchestrator does: forward when a decision is
recorded or any engine serves the version, else abort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fp8rl_workers.protocol import CommitReport, Decision, EngineState, Member, SyncReport, SyncRequest

Phase = Literal["preparing", "recording", "committing", "done", "aborted"]


@dataclass(frozen=True)
class Prepared:
    """The trainer reports the end of the prepare phase."""

    report: SyncReport


@dataclass(frozen=True)
class PrepareFailed:
    """The trainer refused, failed or did not answer."""

    error: str


@dataclass(frozen=True)
class Recorded:
    """The decision is on disk."""


@dataclass(frozen=True)
class Committed:
    """An engine answered a commit."""

    uid: str
    report: CommitReport


@dataclass(frozen=True)
class CommitFailed:
    """An engine refused a commit or did not answer in time."""

    uid: str
    error: str


@dataclass(frozen=True)
class Lost:
    """An engine is gone."""

    uid: str


Event = Prepared | PrepareFailed | Recorded | Committed | CommitFailed | Lost


@dataclass(frozen=True)
class Record:
    """Write the decision to disk, then say Recorded."""

    decision: Decision


@dataclass(frozen=True)
class Commit:
    """Send the decision to these engines (uids) and to the trainer."""

    decision: Decision
    uids: tuple[str, ...]


@dataclass(frozen=True)
class Abort:
    """Tell trainer and engines to forget what they prepared."""

    decision: Decision
    uids: tuple[str, ...]


@dataclass(frozen=True)
class Fence:
    """Send no requests to this engine until it has been sent the current version again."""

    uid: str
    reason: str


Action = Record | Commit | Abort | Fence


@dataclass(frozen=True)
class Sync:
    """One sync. Sets hold uids of engines; `faults`: uid -> why it did not prepare or commit."""

    request: SyncRequest
    members: tuple[Member, ...]
    phase: Phase = "preparing"
    decision: Decision | None = None
    committed: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    faults: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def present(self) -> tuple[Member, ...]:
        """Members that are not lost."""
        return tuple(member for member in self.members if member.uid not in self.lost)


def begin(request: SyncRequest, members: Iterable[Member]) -> Sync:
    """A sync at its start; only engines are asked to commit."""
    return Sync(request, tuple(member for member in members if member.role == "inference"))


def advance(sync: Sync, event: Event) -> tuple[Sync, tuple[Action, ...]]:
    """The state after `event`, and what is to be done. Events that come too late change nothing."""
    match sync.phase, event:
        case _, Lost(uid):
            return _lose(sync, uid)
        case "preparing", Prepared(report):
            return _judge(sync, report)
        case "preparing", PrepareFailed(error):
            return _abort(sync, error)
        case "recording", Recorded():
            return _release(sync)
        case "committing", Committed() | CommitFailed():
            return _answered(sync, event)
    return sync, ()


def unprepared(request: SyncRequest, members: Sequence[Member], report: SyncReport) -> dict[str, str]:
    """Members that did not report (version, digest) of the offer on every rank: uid -> why."""
    by_rank = {item.rank: item for item in report.members}
    faults: dict[str, str] = {}
    for member in members:
        for rank in member.ranks:
            said = by_rank.get(rank)
            if said is None:
                faults[member.uid] = f"rank {rank}: no report"
            elif said.state != "prepared":
                faults[member.uid] = f"rank {rank}: {said.error or said.state}"
            elif (said.sync_id, said.epoch, said.version) != (request.sync_id, request.epoch, request.version):
                faults[member.uid] = f"rank {rank}: reports sync {said.sync_id} of epoch {said.epoch}"
            elif said.digest != report.digest:
                faults[member.uid] = f"rank {rank}: digest {said.digest}, sent was {report.digest}"
    return faults


def decision_of(
    request: SyncRequest, *, committed: bool, step: int = 0, attempt: int = 0, digest: str = ""
) -> Decision:
    """The decision about a request."""
    return Decision(
        job_uid=request.job_uid,
        epoch=request.epoch,
        sync_id=request.sync_id,
        version=request.version,
        step=step,
        attempt=attempt,
        digest=digest,
        committed=committed,
    )


def _judge(sync: Sync, report: SyncReport) -> tuple[Sync, tuple[Action, ...]]:
    request = sync.request
    if (report.sync_id, report.epoch, report.version) != (request.sync_id, request.epoch, request.version):
        return _abort(sync, f"the trainer reports sync {report.sync_id} of epoch {report.epoch}, not this one")
    faults = unprepared(request, sync.present, report)
    if faults or not sync.present:
        words = [f"{member.pod} {faults[member.uid]}" for member in sync.present if member.uid in faults]
        return _abort(replace(sync, faults=faults), "; ".join(words) or "no engine is left")
    decision = decision_of(request, committed=True, step=report.step, attempt=report.attempt, digest=report.digest)
    return replace(sync, phase="recording", decision=decision), (Record(decision),)


def _abort(sync: Sync, error: str) -> tuple[Sync, tuple[Action, ...]]:
    decision = decision_of(sync.request, committed=False)
    uids = tuple(member.uid for member in sync.present)
    return replace(sync, phase="aborted", decision=decision, error=error), (Abort(decision, uids),)


def _release(sync: Sync) -> tuple[Sync, tuple[Action, ...]]:
    uids = tuple(member.uid for member in sync.present)
    if sync.decision is None or not uids:
        return _settle(replace(sync, phase="committing"), ())
    return replace(sync, phase="committing"), (Commit(sync.decision, uids),)


def _lose(sync: Sync, uid: str) -> tuple[Sync, tuple[Action, ...]]:
    if uid not in {member.uid for member in sync.present}:
        return sync, ()
    gone = replace(sync, lost=sync.lost | {uid})
    if sync.phase == "committing" and uid not in sync.committed:
        return _fence(gone, uid, "lost")
    return gone, (Fence(uid, "lost"),)


def _answered(sync: Sync, event: Committed | CommitFailed) -> tuple[Sync, tuple[Action, ...]]:
    decision = sync.decision
    if decision is None or event.uid in sync.fenced:
        return sync, ()
    if isinstance(event, CommitFailed):
        return _fence(sync, event.uid, event.error)
    if (event.report.version, event.report.digest) != (decision.version, decision.digest):
        why = f"committed version {event.report.version} with digest {event.report.digest}, not the decided one"
        return _fence(sync, event.uid, why)
    return _settle(replace(sync, committed=sync.committed | {event.uid}), ())


def _fence(sync: Sync, uid: str, reason: str) -> tuple[Sync, tuple[Action, ...]]:
    faults = sync.faults if uid in sync.lost else {**sync.faults, uid: reason}
    return _settle(replace(sync, fenced=sync.fenced | {uid}, faults=faults), (Fence(uid, reason),))


def _settle(sync: Sync, actions: tuple[Action, ...]) -> tuple[Sync, tuple[Action, ...]]:
    open_ones = {member.uid for member in sync.present} - sync.committed - sync.fenced
    return (sync if open_ones else replace(sync, phase="done")), actions


@dataclass(frozen=True)
class Recovery:
    """What to do about a sync that a crash interrupted. `commit`, `fence`, `done`: uids of engines."""

    decision: Decision
    commit: tuple[str, ...] = ()
    fence: tuple[str, ...] = ()
    done: tuple[str, ...] = ()


def recover(request: SyncRequest, decision: Decision | None, attempt: int, engines: dict[str, EngineState]) -> Recovery:
    """Roll forward when a decision is recorded or any engine serves the version, else abort.

    Args:
        request: The sync that was under way.
        decision: What the disk says was decided, if anything.
        attempt: The trainer's attempt; used when an engine committed but the decision was lost with its disk.
        engines: State of the engines that answer, by uid.
    """
    done = tuple(uid for uid, state in engines.items() if state.version == request.version)
    if decision is None and done:
        seen = engines[done[0]]
        decision = decision_of(request, committed=True, step=seen.step or 0, attempt=attempt, digest=seen.digest or "")
    if decision is None or not decision.committed:
        return Recovery(decision_of(request, committed=False))
    others = [uid for uid in engines if uid not in done]
    ready = tuple(uid for uid in others if engines[uid].prepared_sync_id == request.sync_id)
    return Recovery(decision, ready, tuple(uid for uid in others if uid not in ready), done)


def orphan(job_uid: str, engines: Iterable[EngineState], timeout_seconds: float) -> SyncRequest | None:
    """The sync that engines hold prepared although this orchestrator's disk knows of none."""
    for state in engines:
        if state.prepared_sync_id is None or state.prepared_version is None or state.epoch is None:
            continue
        if state.prepared_version != state.version:
            return SyncRequest(
                job_uid=job_uid,
                epoch=state.epoch,
                sync_id=state.prepared_sync_id,
                version=state.prepared_version,
                timeout_seconds=timeout_seconds,
            )
    return None
