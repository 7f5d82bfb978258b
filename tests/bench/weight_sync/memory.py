"""What memory a process and its card hold, and how fast the card copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

GIB = float(1 << 30)


class Memory(NamedTuple):
    """Bytes. `card`: used on the whole card by all processes; `allocated`, `reserved`: by torch here; `peak`: highest reserved."""

    card: int
    allocated: int
    reserved: int
    peak: int
    resident: int


def memory(device: torch.device) -> Memory:
    """What is held at this moment; the card's figures are 0 on a CPU."""
    resident = sum(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("RssAnon", "RssShmem"))
    )
    if device.type != "cuda":
        return Memory(0, 0, 0, 0, resident)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    stats = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)
    allocated, reserved, peak = (stat(device) for stat in stats)
    return Memory(total - free, allocated, reserved, peak, resident)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes read plus written per second of a copy of `size` bytes on the device; median of 9."""
    seconds = copy_times(device, size)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / median(seconds)


def copy_times(device: torch.device, size: int) -> list[float]:
    """Seconds of 9 copies, after one that is not counted."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [measured(lambda: target.copy_(source), device) for _ in range(10)][1:]


def measured(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some work on the device's current stream."""
    if device.type != "cuda":
        start = time.monotonic()
        work()
        return time.monotonic() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3
