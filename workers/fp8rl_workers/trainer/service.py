"""The trainer as its callers see it: what may happen when, and in which thread.

One thread trains, one syncs (`membership`), the event loop only decides. A step may be asked for again: while it runs the
caller joins it, when it is done it answers what it answered. What makes going on senseless (a model that does not fit, NaN,
no memory, three failed checkpoints, a fault of the program) turns the phase to `failed` with its reason; the process stays up
to say so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fp8rl_workers.config import PodEnvironment, TrainerConfig
from fp8rl_workers.errors import InvalidInputError, NotYetError, StaleError, SyncError, WorkerError
from fp8rl_workers.metrics import WorkerMetrics
from fp8rl_workers.protocol import ResolvedPrecision, StepRequest, StepResult, SyncReport, SyncRequest, TrainerState
from fp8rl_workers.trainer.checkpoint import Meta, identity
from fp8rl_workers.trainer.loading import Loaded, load, resolve
from fp8rl_workers.trainer.membership import Membership
from fp8rl_workers.trainer.memory import is_out_of_memory, out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECKPOINT_FAILURES_ALLOWED = 3
RECOVERABLE = (InvalidInputError, NotYetError, StaleError, SyncError)


class CheckpointError(WorkerError):
    """Raised when a checkpoint could not be written three times in a row."""

    reason = "CheckpointFailed"


class InternalError(WorkerError):
    """Raised in place of an exception that nobody foresaw."""

    reason = "InternalError"


@dataclass
class Progress:
    """What changes while the trainer lives."""

    reason: str = ""
    message: str = ""
    resolved: ResolvedPrecision | None = None
    tokenizer_digest: str = ""
    resumed_step: int = 0
    last_result: StepResult | None = None
    orchestrator: dict[str, Any] = field(default_factory=dict)
    checkpoint_failures: int = 0
    checkpoint_due: bool = False


class TrainerService:
    """State and operations behind the control API. Methods run on the event loop."""

    def __init__(self, config: TrainerConfig, pod: PodEnvironment, metrics: WorkerMetrics) -> None:
        """Listen for members of the group; the model is loaded by `start`.

        Raises:
            InvalidInputError: the store's port is in use.
        """
        pod.state_dir.mkdir(parents=True, exist_ok=True)
        self.members = Membership(config, pod, metrics)
        self._config, self._pod, self._metrics = config, pod, metrics
        self._progress = Progress()
        self._thread = ThreadPoolExecutor(1, "fp8rl-train")
        self._loaded: Loaded | None = None
        self._step: tuple[int, asyncio.Task[StepResult]] | None = None

    @property
    def phase(self) -> Literal["loading", "idle", "training", "failed"]:
        """What the trainer is doing."""
        if self._progress.reason:
            return "failed"
        if self._loaded is None:
            return "loading"
        return "training" if self._step is not None and not self._step[1].done() else "idle"

    def waiting(self) -> str | None:
        """What readiness waits for, None when ready."""
        return {"loading": "the model is loading", "failed": self._progress.message}.get(self.phase)

    def state(self) -> TrainerState:
        """The trainer as it is."""
        progress = self._progress
        return TrainerState(
            job_uid=self._config.uid,
            attempt=self._pod.attempt,
            phase=self.phase,
            step=self._loaded.trainer.step if self._loaded else progress.resumed_step,
            resumed_step=progress.resumed_step,
            version=self.members.versions.highest,
            pod=self._pod.pod_name,
            uid=self._pod.pod_uid,
            place=self.members.place,
            resolved=progress.resolved,
            orchestrator=progress.orchestrator,
            tokenizer_digest=progress.tokenizer_digest,
            last_result=progress.last_result,
            reason=progress.reason,
            message=progress.message,
        )

    async def start(self) -> None:
        """Resolve the precision, so that engines can boot, then load the model and the checkpoint; failures are in `state`."""
        folder = Path(self._config.model_path)
        try:
            facts = await self._run(lambda: resolve(self._config, folder))
            self._progress.resolved, self._progress.tokenizer_digest = facts.resolved, facts.tokenizer_digest
            loaded = await self._run(lambda: load(self._config, self._pod, facts))
        except WorkerError as error:
            self._fail(error)
            return
        if loaded.resumed is not None:
            self._resume(loaded.resumed)
        self._loaded = loaded
        log.info("model loaded from %s, step %d, wire %s", folder, loaded.trainer.step, facts.resolved.wire)
        log.info("memory of a step, estimated: %s", loaded.trainer.expected)

    async def step(self, request: StepRequest) -> StepResult:
        """Train one step.

        Raises:
            NotYetError: the model is loading.
            StaleError: another job or attempt, or not the step that is next.
            InvalidInputError: a sample cannot be used; nothing has changed.
            WorkerError: training has failed for good.
        """
        loaded = self._require(request.job_uid)
        if request.attempt != self._pod.attempt:
            raise StaleError(f"the batch is of attempt {request.attempt}, this trainer is attempt {self._pod.attempt}")
        if self._step is not None and not self._step[1].done():
            if self._step[0] != request.step:
                raise StaleError(f"step {request.step}: step {self._step[0]} is still running")
            return await asyncio.shield(self._step[1])
        last = self._progress.last_result
        if last is not None and last.step == request.step == loaded.trainer.step:
            return last
        if request.step != loaded.trainer.step + 1:
            raise StaleError(f"step {request.step} is not the next one: {loaded.trainer.step} steps are done")
        loaded.trainer.check(request.samples)
        task = asyncio.create_task(self._run(lambda: self._train(loaded, request)))
        self._step = (request.step, task)
        return await asyncio.shield(task)

    async def sync(self, request: SyncRequest) -> SyncReport:
        """Publish the weights as they are; see `Membership.sync` for its errors."""
        loaded = self._require(request.job_uid)
        return await self._watched(self.members.sync(request, loaded.trainer, loaded.form))

    def close(self) -> None:
        """Let go of sockets and threads; a running step is not waited for."""
        self.members.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def require_job(self, job_uid: str) -> None:
        """Refuse messages of other jobs.

        Raises:
            StaleError: `job_uid` is another job's.
        """
        if job_uid != self._config.uid:
            raise StaleError(f"job_uid: {job_uid} is not {self._config.uid}, the job of this trainer")

    def _require(self, job_uid: str) -> Loaded:
        self.require_job(job_uid)
        if self._progress.reason:
            failure = WorkerError(self._progress.message)
            failure.reason = self._progress.reason
            raise failure
        if self._loaded is None:
            raise NotYetError("the model is loading")
        return self._loaded

    def _resume(self, meta: Meta) -> None:
        progress = self._progress
        progress.resumed_step, progress.last_result, progress.orchestrator = meta.step, meta.result, meta.orchestrator
        self._metrics.step.set(meta.step)
        self.members.versions.raise_to(meta.version)

    def _train(self, loaded: Loaded, request: StepRequest) -> StepResult:
        """In the training thread: the step, its checkpoint, its metrics."""
        metrics = loaded.trainer.train(request.step, request.samples)
        self._progress.orchestrator = request.orchestrator
        result = StepResult(step=request.step, metrics=metrics)
        start = time.monotonic()
        error = self._save(loaded, request, result) if self._is_checkpoint_step(request.step) else ""
        seconds = time.monotonic() - start
        result = result.model_copy(
            update={
                "metrics": metrics
                | {"checkpoint_seconds": seconds, "train_seconds": metrics["train_seconds"] + seconds},
                "checkpoint_error": error,
            }
        )
        self._progress.last_result = result
        self._metrics.record(result.metrics)
        self._metrics.step.set(request.step)
        log.info(
            "step %d: loss %.4f, entropy %.3f, mismatch KL %.2e, %d loss tokens in %.3f s",
            request.step,
            metrics["loss"],
            metrics["entropy"],
            metrics["mismatch_kl"],
            metrics["loss_tokens"],
            result.metrics["train_seconds"],
        )
        return result

    def _is_checkpoint_step(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every > 0 and (self._progress.checkpoint_due or step % every == 0 or step == self._config.steps)

    def _save(self, loaded: Loaded, request: StepRequest, result: StepResult) -> str:
        """Write a checkpoint; why it failed, or "". A failed one is due again after the next step.

        Raises:
            CheckpointError: the third failure in a row, or a later attempt has begun.
        """
        progress = self._progress
        meta = Meta(
            step=request.step,
            attempt=self._pod.attempt,
            version=self.members.versions.highest,
            identity=identity(self._config),
            orchestrator=request.orchestrator,
            result=result,
        )
        try:
            loaded.checkpoints.save(loaded.trainer.state(), meta)
        except StaleError as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            progress.checkpoint_failures += 1
            progress.checkpoint_due = True
            message = f"checkpoint of step {request.step}: {error}; the previous one is still current"
            log.warning("%s (%d of %d)", message, progress.checkpoint_failures, CHECKPOINT_FAILURES_ALLOWED)
            if progress.checkpoint_failures >= CHECKPOINT_FAILURES_ALLOWED:
                raise CheckpointError(
                    f"{message}; {CHECKPOINT_FAILURES_ALLOWED} failed in a row: free space on the trainer's volume"
                ) from error
            return message
        progress.checkpoint_failures, progress.checkpoint_due = 0, False
        return ""

    def _fail(self, error: WorkerError) -> None:
        if not self._progress.reason:
            self._progress.reason, self._progress.message = error.reason, str(error)
            log.error("trainer failed, %s: %s", error.reason, error)

    def _unforeseen(self, error: Exception) -> WorkerError:
        if not is_out_of_memory(error):
            return InternalError(f"{type(error).__name__}: {error}; the trainer's log has the stack")
        if self._loaded is None:
            return out_of_memory("loading the model", error, self._config, None)
        trainer = self._loaded.trainer
        return out_of_memory(f"beside step {trainer.step + 1}", error, self._config, trainer.expected)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._watched(asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def _watched(self, work: Awaitable[T]) -> T:
        """The process's one boundary: what nobody can do anything about turns the phase to failed."""
        try:
            return await work
        except RECOVERABLE:
            raise
        except WorkerError as error:
            self._fail(error)
            raise
        except Exception as error:
            log.exception("a fault of the program, or memory that has run out")
            failure = self._unforeseen(error)
            self._fail(failure)
            raise failure from error
