"""The wire within one machine, both ends: the receivers read the sender's own buckets, nothing is copied.

The buckets are one piece of memory of the wire's own, known by a file descriptor: of a GPU's memory (`cuda_memory`), or an anonymous file
(memfd) in the host's. Receivers get the descriptor over a Unix socket (`descriptors`), whose name is on the store under
`ipc/region/<digest of the sizes>`. Nothing is left behind, however the processes end. Both ends must share a machine and a network
namespace: one machine without containers, or one pod.

That bytes are written is said by whatever follows them on the store (the seal): the sender must have waited for its stream.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fp8rl_workers.weights.cuda_memory import CudaRegion
from fp8rl_workers.weights.descriptors import DescriptorServer, fetch
from fp8rl_workers.weights.wire import WireError

ALIGNMENT = 512
POLL_SECONDS = 0.001
FETCH_SECONDS = 10.0


class HostRegion:
    """Bytes of host memory, made here, or another process's by its `descriptor`."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Make or map it.

        Raises:
            OSError: there is not enough memory.
        """
        if descriptor is None:
            self.descriptor = os.memfd_create("fp8rl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
        else:
            self.descriptor = descriptor
        self.tensor = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)


class IpcWire:
    """One rank's end (see `wire.Wire`)."""

    shared = True

    def __init__(self, store: Store, rank: int, device: torch.device, timeout_seconds: float) -> None:
        self.broken = ""
        self._store = store
        self._rank = rank
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._stop: Callable[[], str] = lambda: ""
        self._server: DescriptorServer | None = None
        self._sizes: list[int] = []
        self._buckets: list[Tensor] = []

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """See `wire.Wire.buffers`."""
        if self.broken:
            raise WireError(self.broken)
        if list(sizes) != self._sizes:
            starts, total = placed(sizes)
            key = f"ipc/region/{hashlib.sha256(json.dumps(list(sizes)).encode()).hexdigest()[:16]}"
            self._let_go()
            try:
                base = self._make(key, total) if self._rank == 0 else self._open(key, total)
            except (OSError, RuntimeError, ValueError) as error:
                self.broken = f"transport ipc: {total} bytes on {self._device} cannot be shared between trainer and engine: {error}; are both on one machine and in one network namespace?"
                raise WireError(self.broken) from error
            self._buckets = [base[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            self._sizes = list(sizes)
        return self._buckets

    def send(self, bucket: Tensor) -> None:  # noqa: ARG002 - it is there already
        """See `wire.Wire.send`: the bytes are where they are."""
        self._check()

    def receive(self, bucket: Tensor) -> None:  # noqa: ARG002
        """See `wire.Wire.receive`."""
        self._check()

    def watch(self, stop: Callable[[], str]) -> None:
        """See `wire.Wire.watch`."""
        self._stop = stop

    def abort(self, reason: str) -> None:
        """See `wire.Wire.abort`."""
        self.broken = self.broken or reason

    def close(self) -> None:
        """See `wire.Wire.close`. The memory goes with the last view of it."""
        self.abort("the wire is closed")
        self._stop = lambda: ""
        self._let_go()

    def _check(self) -> None:
        self.broken = self.broken or self._stop()
        if self.broken:
            raise WireError(self.broken)

    def _let_go(self) -> None:
        self._buckets, self._sizes = [], []
        if self._server is not None:
            self._server.close()
        self._server = None

    def _make(self, key: str, total: int) -> Tensor:
        """Memory of this rank's own, and a server for whoever shall read it."""
        cuda = self._device.type == "cuda"
        region = CudaRegion(total, self._device) if cuda else HostRegion(total)
        self._server = DescriptorServer(region.descriptor)
        self._store.set(key, json.dumps({"socket": self._server.name, "device": self._device.type}))
        return region.tensor

    def _open(self, key: str, total: int) -> Tensor:
        """Rank 0's memory, of which it speaks before the offer that needs it.

        Raises:
            WireError: it does not, or its memory is of another kind of device.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while not self._store.check([key]):
            self._check()
            if time.monotonic() > deadline:
                raise WireError(f"transport ipc: the trainer has shared no memory within {self._timeout_seconds:g} s")
            time.sleep(POLL_SECONDS)
        told = json.loads(self._store.get(key))
        descriptor = fetch(told["socket"], FETCH_SECONDS)
        try:
            if told["device"] == "cuda":
                return CudaRegion(total, self._device, descriptor).tensor
            return HostRegion(total, descriptor).tensor
        finally:
            os.close(descriptor)


def placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buckets of these sizes begin in one region, and its size."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, max(total, ALIGNMENT)
