"""Keeps the weight-sync group: forms epochs, publishes the trainer's weights, heals and joins replicas.

`settle` repeats `epochs.next_action` until every engine that takes part serves what the trainer holds, or something must be
waited for. `run` does so whenever something has changed; after a step the loop asks for it (`announce`), and goes on as soon as
the weights are on their way. `lock` keeps syncs apart. While the trainer computes a step (`stepping`) the weights of the step
before can still be sent, to whom they have not reached; its own wait until it is done. Nothing is done before `enabled` is
set, so that a sync which a crash interrupted is settled first. What fails is tried again after a pause (`trouble`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from fp8rl_workers.config import WeightSyncConfig
from fp8rl_workers.errors import NotYetError, StaleError, WorkerError
from fp8rl_workers.orchestrator import epochs
from fp8rl_workers.orchestrator.client import PeerLostError
from fp8rl_workers.orchestrator.dispatch import LOST, SUSPECT
from fp8rl_workers.orchestrator.epochs import GroupView, NextAction
from fp8rl_workers.orchestrator.records import Records
from fp8rl_workers.orchestrator.syncing import Conductor, Outcome
from fp8rl_workers.orchestrator.trouble import SHED_AFTER, Trouble, listed
from fp8rl_workers.places import choose_transport
from fp8rl_workers.protocol import Epoch, EpochReport, GroupDocument, GroupMember, TrainerState

BOOT_GRACE_SECONDS = 60.0
JOIN_SECONDS = 10.0
MAX_ROUNDS = 8
LOOK_SECONDS = 1.0
SHED = "shed from the weight-sync group"


class Group:
    """The group's keeper. `waiting_for` says what the last look at the group waits for, empty when nothing."""

    def __init__(self, conductor: Conductor, records: Records, sync: WeightSyncConfig) -> None:
        self.conductor = conductor
        self.members = conductor.members
        self.journal = conductor.journal
        self.records = records
        self.lock = asyncio.Lock()
        self.enabled = asyncio.Event()
        self.stepping: int | None = None
        self.trouble = Trouble()
        self.waiting_for = "the operator's group document (PUT /v1/group)"
        self.on_outcome: Callable[[Outcome], None] = lambda _: None
        self._sync = sync
        self._first_ready: float | None = None
        self._under_way = asyncio.Event()
        conductor.on_sending = self._sending

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that members were last told to join; None when a new one is needed."""
        return self.journal.data.epoch

    @property
    def in_sync(self) -> bool:
        """Whether every engine that takes part serves what the trainer holds."""
        return epochs.in_sync(self.view())

    def view(self) -> GroupView:
        """The group as it is now."""
        document, states = self.members.document, self.members.states
        now = time.monotonic()
        joined = epochs.participants(document, states, self.trouble.shed_now(now)) if document is not None else ()
        here = {item.member.uid for item in joined}
        newest = self.conductor.lineage.newest
        version = newest.version if newest is not None else None
        replicas = self.conductor.dispatcher.replicas
        served = newest is not None and (document is None or newest.attempt >= document.attempt)
        return GroupView(
            document=document,
            trainer=self.members.trainer_state,
            epoch=self.epoch,
            newest=newest,
            participants=joined,
            serving=frozenset(uid for uid, item in replicas.items() if item.serving and item.version == version),
            unready=tuple(self._named(item) for item in engines_of(document) if item.uid not in here),
            patient=not served and self._within_grace(bool(joined), now),
            paused=self.trouble.paused(now),
            held=self.trouble.held(now),
            stepping=self.stepping,
        )

    async def run(self) -> None:
        """Keep the group for ever, from `enabled` on; errors show in `waiting_for` and are tried again."""
        await self.enabled.wait()
        while True:
            self.members.changed.clear()
            under_way = self._under_way
            await self.settle(fresh=not under_way.is_set())
            under_way.set()
            # asyncio.wait_for would swallow a cancellation that meets the event (Python 3.11)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.members.changed.wait()

    def announce(self) -> asyncio.Event:
        """Let `run` publish what the trainer holds now; the event: it is on its way, or cannot be sent for the moment."""
        self._under_way = asyncio.Event()
        self.members.changed.set()
        return self._under_way

    async def settle(self, *, fresh: bool = True) -> bool:
        """Form and publish until nothing is left to do; False when something must be waited for first.

        Args:
            fresh: Ask everybody first; else the last answers count, unless a replica is under suspicion.
        """
        async with self.lock:
            for _ in range(MAX_ROUNDS):
                suspects = {uid for uid, item in self.conductor.dispatcher.replicas.items() if item.fenced == SUSPECT}
                if fresh or suspects:
                    await self.members.poll_until_certain(suspects)
                fresh = True
                await self.know_replicas()
                action = epochs.next_action(self.view())
                self.waiting_for = action.text
                if action.kind in {"none", "wait"}:
                    return action.kind == "none"
                if not await self._act(action):
                    return False
        return False

    def verdict(self) -> str:
        """Why the job must give up syncing; empty while there is hope, or while an engine is gone or boots."""
        document, now = self.members.document, time.monotonic()
        shed = self.trouble.shed_now(now)
        here = {item.member.uid for item in self.view().participants} | shed
        return self.trouble.verdict() if all(item.uid in here for item in engines_of(document)) else ""

    async def know_replicas(self) -> None:
        """Let dispatch know the engines of the document, and which of them serve the newest version already."""
        dispatcher = self.conductor.dispatcher
        pods = {item.uid: item.pod for item in engines_of(self.members.document)}
        for uid, engine in self.members.engines.items():
            dispatcher.add(uid, pods[uid], engine)
        for uid in set(dispatcher.replicas) - set(pods):
            dispatcher.remove(uid)
        self.trouble.keep(pods)
        await self._adopt()

    async def _adopt(self) -> None:
        newest = self.conductor.lineage.newest
        for uid, state in list(self.members.states.items()):
            replica = self.conductor.dispatcher.replicas.get(uid)
            if newest is None or replica is None or replica.serving or replica.fenced not in {"", LOST, SUSPECT}:
                continue
            if (state.version, state.digest) == (newest.version, newest.digest):
                await self.conductor.dispatcher.serve(uid, newest.version)

    def _named(self, member: GroupMember) -> str:
        state, failed = self.members.states.get(member.uid), self.trouble.members.get(member.uid)
        error = (state.error if state is not None else "") or (failed.error if failed is not None else "")
        return f"{member.pod} ({error})" if error else member.pod

    def _within_grace(self, any_ready: bool, now: float) -> bool:
        if any_ready and self._first_ready is None:
            self._first_ready = now
        return self._first_ready is None or now - self._first_ready < BOOT_GRACE_SECONDS

    def _sending(self) -> None:
        self._under_way.set()

    async def _act(self, action: NextAction) -> bool:
        trainer, document = self.members.trainer_state, self.members.document
        if trainer is None or document is None:
            return False
        try:
            return await (self._form(document) if action.kind == "form" else self._publish(trainer))
        except WorkerError as error:
            self.journal.save(epoch=None)
            self._failed("GroupFailed", {epochs.trainers_of(document)[0].pod: str(error)}, counts=False)
            return False

    async def _form(self, document: GroupDocument) -> bool:
        view, trainer = self.view(), self.members.trainer
        if trainer is None:
            return False
        seen = [item.state.epoch_told or item.state.epoch or 0 for item in view.participants]
        number = max([self.journal.data.epoch_number, *seen]) + 1
        places = {item.member.pod: item.state.place for item in view.participants}
        transport = choose_transport(self._sync.transport, (view.trainer.place if view.trainer else ""), places)
        epoch = epochs.form_epoch(
            document, view.participants, number, self._sync.port, self._sync.timeout_seconds, transport=transport
        )
        self.journal.save(epoch=None, epoch_number=number)
        engines = [self.members.engines[item.member.uid] for item in view.participants]
        report, *answers = await asyncio.gather(
            trainer.join(epoch), *(engine.join(epoch) for engine in engines), return_exceptions=True
        )
        if not isinstance(report, EpochReport):
            counts = not isinstance(report, (PeerLostError, StaleError, NotYetError))
            self._failed("EpochFailed", {epoch.members[0].pod: str(report)}, counts=counts)
            return False
        faults = {item.uid: "did not join in time" for item in epoch.members if item.pod in report.missing}
        faults |= {
            item.member.uid: str(answer)
            for item, answer in zip(view.participants, answers, strict=True)
            if isinstance(answer, BaseException)
        }
        return self._formed(epoch, faults or await self._not_joined(epoch))

    def _formed(self, epoch: Epoch, faults: dict[str, str]) -> bool:
        if not faults:
            self.journal.save(epoch=epoch)
            self.records.event("EpochFormed", f"epoch {epoch.epoch}: world of {epoch.world_size}", epoch=epoch.epoch)
            return True
        now, pods = time.monotonic(), {item.uid: item.pod for item in epoch.members}
        for uid, why in faults.items():
            self.trouble.blame(uid, pods[uid], why, now)
        text = listed({pods[uid]: why for uid, why in faults.items()})
        self.records.event_once("EpochFailed", f"epoch {epoch.epoch}: {text}", epoch=epoch.epoch)
        self._shed(set(faults))
        return True

    async def _not_joined(self, epoch: Epoch) -> dict[str, str]:
        deadline = time.monotonic() + JOIN_SECONDS
        asked = {member.uid for member in epoch.members}
        while True:
            await self.members.poll()
            joined = [item for item in self.view().participants if item.member.uid in asked]
            late = {item.member.uid: "does not report the epoch" for item in joined if item.state.epoch != epoch.epoch}
            if not late or time.monotonic() > deadline:
                return late
            await asyncio.sleep(0.1)

    async def _publish(self, trainer: TrainerState) -> bool:
        epoch = self.epoch
        if epoch is None:
            raise PeerLostError("no epoch is formed")
        outcome = await self.conductor.publish(epoch, trainer.attempt, trainer.version)
        if outcome.sync.phase != "done":
            self.journal.save(epoch=None)
        if outcome.errors:
            await self.members.poll_until_certain(set())
        self._judge(outcome)
        self.on_outcome(outcome)
        return outcome.published or bool(outcome.sync.lost)

    def _judge(self, outcome: Outcome) -> None:
        """Who is to blame, and what follows for the next try. Nobody is blamed for the loss of another."""
        sync, now = outcome.sync, time.monotonic()
        lost = {member.uid for member in sync.members if self.members.is_lost(member.uid)}
        pods = {member.uid: member.pod for member in sync.members}
        if outcome.published:
            self.trouble.succeeded(sync.committed)
        elif not sync.lost:
            self.trouble.failed(outcome.errors, now, counts=not lost and not outcome.trainer_lost)
        failed = {} if lost and not outcome.published else {uid: sync.faults[uid] for uid in set(sync.faults) - lost}
        for uid, why in failed.items():
            self.trouble.blame(uid, pods[uid], why, now)
        broken = {uid for uid in failed if self.trouble.members[uid].failures >= SHED_AFTER}
        if broken != {member.uid for member in sync.present}:
            self._shed(broken)
        if outcome.published and not self.trouble.members:
            self.records.forget_said()

    def _failed(self, kind: str, errors: dict[str, str], *, counts: bool) -> None:
        self.trouble.failed(errors, time.monotonic(), counts=counts)
        self.waiting_for = f"the weight-sync group to form: {listed(self.trouble.blamed)}"
        self.records.event_once(kind, self.waiting_for)

    def _shed(self, uids: set[str]) -> None:
        for uid in uids:
            self.trouble.shed(uid, time.monotonic())
            self.conductor.dispatcher.fence(uid, SHED)


def engines_of(document: GroupDocument | None) -> list[GroupMember]:
    """The engines that may belong."""
    return [item for item in document.members if item.role == "inference"] if document is not None else []
