"""Acts on the sync state machine: sends what the trainer holds to all engines of an epoch, as one new version.

One operation for the first weights, for each step, for a replica that joins and for one that must be healed. The decision
is on disk before the first commit; each engine then serves the version or is fenced within `timeout_seconds`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fp8rl_workers.errors import StaleError, WorkerError
from fp8rl_workers.orchestrator import sync as machine
from fp8rl_workers.orchestrator.client import Engine, PeerLostError, Trainer
from fp8rl_workers.orchestrator.dispatch import Dispatcher
from fp8rl_workers.orchestrator.journal import Journal, SyncEntry
from fp8rl_workers.orchestrator.lineage import Lineage, Published
from fp8rl_workers.orchestrator.members import Members
from fp8rl_workers.protocol import CommitReport, Decision, Epoch, SyncReport, SyncRequest

RETRY_SECONDS = 0.2
SENDING_SECONDS = 0.01
LOOK_SECONDS = 1.0


@dataclass
class Outcome:
    """How a sync ended. Seconds of the whole, by stage (they add up to it), and of the longest pause of an engine's loop."""

    sync: machine.Sync
    trainer_pod: str
    report: SyncReport | None = None
    trainer_lost: bool = False
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    paused_seconds: float = 0.0

    @property
    def published(self) -> bool:
        """Whether an engine serves the version."""
        return bool(self.sync.committed)

    @property
    def errors(self) -> dict[str, str]:
        """Why it failed, by pod; empty when it did not, but for engines that were lost."""
        pods = {member.uid: member.pod for member in self.sync.members}
        faults = {pods[uid]: why for uid, why in self.sync.faults.items()}
        if faults or self.published:
            return faults
        lost = [pods[uid] for uid in self.sync.lost]
        return dict.fromkeys(lost or [self.trainer_pod], self.sync.error or "was lost")


@dataclass
class Conductor:
    """Conducts one sync at a time (the caller holds the lock)."""

    journal: Journal
    lineage: Lineage
    members: Members
    dispatcher: Dispatcher
    on_decided: Callable[[], None]
    on_sending: Callable[[], None] = lambda: None

    async def publish(self, epoch: Epoch, attempt: int, known_version: int) -> Outcome:
        """Send the trainer's weights to the epoch's engines under a version that was never used."""
        trainer = self.members.trainer
        if trainer is None:
            raise PeerLostError("the trainer is not in the operator's group document")
        request = self._begin(epoch, attempt, known_version)
        started = time.monotonic()
        outcome = Outcome(machine.begin(request, epoch.members), epoch.members[0].pod)
        events = await self._prepare(outcome, trainer)
        prepared = time.monotonic()
        await self._drive(outcome, trainer, events)
        self._finish(outcome, started, prepared)
        return outcome

    async def _prepare(self, outcome: Outcome, trainer: Trainer) -> list[machine.Event]:
        """The events of the prepare phase. A member lost meanwhile ends it at once: the others may wait for its bytes."""
        post = asyncio.create_task(trainer.sync(outcome.sync.request))
        try:
            await asyncio.wait({post}, timeout=SENDING_SECONDS)
            self.on_sending()
            while not (await asyncio.wait({post}, timeout=LOOK_SECONDS))[0]:
                await self.members.poll()
                if gone := self._gone(outcome.sync):
                    await self._tell(trainer, machine.decision_of(outcome.sync.request, committed=False))
                    pods = ", ".join(member.pod for member in outcome.sync.members if member.uid in gone)
                    return [*map(machine.Lost, gone), machine.PrepareFailed(f"{pods} was lost while it prepared")]
            outcome.report = post.result()
        except WorkerError as error:
            outcome.trainer_lost = isinstance(error, PeerLostError) and not error.late
            return [machine.PrepareFailed(str(error))]
        finally:
            post.cancel()
        return [*map(machine.Lost, self._gone(outcome.sync)), machine.Prepared(outcome.report)]

    def _gone(self, sync: machine.Sync) -> list[str]:
        return [member.uid for member in sync.members if self.members.is_lost(member.uid)]

    async def recover(self, found: machine.Recovery, seconds: float) -> None:
        """Carry out what a restarted orchestrator owes to a sync that it left behind."""
        trainer, decision = self.members.trainer, found.decision
        if decision.committed:
            self._decide(decision)
            for uid in found.fence:
                self.dispatcher.fence(uid, "missed the commit")
            for uid in found.done:
                await self.dispatcher.serve(uid, decision.version)
            await asyncio.gather(*(self._commit(uid, decision, seconds) for uid in found.commit))
        else:
            await asyncio.gather(*(self._abort(engine, decision) for engine in self.members.engines.values()))
        if trainer is not None:
            await self._tell(trainer, decision)
        self.journal.save(sync=None)

    def _begin(self, epoch: Epoch, attempt: int, known_version: int) -> SyncRequest:
        data = self.journal.data
        seen = [state.version or 0 for state in self.members.states.values()]
        request = SyncRequest(
            job_uid=epoch.job_uid,
            epoch=epoch.epoch,
            sync_id=data.sync_id + 1,
            version=max([data.version, known_version, *seen]) + 1,
            timeout_seconds=epoch.timeout_seconds,
        )
        entry = SyncEntry(request=request, attempt=attempt)
        self.journal.save(sync=entry, version=request.version, sync_id=request.sync_id)
        return request

    async def _drive(self, outcome: Outcome, trainer: Trainer, events: list[machine.Event]) -> None:
        while events:
            outcome.sync, actions = machine.advance(outcome.sync, events.pop(0))
            for action in actions:
                events += await self._act(outcome, trainer, action)

    async def _act(self, outcome: Outcome, trainer: Trainer, action: machine.Action) -> list[machine.Event]:
        match action:
            case machine.Record(decision):
                self._decide(decision)
                return [machine.Recorded()]
            case machine.Commit(decision, uids):
                seconds = outcome.sync.request.timeout_seconds
                told = asyncio.create_task(self._tell(trainer, decision))
                said = await asyncio.gather(*(self._commit(uid, decision, seconds) for uid in uids))
                await told
                pauses = [event.report.paused_seconds for event in said if isinstance(event, machine.Committed)]
                outcome.paused_seconds = max(pauses, default=0.0)
                return list(said)
            case machine.Abort(decision, uids):
                engines = [self.members.engines[uid] for uid in uids if uid in self.members.engines]
                calls = [self._abort(engine, decision) for engine in engines]
                await asyncio.gather(self._tell(trainer, decision), *calls)
            case machine.Fence(uid, reason):
                self.dispatcher.fence(uid, reason)
        return []

    def _decide(self, decision: Decision) -> None:
        entry = self.journal.data.sync
        assert entry is not None
        published = Published(
            version=decision.version, attempt=decision.attempt, step=decision.step, digest=decision.digest
        )
        newest = self.lineage.newest
        if newest is None or newest.version < published.version:
            self.lineage.add(published)
        kept = list(self.lineage.entries.values())
        self.journal.save(sync=entry.model_copy(update={"decision": decision}), published=kept)
        self.on_decided()

    async def _commit(self, uid: str, decision: Decision, seconds: float) -> machine.Event:
        """Commit on one engine; an engine that has left the group document is lost, and no fault."""
        deadline = time.monotonic() + seconds
        engine = self.members.engines.get(uid)
        while engine is not None and uid in self.members.engines:
            try:
                left = max(deadline - time.monotonic(), RETRY_SECONDS)
                event = await self._commit_once(uid, engine, decision, left)
            except PeerLostError as error:
                if self.members.is_lost(uid) or time.monotonic() >= deadline:
                    return machine.CommitFailed(uid, str(error))
                await asyncio.sleep(RETRY_SECONDS)
            except WorkerError as error:
                return machine.CommitFailed(uid, str(error))
            else:
                if isinstance(event, machine.Committed) and event.report.digest == decision.digest:
                    await self.dispatcher.serve(uid, decision.version)
                return event
        return machine.Lost(uid)

    async def _commit_once(self, uid: str, engine: Engine, decision: Decision, seconds: float) -> machine.Event:
        try:
            return machine.Committed(uid, await engine.commit(decision, seconds))
        except StaleError as error:
            state = await engine.state()
            if state.version != decision.version:
                return machine.CommitFailed(uid, str(error))
            return machine.Committed(uid, CommitReport(version=decision.version, digest=state.digest or ""))

    async def _abort(self, engine: Engine, decision: Decision) -> None:
        try:
            await engine.abort(decision)
        except WorkerError:
            return  # a late abort is refused, an engine that is gone has nothing prepared

    async def _tell(self, trainer: Trainer, decision: Decision) -> None:
        try:
            await trainer.decide(decision)
        except WorkerError:
            return  # a trainer that is gone holds no staging copy; a new one is given a new epoch

    def _finish(self, outcome: Outcome, started: float, prepared: float) -> None:
        self.journal.save(sync=None)
        now = time.monotonic()
        outcome.seconds = now - started
        stages = outcome.report.stages if outcome.report is not None else {}
        rest = max(prepared - started - sum(stages.values()), 0.0)
        outcome.stages = {**stages, "report": rest, "commit": now - prepared}
