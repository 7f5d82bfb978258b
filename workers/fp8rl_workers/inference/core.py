"""What the plugin adds to vLLM's engine core: one turn of its loop in which all ranks change their weights.

vLLM handles a utility call between two steps. `commit` lets the outputs of steps in flight in first (async scheduling),
has every rank verify its shadow, then has every rank copy it, forgets the prefix cache and turns the version: no pause, no
step in between. Answers are JSON objects; a refusal is `{"error", "reason", "status"}`, because vLLM flattens exceptions.
"""

from __future__ import annotations

import time
from typing import Any

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.errors import DigestError, InvalidModelError, NotYetError, StaleError, SyncError, WorkerError
from fp8rl_workers.inference import rank
from fp8rl_workers.inference.prefixes import forget_prefixes
from fp8rl_workers.inference.spans import NO_VERSION, VersionBook
from fp8rl_workers.protocol import CommitReport, Decision, Epoch

Answer = dict[str, Any]


def book_of(scheduler: Any) -> VersionBook:
    """The version book of a scheduler, made at its first use."""
    book: VersionBook | None = getattr(scheduler, "fp8rl_book", None)
    if book is None:
        book = scheduler.fp8rl_book = VersionBook()
    return book


class EngineControl:
    """The control side of one engine core. All methods run in the core's own loop."""

    def __init__(self, core: Any, *, recompute: bool) -> None:
        """`recompute`: running requests compute their KV anew after a commit (`weightSync.kvOnCommit`)."""
        self.core = core
        self.recompute = recompute
        self.committed: Decision | None = None
        self.report: CommitReport | None = None

    def state(self, _: str = "") -> Answer:
        """What the ranks say, joined with what is committed."""
        ranks = self._ranks(rank.state)
        merged = rank.merge_states(ranks)
        merged["world_size"] = len(ranks)
        if self.committed is not None:
            merged |= {
                "version": self.committed.version,
                "step": self.committed.step,
                "digest": self.committed.digest,
            }
        return merged

    def layers(self, _: str = "") -> Answer:
        """Names of the quantized layers; the audit of the state says whether a rank differs."""
        return self._ranks(rank.layers)[0]

    def join(self, epoch: str) -> Answer:
        """Hand an epoch to the agents of all ranks; they join in their own threads.

        Raises:
            StaleError: the epoch is older than the current one, or of another job.
        """
        self._ranks(rank.join, Epoch.model_validate_json(epoch).model_dump_json())
        return self.state()

    def abort(self, decision: str) -> Answer:
        """Forget what is prepared for this sync, and stop receiving it."""
        self._ranks(rank.abort, decision)
        return self.state()

    def commit(self, text: str) -> Answer:
        """Serve the prepared version from the next step on.

        Raises:
            StaleError: another epoch or sync id than the prepared one.
            NotYetError: nothing is prepared.
            DigestError: what is prepared are no longer the bytes that were sent; the old version goes on.
            WorkerError: a rank could not load; the engine serves no version until the next commit.
        """
        start = time.perf_counter()
        decision = Decision.model_validate_json(text)
        if self._is_again(decision) and self.report is not None:
            return self.report.model_dump()
        self._finish_steps_in_flight()
        self._ranks(rank.verify, text)
        self._fence()
        self._ranks(rank.apply, text)
        self._forget_kv(decision.version)
        running = self._turn(decision.version)
        self.committed = decision
        self.report = CommitReport(
            version=decision.version,
            digest=decision.digest,
            running=running,
            paused_seconds=time.perf_counter() - start,
        )
        return self.report.model_dump()

    def _is_again(self, decision: Decision) -> bool:
        """Whether this very decision is committed already."""
        done = self.committed
        if done is None or (decision.epoch, decision.sync_id) > (done.epoch, done.sync_id):
            return False
        if (decision.epoch, decision.sync_id, decision.version) == (done.epoch, done.sync_id, done.version):
            return True
        raise StaleError(
            f"commit of epoch {decision.epoch}, sync {decision.sync_id}, version {decision.version} comes late: "
            f"epoch {done.epoch}, sync {done.sync_id}, version {done.version} is committed"
        )

    def _finish_steps_in_flight(self) -> None:
        """Let the outputs of scheduled steps in: their tokens belong to the version that sampled them."""
        while self.core.batch_queue:
            future, scheduled, executed = self.core.batch_queue.pop()
            output = future.result()
            if output is None:
                executed.result()
            for item in self.core.scheduler.update_from_output(scheduled, output).items():
                self.core.output_queue.put_nowait(item)

    def _fence(self) -> None:
        """Serve no version: whatever fails before the next turn, tokens from here on count for no published weights."""
        self.committed = self.report = None
        self._turn(NO_VERSION)

    def _turn(self, version: int) -> dict[str, int]:
        return book_of(self.core.scheduler).turn(version, self.core.scheduler.requests)

    def _forget_kv(self, version: int) -> None:
        if self.recompute:
            self.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        else:
            forget_prefixes(self.core.scheduler, version)

    def _ranks(self, function: Any, *args: str) -> list[Answer]:
        """Call a function on each worker rank; the first refusal is raised."""
        answers: list[Answer] = self.core.model_executor.collective_rpc(function, args=args)
        for number, answer in enumerate(answers):
            if "error" in answer:
                raise refusal(f"rank {number}: {answer['error']}", answer["reason"])
        return answers


REFUSALS: dict[str, type[WorkerError]] = {
    kind.reason: kind for kind in (StaleError, NotYetError, DigestError, InvalidModelError, SyncError, WorkerError)
}


def refusal(message: str, reason: str) -> WorkerError:
    """The error behind a rank's answer."""
    return REFUSALS.get(reason, WorkerError)(message)


def answer_of(error: WorkerError) -> Answer:
    """An error as an answer."""
    return {"error": str(error), "reason": error.reason, "status": error.status}


def utility(name: str) -> Any:
    """A method for vLLM's `EngineCore` that runs one of `EngineControl` and answers instead of raising."""

    def call(core: Any, payload: str) -> Answer:
        control: EngineControl | None = getattr(core, "fp8rl_control", None)
        if control is None:
            job = EngineConfig.load(PodEnvironment.read().config)
            control = core.fp8rl_control = EngineControl(core, recompute=job.weight_sync.kv_on_commit == "recompute")
        try:
            answer: Answer = getattr(control, name)(payload)
        except WorkerError as error:
            return answer_of(error)
        return answer

    return call
