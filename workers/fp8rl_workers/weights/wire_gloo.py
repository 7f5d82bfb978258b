"""The wire over Gloo, both ends: one process group for one epoch, made directly over the epoch's store.

No `init_process_group`: vLLM's workers already have a global group. Buckets are broadcast from rank 0. Gloo's own `abort`
frees nobody, so a transfer runs on Gloo's thread while the caller waits for its future, for an abort and for the clock. An
abandoned transfer ends by Gloo's time-out, on Gloo's thread; until then it may still write to its buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor, empty, uint8
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from fp8rl_workers.weights.wire import WireError

POLL_SECONDS = 0.1


def open_group(store: Store, rank: int, world_size: int, address: str, timeout_seconds: float) -> ProcessGroupGloo:
    """Connect a Gloo group that listens on `address` only and whose transfers end after `timeout_seconds`.

    Raises:
        WireError: not all ranks connected in time, or the address is not this machine's.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name an address
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_seconds)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        return ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
    except RuntimeError as error:
        message = f"rank {rank} of {world_size} at {address} could not connect to the other ranks within {timeout_seconds:g} s: {first_line(error)}"
        raise WireError(message) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text; torch appends stacks."""
    return str(error).partition("\n")[0]


class GlooWire:
    """One rank's end of a Gloo wire (see `wire.Wire`). Buckets are in host memory."""

    shared = False

    def __init__(self, store: Store, rank: int, world_size: int, address: str, timeout_seconds: float) -> None:
        self.broken = ""
        self._timeout_seconds = timeout_seconds
        self._wake = threading.Event()
        self._stop: Callable[[], str] = never
        self._staging: list[Tensor] | None = [] if rank == 0 else None
        self._group: ProcessGroupGloo | None = open_group(store, rank, world_size, address, timeout_seconds)

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """See `wire.Wire.buffers`. Receivers get new ones each time: what was received before may not be loaded yet."""
        if self._staging is None:
            return [empty(size, dtype=uint8) for size in sizes]
        if [bucket.numel() for bucket in self._staging] != list(sizes):
            self._staging = [empty(size, dtype=uint8) for size in sizes]
        return self._staging

    def send(self, bucket: Tensor) -> None:
        """See `wire.Wire.send`."""
        self._broadcast(bucket)

    def receive(self, bucket: Tensor) -> None:
        """See `wire.Wire.receive`."""
        self._broadcast(bucket)

    def watch(self, stop: Callable[[], str]) -> None:
        """See `wire.Wire.watch`."""
        self._stop = stop

    def abort(self, reason: str) -> None:
        """See `wire.Wire.abort`."""
        self.broken = self.broken or reason
        self._wake.set()

    def close(self) -> None:
        """See `wire.Wire.close`."""
        self.abort("the wire is closed")
        self._group = None
        self._stop = never  # it refers to the wire's owner: connections would wait for the collector

    def _broadcast(self, bucket: Tensor) -> None:
        assert bucket.dtype == uint8, bucket.dtype
        assert bucket.dim() == 1, bucket.shape
        assert bucket.is_contiguous()
        group = self._group
        if self.broken or group is None:
            raise WireError(self.broken)
        self._wake.clear()
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            work: Work = group.broadcast([bucket], options)  # type: ignore[attr-defined]
            wake = self._wake
            work.get_future().add_done_callback(lambda _: wake.set())
            self._wait(group, work)
            work.wait()
        except RuntimeError as error:
            self.broken = self.broken or f"a peer is lost or late: {first_line(error)}"
            raise WireError(self.broken) from error

    def _wait(self, group: ProcessGroupGloo, work: Work) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not work.is_completed():
            self._wake.wait(POLL_SECONDS)
            reason = self.broken or self._stop()
            if not reason and time.monotonic() > deadline:
                reason = f"a transfer took longer than {self._timeout_seconds:g} s"
            if reason:
                self.broken = reason
                threading.Thread(target=outlive, args=(group, work), name="fp8rl-wire-reaper", daemon=True).start()
                raise WireError(reason)


def never() -> str:
    """No reason to stop."""
    return ""


def outlive(group: ProcessGroupGloo, work: Work) -> None:
    """Hold a group until its stuck transfer has ended: dropping it earlier would block the thread that drops it."""
    while not work.is_completed():
        time.sleep(POLL_SECONDS)
    del group, work
