"""Plays the orchestrator between one trainer process and one engine: epochs, sync requests, decisions, over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from fp8rl_workers.protocol import Decision, Epoch, Member, SyncRequest
from weight_sync.engine import ENGINE_UID, JOB_UID, Engine, Steps
from weight_sync.spans import ENGINE_CALLS, Recorder, Span
from weight_sync.trainer import TRAINER_UID, Published, TrainerSetup, run

PATIENCE_SECONDS = 240.0
EPOCH_SECONDS = 120.0
LOAD_TOKENS = {"tiny": 512, "tiny_moe": 512, "dense_8b": 1900, "moe_30b_a3b": 1400}
Transport = Literal["ipc", "gloo", "nccl"]


class TrainerFailedError(RuntimeError):
    """Raised when the trainer's process answered a word with an exception, or is gone; has its traceback."""


@dataclass
class Sync:
    """One sync. Times in seconds on the monotonic clock; `start` is the offer, `visible` when the next step sees the weights."""

    version: int
    published: Published
    start: float
    decided: float
    visible: float
    paused: float
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Offer to visible."""
        return self.visible - self.start

    @property
    def trainer_stop(self) -> float:
        """How long `weights_lock` was held."""
        return self.published.held[1] - self.published.held[0]


class TrainerProcess:
    """The trainer, started by spawn, and the pipe to it."""

    def __init__(self, setup: TrainerSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=run, args=(setup, other), name="bench-trainer", daemon=True)
        self.process.start()
        other.close()
        self.port = 0

    def ready(self) -> int:
        """Wait until its store listens; returns the port."""
        self.port = self.port or self.answer()
        return self.port

    def tell(self, word: str, *args: Any, **named: Any) -> None:
        """Say a word and do not wait."""
        self.pipe.send((word, args, named))

    def ask(self, word: str, *args: Any, **named: Any) -> Any:
        """Say a word and wait for what comes of it."""
        self.tell(word, *args, **named)
        return self.answer()

    def answer(self) -> Any:
        """The next answer.

        Raises:
            TrainerFailedError: it is an exception, late, or the process is gone.
        """
        if not self.pipe.poll(PATIENCE_SECONDS):
            raise TrainerFailedError(f"the trainer has not answered within {PATIENCE_SECONDS:.0f} s")
        try:
            fine, value = self.pipe.recv()
        except EOFError as error:
            raise TrainerFailedError("the trainer's process is gone") from error
        if not fine:
            raise TrainerFailedError(value)
        return value

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(20)


class Conductor:
    """One trainer, one engine, and the documents between them."""

    def __init__(self, trainer: TrainerProcess, engine: Engine, transport: Transport) -> None:
        self.trainer, self.engine, self.transport = trainer, engine, transport
        self.epoch: Epoch | None = None
        self.syncs = 0
        self.version = 0
        self.recorder = Recorder("engine")

    def form(self, timeout: float = EPOCH_SECONDS) -> Epoch:
        """Make the next epoch of both."""
        address = self.engine.setup.address
        trainer = Member(
            pod="trainer-0",
            uid=TRAINER_UID,
            role="trainer",
            address=address,
            ranks=[0],
            transport=self.transport,
        )
        engine = Member(
            pod="inference-0",
            uid=ENGINE_UID,
            role="inference",
            address=address,
            ranks=[1],
            transport=self.transport,
        )
        self.epoch = Epoch(
            job_uid=JOB_UID,
            attempt=0,
            epoch=self.epoch.epoch + 1 if self.epoch else 1,
            world_size=2,
            store_host=address,
            store_port=self.trainer.ready(),
            timeout_seconds=timeout,
            members=[trainer, engine],
        )
        self.trainer.tell("form", self.epoch)
        self.engine.join(self.epoch)
        self.trainer.answer()
        return self.epoch

    def fill(self, style: str = "random") -> int:
        """The trainer takes its next version's weights; returns their bytes. Not part of a sync."""
        return int(self.trainer.ask("fill", self.version + 1, style))

    def request(self) -> SyncRequest:
        """The next sync."""
        assert self.epoch is not None
        self.syncs += 1
        self.version += 1
        return SyncRequest(
            job_uid=JOB_UID,
            epoch=self.epoch.epoch,
            sync_id=self.syncs,
            version=self.version,
            timeout_seconds=self.epoch.timeout_seconds,
        )

    def begin(self, *, traced: bool = False) -> None:
        """Ask for the next sync and do not wait."""
        self.trainer.tell("sync", self.request(), traced=traced)

    def end(self) -> Sync:
        """Take the trainer's report, decide, and commit."""
        published: Published = self.trainer.answer()
        failed = [member.error for member in published.report.members if member.state != "prepared"]
        if failed:
            raise TrainerFailedError("; ".join(failed))
        decided = monotonic()
        visible = self.engine.commit(self.decision(published))
        report = self.engine.report
        assert report is not None
        paused = report.paused_seconds
        return Sync(published.report.version, published, published.start, decided, visible, paused, published.spans)

    def decision(self, published: Published) -> Decision:
        """The word that a prepared sync is to be committed."""
        report = published.report
        fields = {name: getattr(report, name) for name in ("epoch", "sync_id", "version", "step", "digest")}
        return Decision(job_uid=JOB_UID, committed=True, **fields)

    def sync(self) -> Sync:
        """One sync with the engine idle."""
        self.begin()
        return self.end()

    def traced(self) -> Sync:
        """One sync with the engine idle, with what both processes did."""
        with self.recorder.watching(ENGINE_CALLS):
            self.begin(traced=True)
            done = self.end()
        self.recorder.add("decision to visible", done.decided, done.visible)
        done.spans += stage_spans(done) + self.recorder.take()
        return done

    def arrived(self) -> bool:
        """Whether the trainer's answer is there."""
        return self.trainer.pipe.poll(0)

    def loaded(self, before: float, after: float, steps: Steps) -> Sync:
        """One sync under load, `before` seconds after the start and `after` seconds before the end of the stepping."""
        tokens = LOAD_TOKENS[self.engine.setup.model]
        self.step_for(before, steps)
        self.begin()
        self.engine.run_until(self.arrived, steps, tokens=tokens)
        done = self.end()
        self.engine.drained(steps)
        self.step_for(after, steps)
        return done

    def step_for(self, seconds: float, steps: Steps) -> None:
        """Step under load for some time."""
        end = monotonic() + seconds
        tokens = LOAD_TOKENS[self.engine.setup.model]
        self.engine.run_until(lambda: monotonic() >= end, steps, tokens=tokens)


def stage_spans(sync: Sync) -> list[Span]:
    """The stages that the trainer's report tells, one after the other, and its lock."""
    found = [Span("trainer", "weights_lock held", *sync.published.held)]
    at = sync.start
    for name, seconds in sync.published.report.stages.items():
        found.append(Span("trainer's report", name, at, at + seconds))
        at += seconds
    return found


class Progress:
    """Lines on stderr with the seconds since the start."""

    def __init__(self) -> None:
        self.start = monotonic()

    def say(self, text: str) -> None:
        """One line."""
        print(f"{monotonic() - self.start:6.1f} s: {text}", file=sys.stderr, flush=True)


def wait_joined(engine: Engine, epoch: Epoch) -> None:
    """Wait until the engine's rank is in the epoch.

    Raises:
        TimeoutError: it has not joined in time.
    """
    end = monotonic() + epoch.timeout_seconds
    while engine.state()["epoch"] != epoch.epoch:
        if monotonic() > end:
            raise TimeoutError(f"the engine has not joined epoch {epoch.epoch}: {engine.state()['error']}")
        time.sleep(0.02)
