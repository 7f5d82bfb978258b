"""The wire between GPUs, both ends: one NCCL communicator for one epoch, made over the epoch's store.

All ranks say on the store who they are (`nccl/rank/<r>`: GPU, version of NCCL, memory mode); rank 0 looks whether that fits together
and answers with the communicator's id, or with what is wrong (`nccl/word`), so that a pair that NCCL would hang on is refused by name.
No thread ever blocks in NCCL: connecting and transfers are asked about while an abort and the clock are looked at. Whatever ends them
early aborts the communicator, which frees the GPU's stream; the time-out of a transfer is what notices a peer that died without a word.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, empty, uint8
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.weights import nccl
from fp8rl_workers.weights.wire import WireError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0001
MEET_SECONDS = 0.002
STOP_SECONDS = 0.1
ABORT_SECONDS = 5.0


@dataclass(frozen=True)
class End:
    """What one rank brings to a communicator."""

    gpu: str
    """UUID."""

    nccl: int
    """Version of its NCCL."""

    cumem: str
    """NCCL_CUMEM_ENABLE: both ends must allocate by the same means, else neither can map the other's memory."""


def misfit(ends: Mapping[int, End]) -> str:
    """Why these ranks cannot form a communicator, all reasons; "" when they can."""
    reasons = []
    for gpu in sorted({end.gpu for end in ends.values()}):
        ranks = [str(rank) for rank, end in ends.items() if end.gpu == gpu]
        if len(ranks) > 1:
            reasons.append(
                f"ranks {', '.join(ranks)} share {gpu}, and NCCL takes one rank per GPU (set transport: ipc)"
            )
    for field, words in (("nccl", "versions of NCCL"), ("cumem", "values of NCCL_CUMEM_ENABLE")):
        values = {rank: getattr(end, field) for rank, end in ends.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"rank {rank} {value or 'unset'}" for rank, value in values.items())
            reasons.append(f"the ranks have different {words}: {told} (give all pods the same)")
    return "; ".join(reasons)


def this_end(device: torch.device) -> End:
    """This rank's.

    Raises:
        InvalidInputError: its weights are not on a GPU, or there is no NCCL.
    """
    if device.type != "cuda":
        raise InvalidInputError(
            f"weightSync.transport: nccl moves memory of GPUs, and the weights are on {device}; set transport: auto or gloo"
        )
    if not torch.cuda.is_available():
        raise InvalidInputError(
            "weightSync.transport: nccl needs a GPU, and this process sees none; set transport: auto or gloo"
        )
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return End(uuid, nccl.version(), os.environ.get("NCCL_CUMEM_ENABLE", ""))


class NcclWire:
    """One rank's end (see `wire.Wire`). Buckets are on the GPU."""

    shared = False

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_seconds: float) -> None:
        """Connect.

        Raises:
            InvalidInputError: this rank has no GPU or no NCCL.
            WireError: the ranks do not fit together, or not all connected in time.
        """
        self.broken = ""
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._stop: Callable[[], str] = no_reason
        self._staging: list[Tensor] | None = [] if rank == 0 else None
        self._lock = threading.Lock()  # of whoever uses the communicator
        self._communicator: nccl.Communicator | None = None
        end, deadline = this_end(device), time.monotonic() + timeout_seconds
        unique_id = meet(store, rank, world_size, end, deadline)
        with self._lock:
            try:
                self._communicator = nccl.Communicator(unique_id, rank, world_size, device)
                self._wait(self._communicator.ready, deadline, f"rank {rank} of {world_size} connected")
            except RuntimeError as error:
                raise self._break(str(error)) from error

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """See `wire.Wire.buffers`. Receivers get new ones each time: what was received before may not be loaded yet."""
        if self._staging is None:
            return self._new(sizes)
        if [bucket.numel() for bucket in self._staging] != list(sizes):
            self._staging = []  # the old ones go before the new ones come
            self._staging = self._new(sizes)
        return self._staging

    def send(self, bucket: Tensor) -> None:
        """See `wire.Wire.send`."""
        self.broadcast([bucket])

    def receive(self, bucket: Tensor) -> None:
        """See `wire.Wire.receive`. After a `WireError` nothing writes to it any more, unless the error says so."""
        self.broadcast([bucket])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Move the bytes of rank 0's tensors into the other ranks', in one launch; back when they are there.

        Args:
            tensors: contiguous, any dtype and shape, on this rank's GPU; bytes and order as on rank 0.

        Raises:
            WireError: a peer is lost or late, or the transfer was aborted.
        """
        assert all(t.is_contiguous() and t.device == tensors[0].device for t in tensors), "contiguous, on one GPU"
        with self._lock:
            communicator = self._communicator
            if self.broken or communicator is None:
                raise WireError(self.broken)
            try:
                self._wait(communicator.ready, time.monotonic() + self._timeout_seconds, "the wire was ready")
                communicator.broadcast(tensors)
                self._wait(communicator.moved, time.monotonic() + self._timeout_seconds, "a transfer ended")
            except RuntimeError as error:
                raise self._break(str(error)) from error

    def watch(self, stop: Callable[[], str]) -> None:
        """See `wire.Wire.watch`."""
        self._stop = stop

    def abort(self, reason: str) -> None:
        """See `wire.Wire.abort`. The blocked thread aborts the communicator."""
        self.broken = self.broken or reason

    def close(self) -> None:
        """See `wire.Wire.close`. Back once NCCL's memory is free, or after ABORT_SECONDS."""
        self.abort("the wire is closed")
        self._stop = no_reason
        if self._lock.acquire(timeout=ABORT_SECONDS):  # a blocked transfer sees the reason and lets go
            self._end()
            self._lock.release()
        if self._staging:
            self._staging = []

    def _new(self, sizes: Sequence[int]) -> list[Tensor]:
        try:
            return [empty(size, dtype=uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError as error:
            raise WireError(
                f"transport nccl: no room for buckets of {sum(sizes)} bytes on {self._device}: {error}"
            ) from error

    def _wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        """Ask until it is done.

        Raises:
            RuntimeError: it failed, its time is over, or there is a reason to stop.
        """
        asked = time.monotonic()
        while not done():
            instant = time.monotonic()
            reason = self.broken
            if not reason and instant - asked > STOP_SECONDS:
                reason, asked = self._stop(), instant
            if not reason and instant > deadline:
                reason = f"a peer is lost or late: {self._timeout_seconds:g} s went by before {what}"
            if reason:
                raise nccl.NcclError(reason)
            time.sleep(POLL_SECONDS)

    def _break(self, reason: str) -> WireError:
        """The error of a wire that is over; the communicator is aborted."""
        self.broken = self.broken or reason
        if not self._end():
            self.broken += f"; NCCL still holds the GPU's stream after {ABORT_SECONDS:g} s"
        return WireError(self.broken)

    def _end(self) -> bool:
        """Abort the communicator on a thread of its own, which is waited for but not for ever; whether it came back."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return True
        thread = threading.Thread(target=end, args=(communicator,), name="fp8rl-wire-reaper", daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)
        return not thread.is_alive()


def end(communicator: nccl.Communicator) -> None:
    """Abort a communicator, and keep what it may still write to until it has."""
    try:
        communicator.abort()
    except RuntimeError as error:
        log.warning("transport nccl: the communicator was not aborted: %s", error)


def meet(store: Store, rank: int, world_size: int, own: End, deadline: float) -> bytes:
    """Compare all ranks' ends; the id of their communicator.

    Raises:
        WireError: they do not fit together, or one of them, or rank 0, has not spoken before `deadline` (monotonic seconds).
    """
    store.set(f"nccl/rank/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        ends = {r: End(**json.loads(heard(store, f"nccl/rank/{r}", deadline))) for r in range(world_size)}
        reason = misfit(ends)
        store.set("nccl/word", json.dumps({"refused": reason, "id": "" if reason else nccl.new_id().hex()}))
    word = json.loads(heard(store, "nccl/word", deadline))
    if word["refused"]:
        raise WireError(f"transport nccl: {word['refused']}")
    return bytes.fromhex(word["id"])


def heard(store: Store, key: str, deadline: float) -> str:
    """A key's value, once it is there.

    Raises:
        WireError: it is not there before `deadline`, or the store is lost.
    """
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise WireError(f"transport nccl: {key} was not said in time: its rank is lost or late")
            time.sleep(MEET_SECONDS)
        return bytes(store.get(key)).decode()
    except DistError as error:
        raise WireError(f"transport nccl: the epoch's store is lost: {error}") from error


def no_reason() -> str:
    """No reason to stop."""
    return ""
