"""What trainer and engines say about themselves, asked every POLL_SECONDS. Hands the resolved precision to waiting engines.

An engine that served and refuses connections LOST_AFTER times in a row, or is silent for `silence_seconds`, is lost: it
leaves `states` and its requests go elsewhere. So does one in whose place another pod answers: a pod's address may be given to the
next one. One that has not served yet may be silent for as long as it boots. Whoever takes long to answer holds nobody up: after
PATIENCE_SECONDS its answer is heard when it comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from fp8rl_workers.errors import StaleError, WorkerError
from fp8rl_workers.orchestrator.client import Engine, EngineReleaseError, PeerLostError, Trainer
from fp8rl_workers.orchestrator.epochs import trainers_of
from fp8rl_workers.protocol import EngineState, GroupDocument, GroupMember, ResolvedPrecision, TrainerState

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
SETTLED_POLL_SECONDS = 2.0  # each question to an engine passes through its engine core
LOST_AFTER = 3
DOUBT_SECONDS = 0.2
PATIENCE_SECONDS = 1.0
TRAINER = "trainer"


class Members:
    """The document and the newest state of each of its pods.

    `on_lost` is told of an engine that is lost, `on_left` of one that is in the document no more; both by uid.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        max_model_len: int,
        silence_seconds: float,
        on_lost: Callable[[str], None],
        on_left: Callable[[str], None],
    ) -> None:
        self.session = session
        self.silence_seconds = silence_seconds
        self.max_model_len = max_model_len
        self.document: GroupDocument | None = None
        self.states: dict[str, EngineState] = {}
        self.engines: dict[str, Engine] = {}
        self.trainer_state: TrainerState | None = None
        self.changed = asyncio.Event()
        self._on_lost = on_lost
        self._on_left = on_left
        self._asked = 0
        self._answered = 0
        self._numbers: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._checked: set[str] = set()
        self._served: set[str] = set()
        self._overdue: dict[str, asyncio.Task[None]] = {}

    @property
    def trainer(self) -> Trainer | None:
        """Client of the trainer's first pod."""
        if self.document is None or not (pods := trainers_of(self.document)):
            return None
        return Trainer.at(self.session, pods[0].address)

    @property
    def resolved(self) -> ResolvedPrecision | None:
        """What `auto` became, with the context length that engines are to use."""
        resolved = self.trainer_state.resolved if self.trainer_state is not None else None
        return None if resolved is None else resolved.model_copy(update={"max_model_len": self.max_model_len})

    def accept(self, document: GroupDocument) -> bool:
        """Take a document over unless it is older than the one at hand; returns whether it was taken."""
        old = self.document
        if old is not None and (document.attempt, document.generation) < (old.attempt, old.generation):
            return False
        self.document = document
        wanted = {item.uid: item for item in document.members if item.role == "inference"}
        for uid in set(self.engines) - set(wanted):
            log.info("%s has left the group document", uid)
            self._forget(uid)
            self._on_left(uid)
        self.engines = {uid: Engine.at(self.session, item.address) for uid, item in wanted.items()}
        self.changed.set()
        return True

    def forget_trainer(self) -> None:
        """What the trainer said is void; only an answer to a later question counts."""
        self.trainer_state = None
        self._answered = self._asked

    def is_lost(self, uid: str) -> bool:
        """Whether an engine that belonged to an epoch is gone, restarting, or has left the document."""
        return uid not in self._served

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.poll()
            engines = len(self.engines)
            await asyncio.sleep(SETTLED_POLL_SECONDS if engines and len(self._served) == engines else POLL_SECONDS)

    async def poll_until_certain(self, suspects: set[str]) -> None:
        """Ask until every engine that served and refuses connections is back or lost, and every suspect has answered or is."""
        await self.poll()
        while any(self._misses.get(uid) or (uid in suspects and self._is_overdue(uid)) for uid in self._served):
            await asyncio.sleep(DOUBT_SECONDS)
            await self.poll()

    async def poll(self) -> None:
        """Ask trainer and engines once, all at the same time, but for those whose last answer is overdue."""
        document = self.document
        if document is None:
            return
        engines = {item.uid: item for item in document.members if item.role == "inference"}
        asked = {
            uid: asyncio.create_task(self._ask_engine(item)) for uid, item in engines.items() if self._may_ask(uid)
        }
        if self._may_ask(TRAINER):
            asked[TRAINER] = asyncio.create_task(self.ask_trainer())
        if asked:
            await asyncio.wait(asked.values(), timeout=PATIENCE_SECONDS)
        self._overdue |= {name: task for name, task in asked.items() if not task.done()}
        for task in asked.values():
            if task.done():
                task.result()
        for item in engines.values():
            self._listen(item)

    def _is_overdue(self, name: str) -> bool:
        task = self._overdue.get(name)
        return task is not None and not task.done()

    def _may_ask(self, name: str) -> bool:
        """Whether no answer is overdue; an error that one came with is raised here."""
        if self._is_overdue(name):
            return False
        if name in self._overdue:
            self._overdue.pop(name).result()
        return True

    def _listen(self, member: GroupMember) -> None:
        silent = time.monotonic() - self._heard.get(member.uid, 0.0)
        if member.uid in self._served and silent > self.silence_seconds:
            self._lose(member, f"silent for {silent:.1f} s")

    async def ask_trainer(self) -> None:
        """Ask the trainer once."""
        trainer = self.trainer
        if trainer is None:
            return
        self._asked += 1
        number = self._asked
        try:
            state = self._of_this_pod(await trainer.state())
            self._misses[TRAINER] = 0
            if number > self._answered:  # an answer that was overtaken by a later one is old
                self._answered, self.trainer_state = number, state
        except WorkerError as error:
            misses = self._misses[TRAINER] = self._misses.get(TRAINER, 0) + 1
            if misses >= LOST_AFTER:
                self.trainer_state = None
                log.debug("trainer: %s", error)
        self.changed.set()

    def _of_this_pod(self, state: TrainerState) -> TrainerState:
        """The trainer's state, unless another pod than the document's answers.

        Raises:
            StaleError: it does.
        """
        pods = trainers_of(self.document) if self.document is not None else []
        if pods and state.uid and state.uid != pods[0].uid:
            raise StaleError(f"{state.pod} ({state.uid}) answers at the address of {pods[0].pod} ({pods[0].uid})")
        return state

    async def _ask_engine(self, member: GroupMember) -> None:
        engine = self.engines.get(member.uid)
        if engine is None:
            return
        number = self._numbers[member.uid] = self._numbers.get(member.uid, 0) + 1
        try:
            state = await engine.state()
            if state.uid != member.uid:
                self._replaced(member, state)
                return
            if state.phase == "waiting" and self.resolved is not None:
                await engine.resolve(self.resolved)
            if state.phase == "serving" and member.uid not in self._checked:
                await engine.check_release(state.release)
                self._checked.add(member.uid)
                state = await engine.state()  # making its schema takes an engine seconds
        except PeerLostError as error:
            self._miss(member, refused=not error.late)
        except EngineReleaseError:
            raise
        except WorkerError as error:
            log.debug("%s: %s", member.pod, error)
            self._miss(member, refused=False)
        else:
            self._seen(member, state, number)

    def _seen(self, member: GroupMember, state: EngineState, number: int) -> None:
        if member.uid not in self.engines or number < self._newest.get(member.uid, 0):
            return  # an answer that was overtaken by a later one is old
        self._newest[member.uid] = number
        self._misses[member.uid] = 0
        self._heard[member.uid] = time.monotonic()
        if state.phase != "serving" and member.uid in self._served:
            log.warning("%s has restarted", member.pod)
            self._forget(member.uid)
        if state.phase == "serving":
            self._served.add(member.uid)
        self.states[member.uid] = state
        self.changed.set()

    def _replaced(self, member: GroupMember, state: EngineState) -> None:
        if member.uid in self.states:
            self._lose(member, f"{state.pod} ({state.uid}) answers at its address")

    def _miss(self, member: GroupMember, *, refused: bool) -> None:
        if member.uid not in self._served:
            return
        misses = self._misses[member.uid] = self._misses.get(member.uid, 0) + refused
        if misses >= LOST_AFTER:
            self._lose(member, f"{misses} refused connections")

    def _lose(self, member: GroupMember, why: str) -> None:
        log.warning("%s is lost: %s", member.pod, why)
        self._forget(member.uid)
        self.changed.set()

    def _forget(self, uid: str) -> None:
        self.states.pop(uid, None)
        self._served.discard(uid)
        self._checked.discard(uid)
        self._on_lost(uid)
