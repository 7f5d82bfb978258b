"""An engine rank on a GPU for the tests of the wires, as a process: joins epochs 1, 2, ... and reads what rank 0 says on the store.

`wire_end.py <transport> <mode> <port> <device>`; mode `read`: sums of each offer, and when the epoch ends the next one;
`stop`: gets the first bucket of the first offer, or maps the shared ones, and hangs; `silent`: joins and hangs.
Offers: store key `offer/<n>` of the epoch: sizes of buckets, or "end". Answers: `sum/<n>`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from fp8rl_workers.weights.wire import Wire, WireError
from fp8rl_workers.weights.wire_ipc import IpcWire
from fp8rl_workers.weights.wire_nccl import NcclWire

HOST = "127.0.0.1"
PATIENCE = timedelta(seconds=60)


def open_end(transport: str, store: Store, rank: int, device: torch.device, seconds: float) -> Wire:
    """One rank's end of a wire between two."""
    if transport == "ipc":
        return IpcWire(store, rank, device, seconds)
    return NcclWire(store, rank, 2, device, seconds)


def epoch_store(store: Store, number: int) -> Store:
    """Keys of one epoch."""
    return PrefixStore(f"epoch/{number}", store)


def held(device: torch.device) -> int:
    """Bytes of the GPU that tensors of this process hold, once what they do not need is given back; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def read(store: Store, wire: Wire) -> None:
    """Answer every offer of an epoch."""
    n = 0
    while (text := store.get(f"offer/{n}").decode()) != "end":
        buckets = wire.buffers([int(size) for size in text.split()])
        for bucket in buckets:
            wire.receive(bucket)
        store.wait([f"seal/{n}"], PATIENCE)
        store.set(f"sum/{n}", str(sum(int(b.sum(dtype=torch.int64)) for b in buckets)))
        n += 1


def stop(store: Store, wire: Wire) -> None:
    """Hang with the first offer in hand."""
    buckets = wire.buffers([int(size) for size in store.get("offer/0").decode().split()])
    if wire.shared:
        buckets[0].sum().item()
    else:
        wire.receive(buckets[0])
    store.set("stopped", "1")
    time.sleep(600)


def silent(store: Store, _: Wire) -> None:
    """Hang before the first offer."""
    store.set("stopped", "1")
    time.sleep(600)


MODES: dict[str, Callable[[Store, Wire], None]] = {"read": read, "stop": stop, "silent": silent}


def main() -> None:
    transport, mode, port, place = sys.argv[1:]
    device = torch.device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = TCPStore(HOST, int(port), None, False, PATIENCE)
    number = 1
    while True:
        epoch = epoch_store(store, number)
        epoch.wait(["begin"], PATIENCE)
        try:
            wire = open_end(transport, epoch, 1, device, 60)
            MODES[mode](epoch, wire)
        except WireError as error:
            epoch.set("refused", str(error))
            number += 1
            continue
        wire.close()
        del wire
        epoch.set("closed", str(held(device)))
        number += 1


if __name__ == "__main__":
    main()
