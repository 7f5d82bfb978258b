"""Attaching to the trainer and handing it batches: finds out where the run stands, and notices when that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fp8rl_workers.errors import NotYetError, StaleError, WorkerError
from fp8rl_workers.orchestrator import sync as machine
from fp8rl_workers.orchestrator.client import PeerLostError
from fp8rl_workers.orchestrator.endings import JobFailedError, failure_of, raise_for_tokenizer
from fp8rl_workers.orchestrator.journal import SyncEntry, write_synced
from fp8rl_workers.orchestrator.parts import Parts
from fp8rl_workers.orchestrator.policy import TOKENIZER, tokenizer_digest
from fp8rl_workers.orchestrator.state import Resume, resume
from fp8rl_workers.orchestrator.trouble import Trouble
from fp8rl_workers.protocol import StepRequest, StepResult, TrainerState

WATCH_SECONDS = 0.5


class TrainerMovedError(WorkerError):
    """Raised when the trainer is gone or no longer where the loop left it: attach again and go on from its step."""

    reason = "TrainerMoved"


class Training:
    """The trainer as the loop uses it. `attempt`, `step`: where the loop believes that it stands."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.attempt = 0
        self.step = 0
        self._pending_path = parts.state_dir / "pending.json"

    async def attach(self) -> Resume:
        """Wait for the trainer, settle a sync that a crash interrupted, and say where the run goes on.

        Raises:
            JobFailedError: the trainer has failed, or its tokenizer is another one.
        """
        self.parts.members.forget_trainer()
        state = await self._settled_trainer()
        self.attempt, self.step = state.attempt, state.step
        await self._recover()
        found = resume(self._pending(), state)
        newest = self.parts.lineage.newest
        if newest is not None and newest.attempt == state.attempt and newest.step > state.step:
            self.parts.lineage.abandon_above(state.step)
        message = f"at step {state.step} of attempt {state.attempt}"
        self.parts.records.event("Attached", message, step=state.step, attempt=state.attempt)
        return found

    def moved(self) -> bool:
        """Whether the trainer is known to be elsewhere than the loop believes."""
        document, state = self.parts.members.document, self.parts.members.trainer_state
        if document is not None and document.attempt > self.attempt:
            return True
        if state is not None and state.phase == "failed":
            raise failure_of(state)
        return state is not None and state.phase == "idle" and (state.attempt, state.step) != (self.attempt, self.step)

    async def keep(self, request: StepRequest) -> None:
        """Put a batch on disk before it is posted, so that no prompt is used twice after a crash."""
        await asyncio.to_thread(write_synced, self._pending_path, request.model_dump_json().encode())

    async def train(self, request: StepRequest) -> StepResult:
        """Post a batch, and wait for the step for as long as the trainer lives.

        Raises:
            TrainerMovedError: the trainer is gone or refuses the step as out of order.
            JobFailedError: the step failed for good.
        """
        group = self.parts.group
        group.stepping = request.step
        try:
            result = await self._step(request)
        finally:
            group.stepping = None
        self.step = result.step
        await self.parts.members.ask_trainer()
        return result

    async def _step(self, request: StepRequest) -> StepResult:
        while True:
            try:
                return await self._post(request)
            except NotYetError:
                await asyncio.sleep(WATCH_SECONDS)
            except (PeerLostError, StaleError) as error:
                raise TrainerMovedError(str(error)) from error
            except TrainerMovedError:
                raise
            except WorkerError as error:
                raise await self._failure(error) from error

    async def _post(self, request: StepRequest) -> StepResult:
        trainer = self.parts.members.trainer
        if trainer is None:
            raise PeerLostError("the trainer left the group document")
        post = asyncio.create_task(trainer.step(request))
        try:
            while not (await asyncio.wait({post}, timeout=WATCH_SECONDS))[0]:
                document = self.parts.members.document
                gone = self.parts.members.trainer_state is None
                if gone or (document is not None and document.attempt > self.attempt):
                    raise TrainerMovedError(f"the trainer was lost during step {request.step}")
        finally:
            post.cancel()
        return post.result()

    async def _failure(self, error: WorkerError) -> JobFailedError:
        """The trainer's own words where it has failed for good, else its refusal."""
        await self.parts.members.poll()
        state = self.parts.members.trainer_state
        if state is not None and state.phase == "failed":
            return failure_of(state)
        return JobFailedError(error.reason, str(error))

    async def _settled_trainer(self) -> TrainerState:
        members = self.parts.members
        while True:
            document, state = members.document, members.trainer_state
            progress = self.parts.progress
            progress.attempt = max(progress.attempt, document.attempt if document is not None else 0)
            if state is not None and state.attempt >= progress.attempt:
                if state.phase == "failed":
                    raise failure_of(state)
                if state.phase == "idle":
                    self._check_tokenizer(state)
                    return state
            await asyncio.sleep(WATCH_SECONDS)

    def _check_tokenizer(self, state: TrainerState) -> None:
        folder = Path(self.parts.config.model_path)
        raise_for_tokenizer(str(folder / TOKENIZER), tokenizer_digest(folder), state.tokenizer_digest)

    async def _recover(self) -> None:
        parts = self.parts
        async with parts.group.lock:
            await parts.members.poll()
            await parts.group.know_replicas()
            data, states = parts.journal.data, parts.members.states
            parts.group.trouble = Trouble()
            seconds = parts.config.weight_sync.timeout_seconds
            entry = data.sync
            if entry is None:
                request = machine.orphan(parts.config.uid, states.values(), seconds)
                entry = None if request is None else SyncEntry(request=request, attempt=self.attempt)
            if entry is not None:
                parts.journal.save(sync=entry)
                found = machine.recover(entry.request, entry.decision, entry.attempt, states)
                verb = "rolled forward" if found.decision.committed else "aborted"
                parts.records.event("SyncRecovered", f"version {found.decision.version} {verb}")
                await parts.group.conductor.recover(found, seconds)
        parts.group.enabled.set()

    def _pending(self) -> StepRequest | None:
        if not self._pending_path.exists():
            return None
        return StepRequest.model_validate_json(self._pending_path.read_bytes())
