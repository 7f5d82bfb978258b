"""Rank 0's part in the tests of the wires on GPUs (see `wire_end`)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import Store, TCPStore
from wire_end import HOST, PATIENCE, epoch_store, open_end

from fp8rl_workers.weights.wire import Wire

SIZES = [64 << 20, 256, 1 << 20]


def settle() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_bytes() -> int:
    """Of GPU 0; of no GPU, none."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


@dataclass
class Desk:
    """A store, and a peer that joins every epoch."""

    transport: str
    store: TCPStore
    peer: subprocess.Popen[bytes]
    device: torch.device

    def epoch(self, number: int) -> Store:
        """Its keys; the peer is let in."""
        found = epoch_store(self.store, number)
        found.set("begin", "1")
        return found

    def join(self, number: int, seconds: float = 30.0) -> tuple[Store, Wire]:
        """Join an epoch as rank 0."""
        store = self.epoch(number)
        return store, open_end(self.transport, store, 0, self.device, seconds)

    def leave(self, store: Store, wire: Wire, offers: int) -> int:
        """End an epoch on both sides; free bytes of the GPU then."""
        store.set(f"offer/{offers}", "end")
        store.wait(["closed"], PATIENCE)
        wire.close()
        return free_bytes()


@contextlib.contextmanager
def desk(transport: str, mode: str, own: str, other: str) -> Iterator[Desk]:
    """Start a peer on device `other`; rank 0 is on `own`."""
    store = TCPStore(HOST, 0, None, True, PATIENCE, wait_for_workers=False)
    command = [sys.executable, str(Path(__file__).with_name("wire_end.py")), transport, mode, str(store.port), other]
    peer = subprocess.Popen(command)
    try:
        yield Desk(transport, store, peer, torch.device(own))
    finally:
        peer.kill()
        peer.wait()


def offer(store: Store, wire: Wire, n: int, value: int) -> int:
    """Stage `value` in all buckets as the n-th offer; the sum that the peer read."""
    buckets = wire.buffers(SIZES)
    store.set(f"offer/{n}", " ".join(map(str, SIZES)))
    for bucket in buckets:
        bucket.fill_(value)
    settle()
    for bucket in buckets:
        wire.send(bucket)
    store.set(f"seal/{n}", "1")
    return int(store.get(f"sum/{n}"))
