"""The trainer's process: plain tensors with HF names, the real store, group and `publish`; it does what the conductor's pipe says."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fp8rl_workers.protocol import Epoch, SyncReport, SyncRequest
from fp8rl_workers.trainer.publish import Publisher, WireFormat
from fp8rl_workers.weights.group import Group, StoreHost, join_group
from fp8rl_workers.weights.offer import stacked
from weight_sync.memory import Memory, memory
from weight_sync.models import CONFIGS, Precision, Weights, resolve
from weight_sync.spans import TRAINER_CALLS, Recorder, Span, TimedLock

TOKEN = "bench-token"
TRAINER_UID = "bench-trainer"
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class TrainerSetup:
    """What the process is started with."""

    model: str
    precision: Precision
    device: str
    address: str
    bucket_bytes: int = BUCKET_BYTES


@dataclass
class Published:
    """A publication as the trainer saw it, times on the monotonic clock; `held`: when `weights_lock` was."""

    report: SyncReport
    start: float
    end: float
    held: tuple[float, float]
    spans: list[Span]


class Source:
    """What `publish` asks of a trainer's backend."""

    def __init__(self, weights: Weights) -> None:
        self.held = weights
        self.names = [weight.name for weight in stacked(weights.plan.weights())]
        self.weights_lock: Any = TimedLock()
        self.step = 0

    def sources(self) -> Iterator[tuple[str, Tensor]]:
        """HF name (or a stack's) and weight, in the plan's order."""
        for name in self.names:
            yield name, self.held.tensor(name)

    def rounding(self) -> None:
        """To the nearest."""


class Trainer:
    """One method for each word of the conductor."""

    def __init__(self, setup: TrainerSetup, pipe: Connection) -> None:
        self.setup = setup
        self.pipe = pipe
        self.device = torch.device(setup.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.resolved, plan = resolve(CONFIGS[setup.model], setup.precision)
        self.weights = Weights(plan, self.device)
        self.source = Source(self.weights)
        self.form_ = WireFormat(
            form=self.resolved.wire,
            scale_format=self.resolved.scale_format,
            weights=stacked(plan.weights()),
            bucket_bytes=setup.bucket_bytes,
        )
        self.host = StoreHost(setup.address, 0)
        self.group: Group | None = None
        self.publisher: Publisher | None = None
        self.offers = 0
        self.recorder = Recorder("trainer")

    def port(self) -> int:
        """The store's port."""
        return self.host.port

    def fill(self, version: int, style: str) -> int:
        """Take the weights of a version; returns their bytes."""
        self.weights.fill(version, style)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.source.step = version
        return self.weights.bytes_held()

    def form(self, epoch: Epoch) -> int:
        """Leave the epoch before, join this one."""
        if self.group is not None:
            self.group.close()
        self.offers = 0
        address = self.setup.address
        self.group = join_group(epoch, 0, TRAINER_UID, address, self.host, token=TOKEN, device=self.device)
        self.publisher = Publisher(self.group, self.source, self.form_, 0)
        return epoch.epoch

    def sync(self, request: SyncRequest, *, traced: bool) -> Published:
        """Publish the weights as they are."""
        assert self.publisher is not None
        n, self.offers = self.offers, self.offers + 1
        with self.recorder.watching(TRAINER_CALLS if traced else {}):
            start = monotonic()
            report = self.publisher.publish(n, request)
            end = monotonic()
        return Published(report, start, end, self.source.weights_lock.held, self.recorder.take())

    def memory(self) -> Memory:
        """What this process holds."""
        return memory(self.device)

    def peer(self, packed: bool) -> float:
        """Send the same weights through vLLM's own backend; returns the seconds of the casts."""
        from weight_sync.peer import Sender

        casting = Sender(self.weights, self.resolved, self.pipe).send(packed=packed)
        torch.cuda.ipc_collect()
        return casting

    def peer_module(self) -> str:
        """Import vLLM here, which takes a quarter of a minute."""
        from weight_sync.peer import ipc_module

        return str(ipc_module().__name__)

    def forget(self) -> int:
        """Give cached card memory back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return 0

    def cast_seconds(self) -> tuple[float, int]:
        """GPU seconds of all casts, and their bytes read plus written."""
        from weight_sync.rates import cast_seconds

        assert self.publisher is not None
        return cast_seconds(self.publisher)

    def kernels(self, begin: bool) -> list[Span]:
        """Begin to watch this process's kernels, or tell those seen."""
        from weight_sync.kernels import KernelWatch

        return KernelWatch.of("trainer").turn(begin=begin)

    def close(self) -> int:
        """Leave."""
        if self.group is not None:
            self.group.close()
        self.host.close()
        return os.getpid()


def run(setup: TrainerSetup, pipe: Connection) -> None:
    """Answer the conductor until it says `close` or goes away. An answer is (True, value) or (False, traceback)."""
    sys.stdout = sys.stderr  # the last line of stdout is the conductor's result
    trainer = Trainer(setup, pipe)
    pipe.send((True, trainer.port()))
    word = ""
    while word != "close":
        try:
            word, args, named = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(trainer, word)(*args, **named))
        except Exception:  # noqa: BLE001 the process's one boundary: the conductor decides
            answer = (False, traceback.format_exc())
        pipe.send(answer)
