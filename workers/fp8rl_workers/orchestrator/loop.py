"""The order of a run, the one place that knows it: rollouts -> batch -> step -> weights out -> rollouts under them.

    attach to the trainer (fresh, resumed, or found alive) -> its weights reach the engines -> evaluation -> for each step:
    take a batch, train on it, publish, evaluate when due -> last evaluation -> complete

Rollouts go on all the time: those for step s + 1 run while step s trains and while its weights travel. Step s + 1 itself begins once
its batch is full and the weights of step s are on their way; only an evaluation waits until they have arrived. When the trainer is
lost, or comes back as another attempt, everything sampled for the abandoned attempt is dropped (reason `lineage`) and the
run goes on from the trainer's checkpoint, which first publishes what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from fp8rl_workers.metrics import ORCHESTRATOR_METRICS
from fp8rl_workers.orchestrator import health
from fp8rl_workers.orchestrator.batch import Batch, age_metrics, build_batch, dump_lines
from fp8rl_workers.orchestrator.endings import raise_for_step, raise_if_broken
from fp8rl_workers.orchestrator.evaluation import EvaluationError, evaluate
from fp8rl_workers.orchestrator.parts import Parts
from fp8rl_workers.orchestrator.rollouts import Group
from fp8rl_workers.orchestrator.state import Resume, RunState
from fp8rl_workers.orchestrator.training import WATCH_SECONDS, TrainerMovedError, Training
from fp8rl_workers.protocol import StepRecord, StepRequest, StepResult

GLANCE_SECONDS = 0.02


class Loop:
    """One run of the job. `run` returns when all steps are done."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.training = Training(parts)
        self._last_step_end = time.monotonic()
        self._consumed_prompts = 0
        self._checkpoint_failures = 0
        self._evaluated_step: int | None = None
        self._under_way = asyncio.Event()
        self._under_way.set()

    async def run(self) -> None:
        """Train all steps.

        Raises:
            WorkerError: the job must end, with the reason of its condition.
        """
        attached = finished = False
        while not finished:
            try:
                if not attached:
                    await self._attach()
                    attached = True
                elif self.training.step < self.parts.config.steps:
                    await self._step(self.training.step + 1)
                else:
                    await self._finish()
                    finished = True
            except TrainerMovedError as error:
                self.parts.records.event("TrainerLost", str(error))
                attached = False

    async def _attach(self) -> None:
        parts, progress = self.parts, self.parts.progress
        progress.activity = "the trainer to be ready"
        found = await self.training.attach()
        self._go_on_from(found)
        if found.again is not None:
            await self._train_again(found.again)
        elif found.step and parts.journal.data.recorded_step < found.step:
            self._record_found(found)
        await self._first_weights()
        if self.training.step == 0 or progress.reward_first is None:
            await self._evaluate()
        parts.rollouts.paused = False
        parts.rollouts.wake()
        self._last_step_end = parts.rollouts.counts.since = time.monotonic()

    def _go_on_from(self, found: Resume) -> None:
        parts, progress = self.parts, self.parts.progress
        rollouts, taken = parts.rollouts, found.step + (found.again is not None)
        if (rollouts.attempt, rollouts.consumed_step) != (self.training.attempt, taken) or not taken:
            rollouts.paused = True
            rollouts.reset(found.cursor, self.training.attempt, taken)
        progress.attempt, progress.step = self.training.attempt, self.training.step
        progress.reward_first, progress.reward_last = found.state.reward_first, found.state.reward_last
        self._consumed_prompts = found.state.consumed_prompts
        counts = parts.rollouts.counts
        counts.dropped.update({key: value for key, value in found.state.dropped.items() if not counts.dropped[key]})
        data = parts.journal.data
        parts.journal.save(
            version=max(data.version, found.state.version),
            sync_id=max(data.sync_id, found.state.sync_id),
            epoch_number=max(data.epoch_number, found.state.epoch),
            recorded_step=min(data.recorded_step, found.step),
        )

    async def _finish(self) -> None:
        progress = self.parts.progress
        await self._weights_served()
        await self._evaluate()
        progress.phase, progress.activity = "complete", ""
        self.parts.records.event("Complete", f"{progress.step} steps")

    async def _first_weights(self) -> None:
        progress = self.parts.progress
        progress.phase = "booting" if progress.engines_ready_time is None else progress.phase
        await self._weights_served()
        progress.phase = "running"
        progress.engines_ready_time = progress.engines_ready_time or time.time()

    async def _weights_served(self) -> None:
        """Wait until enough engines serve what the trainer holds."""
        self.parts.progress.activity = f"engines to serve the weights of step {self.training.step}"
        while not self._enough_serve():
            self._watch()
            await asyncio.sleep(GLANCE_SECONDS)

    def _enough_serve(self) -> bool:
        newest = self.parts.lineage.newest
        if newest is None or (newest.attempt, newest.step) != (self.training.attempt, self.training.step):
            return False
        serving = [item for item in self.parts.dispatcher.replicas.values() if item.serving]
        return self.parts.group.in_sync and len(serving) >= self.parts.min_replicas

    async def _step(self, step: int) -> None:
        progress, rollouts = self.parts.progress, self.parts.rollouts
        asked = time.monotonic()
        progress.activity = f"rollouts for step {step}"
        groups = await self._collect(step)
        waited = time.monotonic() - asked
        batch = build_batch(step, groups, self.parts.lineage, self.training.attempt, self.parts.config.advantage)
        self._consumed_prompts += len(groups)
        await self._previous_weights(step)
        progress.activity = f"the trainer's step {step}"
        request = self._request(batch)
        await self.training.keep(request)
        self.parts.records.rollouts(dump_lines(batch, self.parts.policy.tokenizer.decode))
        result = await self.training.train(request)
        self._record(batch, result, waited)
        rollouts.cancel_hopeless()
        rollouts.expect_weights()
        self._under_way = self.parts.group.announce()
        every = self.parts.config.evaluation.every_steps
        if every and step % every == 0 and step < self.parts.config.steps:
            await self._weights_served()
            await self._evaluate()

    async def _previous_weights(self, step: int) -> None:
        """Wait until the weights of the step before are on their way (they travel while the trainer computes)."""
        self.parts.progress.activity = f"the weights of step {step - 1} to be sent"
        while not self._under_way.is_set():
            self._watch()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._under_way.wait()

    async def _collect(self, step: int) -> list[Group]:
        self._stop_if_broken()
        take = asyncio.create_task(self.parts.rollouts.take(step))
        try:
            while not (await asyncio.wait({take}, timeout=WATCH_SECONDS))[0]:
                self._watch()
        finally:
            take.cancel()
        return take.result()

    def _watch(self) -> None:
        """What is looked at while the loop waits.

        Raises:
            JobFailedError: the job must end.
            TrainerMovedError: the trainer is gone or elsewhere.
        """
        self._stop_if_broken()
        if self.training.moved():
            raise TrainerMovedError("the trainer is no longer where the last step left it")

    def _stop_if_broken(self) -> None:
        parts = self.parts
        raise_if_broken(parts.members.states.values(), parts.dispatcher.replicas.values(), parts.group.verdict())

    def _request(self, batch: Batch) -> StepRequest:
        return StepRequest(
            job_uid=self.parts.config.uid,
            attempt=self.training.attempt,
            step=batch.step,
            samples=list(batch.samples),
            orchestrator=self._state().model_dump(),
        )

    def _state(self) -> RunState:
        parts = self.parts
        data = parts.journal.data
        return RunState(
            cursor=parts.rollouts.cursor.to_json(),
            version=data.version,
            sync_id=data.sync_id,
            epoch=data.epoch_number,
            consumed_prompts=self._consumed_prompts,
            dropped=dict(parts.rollouts.counts.dropped),
            reward_first=parts.progress.reward_first,
            reward_last=parts.progress.reward_last,
        )

    def _record(self, batch: Batch, result: StepResult, waited: float) -> None:
        parts, progress, counts = self.parts, self.parts.progress, self.parts.rollouts.counts
        now = time.monotonic()
        seconds = now - self._last_step_end
        own = batch.metrics | {
            "in_flight": float(parts.rollouts.num_running),
            "queued": float(parts.rollouts.num_queued),
            "dropped": float(counts.dropped_recently),
            "tokens_per_second": counts.sampled_tokens / max(now - counts.since, 1e-9),
            "wait_seconds": waited,
            "step_seconds": seconds,
        }
        counts.dropped_recently, counts.sampled_tokens, counts.since = 0, 0, now
        self._last_step_end = now
        progress.wait_seconds.append(waited)
        progress.step_seconds.append(seconds)
        parts.metrics.record({key: value for key, value in own.items() if key in ORCHESTRATOR_METRICS})
        self._step_done(result, own)

    def _step_done(self, result: StepResult, own: dict[str, float]) -> None:
        parts, progress = self.parts, self.parts.progress
        progress.step, progress.last_step_time = result.step, time.time()
        progress.metrics = result.metrics | own
        parts.metrics.step.set(result.step)
        newest = parts.lineage.newest
        parts.records.metrics(
            StepRecord(
                kind="step",
                time=time.time(),
                attempt=self.training.attempt,
                step=result.step,
                version=newest.version if newest is not None else 0,
                metrics=progress.metrics,
            )
        )
        parts.journal.save(recorded_step=result.step)
        self._judge(result)

    def _judge(self, result: StepResult) -> None:
        parts, progress = self.parts, self.parts.progress
        verdict = health.judge(result.metrics, parts.config.limits)
        waiting = health.waiting_warning(progress.wait_seconds, progress.step_seconds)
        for key in ("mismatch_kl", "logprob_diff_p99", "tis_truncated", "ratio_deviation", "waiting", "checkpoint"):
            progress.warnings.pop(key, None)
        progress.warnings |= verdict.warnings
        if waiting is not None:
            progress.warnings["waiting"] = waiting
        self._checkpoint_failures = self._checkpoint_failures + 1 if result.checkpoint_error else 0
        if result.checkpoint_error:
            progress.warnings["checkpoint"] = f"checkpoint of step {result.step} failed: {result.checkpoint_error}"
        raise_for_step(result.step, verdict, self._checkpoint_failures, progress.warnings.get("checkpoint", ""))

    async def _train_again(self, request: StepRequest) -> None:
        self.parts.progress.activity = f"the trainer's step {request.step}"
        result = await self.training.train(request)
        self._step_done(result, age_metrics(request.samples))

    def _record_found(self, found: Resume) -> None:
        state = self.parts.members.trainer_state
        result = state.last_result if state is not None else None
        if result is not None and result.step == found.step:
            self._step_done(result, {} if found.done is None else age_metrics(found.done.samples))

    async def _evaluate(self) -> None:
        parts, progress = self.parts, self.parts.progress
        if not parts.heldout or self._evaluated_step == progress.step:
            return
        progress.activity = f"the held-out evaluation of step {progress.step}"
        task = asyncio.create_task(evaluate(parts.evaluation_environment, parts.policy, parts.heldout))
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_SECONDS))[0]:
                self._stop_if_broken()
        finally:
            task.cancel()
        error = task.exception()
        if isinstance(error, EvaluationError):
            parts.records.event("EvaluationFailed", str(error))
            return
        self._evaluated_step = progress.step
        progress.evaluation_done(task.result(), parts.metrics, parts.records)


def fail(parts: Parts, reason: str, message: str) -> None:
    """End the run as failed; the status says why."""
    progress = parts.progress
    progress.phase, progress.reason, progress.message = "failed", reason, message
    parts.records.event("Failed", f"{reason}: {message}", reason=reason)
