"""Keeps the weight-sync group: forms epochs, publishes the trainer's weights, heals and joins replicas.

`settle` repeats `epochs.next_action` until every engine that takes part serves what the trainer holds, or something must be
waited for. The training loop calls it after each step; in between `run` does, so that a newcomer or a fenced replica gets
the weights at once while the trainer is idle. `lock` keeps syncs and optimizer steps apart; nothing is done before
`enabled` is set, so that a sync which a crash interrupted is settled first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from fp8rl_workers.errors import WorkerError
from fp8rl_workers.orchestrator import epochs
from fp8rl_workers.orchestrator import sync as machine
from fp8rl_workers.orchestrator.client import PeerLostError
from fp8rl_workers.orchestrator.dispatch import LOST, SUSPECT
from fp8rl_workers.orchestrator.epochs import GroupView, NextAction
from fp8rl_workers.orchestrator.records import Records
from fp8rl_workers.orchestrator.syncing import Conductor, Outcome
from fp8rl_workers.protocol import Epoch, EpochReport, GroupMember, TrainerState

BOOT_GRACE_SECONDS = 60.0
SHED_SECONDS = 5.0
SHED_DOUBLINGS = 6
SHED_AFTER_FAILURES = 2
JOIN_SECONDS = 5.0
MAX_ROUNDS = 8
LOOK_SECONDS = 1.0


class Group:
    """The group's keeper. `waiting_for` says what the last look at the group waits for, empty when nothing."""

    def __init__(self, conductor: Conductor, records: Records, port: int, timeout_seconds: float) -> None:
        self.conductor = conductor
        self.members = conductor.members
        self.journal = conductor.journal
        self.records = records
        self.lock = asyncio.Lock()
        self.waiting_for = "the operator's group document (PUT /v1/group)"
        self.in_sync = False
        self.enabled = asyncio.Event()
        self._port = port
        self._timeout = timeout_seconds
        self.on_outcome: Callable[[Outcome], None] = lambda _: None
        self._shed: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._first_ready: float | None = None

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that members were last told to join; None when a new one is needed."""
        return self.journal.data.epoch

    def view(self) -> GroupView:
        """The group as it is now."""
        document, states = self.members.document, self.members.states
        now = time.monotonic()
        shed = {uid for uid, until in self._shed.items() if until > now}
        joined = epochs.participants(document, states, shed) if document is not None else ()
        engines = [item for item in document.members if item.role == "inference"] if document is not None else []
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
            unready=tuple(self._named(item) for item in engines if item.uid not in here),
            patient=not served and self._within_grace(bool(joined), now),
        )

    async def run(self) -> None:
        """Keep the group for ever, from `enabled` on; errors show in `waiting_for` and are tried again."""
        await self.enabled.wait()
        while True:
            self.members.changed.clear()
            await self.settle(fresh=False)
            # asyncio.wait_for would swallow a cancellation that meets the event (Python 3.11)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.members.changed.wait()

    async def settle(self, *, fresh: bool = True) -> bool:
        """Form and publish until nothing is left to do; False when something must be waited for first.

        Args:
            fresh: Ask everybody first; else the last answers count, unless a replica is under suspicion.
        """
        async with self.lock:
            for _ in range(MAX_ROUNDS):
                suspects = {uid for uid, item in self.conductor.dispatcher.replicas.items() if item.fenced == SUSPECT}
                if fresh or suspects:
                    await self.members.poll_until_certain(suspects | set(self.members.states))
                fresh = True
                await self.know_replicas()
                action = epochs.next_action(self.view())
                self.waiting_for, self.in_sync = action.text, action.kind == "none"
                if action.kind in {"none", "wait"}:
                    return self.in_sync
                if not await self._act(action):
                    return False
        return False

    async def _act(self, action: NextAction) -> bool:
        trainer = self.members.trainer_state
        if trainer is None:
            return False
        try:
            return await (self._form() if action.kind == "form" else self._publish(trainer))
        except WorkerError as error:
            self.waiting_for = f"{action.text}: {error}"
            self.records.event("GroupFailed", self.waiting_for)
            self.journal.save(epoch=None)
            return False

    async def know_replicas(self) -> None:
        """Let dispatch know the engines of the document, and which of them serve the newest version already."""
        dispatcher, document = self.conductor.dispatcher, self.members.document
        pods = {item.uid: item.pod for item in document.members} if document is not None else {}
        for uid, engine in self.members.engines.items():
            dispatcher.add(uid, pods[uid], engine)
        for uid in set(dispatcher.replicas) - set(pods):
            dispatcher.remove(uid)
        await self._adopt()

    async def _adopt(self) -> None:
        newest = self.conductor.lineage.newest
        for uid, state in self.members.states.items():
            replica = self.conductor.dispatcher.replicas.get(uid)
            if newest is None or replica is None or replica.serving or replica.fenced not in {"", LOST, SUSPECT}:
                continue
            if (state.version, state.digest) == (newest.version, newest.digest):
                await self.conductor.dispatcher.serve(uid, newest.version)

    def _named(self, member: GroupMember) -> str:
        state = self.members.states.get(member.uid)
        return f"{member.pod} ({state.error})" if state is not None and state.error else member.pod

    def _within_grace(self, any_ready: bool, now: float) -> bool:
        if any_ready and self._first_ready is None:
            self._first_ready = now
        return self._first_ready is None or now - self._first_ready < BOOT_GRACE_SECONDS

    async def _form(self) -> bool:
        view = self.view()
        trainer, document = self.members.trainer, view.document
        if trainer is None or document is None:
            return False
        seen = [item.state.epoch or 0 for item in view.participants]
        number = max([self.journal.data.epoch_number, *seen]) + 1
        epoch = epochs.form_epoch(document, view.participants, number, self._port, self._timeout)
        self.journal.save(epoch=None, epoch_number=number, document=document)
        engines = [self.members.engines[item.member.uid] for item in view.participants]
        report, *answers = await asyncio.gather(
            trainer.join(epoch), *(engine.join(epoch) for engine in engines), return_exceptions=True
        )
        faults = {
            item.member.uid: str(answer)
            for item, answer in zip(view.participants, answers, strict=True)
            if isinstance(answer, BaseException)
        }
        if isinstance(report, EpochReport):
            faults |= {item.uid: "did not join in time" for item in epoch.members if item.pod in report.missing}
        else:
            faults = faults or {"trainer": str(report)}
        faults = faults or await self._not_joined(epoch)
        return self._formed(epoch, faults)

    def _formed(self, epoch: Epoch, faults: dict[str, str]) -> bool:
        if not faults:
            self.journal.save(epoch=epoch)
            self.records.event("EpochFormed", f"epoch {epoch.epoch}: world of {epoch.world_size}", epoch=epoch.epoch)
            return True
        names = {item.uid: item.pod for item in epoch.members}
        text = "; ".join(f"{names.get(uid, uid)}: {why}" for uid, why in faults.items())
        self.records.event("EpochFailed", f"epoch {epoch.epoch}: {text}", epoch=epoch.epoch)
        self.waiting_for = f"the weight-sync group to form: {text}"
        self._shed_all(set(faults) - {"trainer"})
        return "trainer" not in faults

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
        if self.epoch is None:
            raise PeerLostError("no epoch is formed")
        epoch = self.epoch
        outcome = await self.conductor.publish(epoch, trainer.attempt, trainer.version)
        self.on_outcome(outcome)
        if outcome.committed:
            for uid in outcome.sync.committed:
                self._failures.pop(uid, None)
            return True
        self._failed(outcome.sync)
        self.journal.save(epoch=None)
        return bool(outcome.sync.lost)

    def _failed(self, sync: machine.Sync) -> None:
        self.waiting_for = f"the weight sync to succeed: {sync.error}"
        for uid in sync.faulty:
            self._failures[uid] = self._failures.get(uid, 0) + 1
        broken = {uid for uid in sync.faulty if self._failures[uid] >= SHED_AFTER_FAILURES}
        if broken != {member.uid for member in sync.present}:
            self._shed_all(broken)

    def _shed_all(self, uids: set[str]) -> None:
        for uid in uids:
            doublings = min(self._failures.get(uid, 0), SHED_DOUBLINGS)
            self._shed[uid] = time.monotonic() + SHED_SECONDS * 2**doublings
            self.conductor.dispatcher.fence(uid, "shed from the weight-sync group")
