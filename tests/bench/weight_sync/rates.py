"""How fast our casts run on the card, all layers at once, into the wire's own buffers."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from fp8rl_workers.trainer.publish import Publisher
from weight_sync.memory import measured

TIMES = 9


def cast_seconds(publisher: Publisher) -> tuple[float, int]:
    """GPU seconds of an epoch's plan of casts (median of 9), and its bytes read plus written. The staging is overwritten."""
    staging = publisher._staging
    assert staging is not None
    sources = [tensor for _, tensor in publisher.source.sources()]
    seconds = []
    for _ in range(TIMES + 2):
        seconds.append(measured(staging._plan.run, sources[0].device))
        staging._plan.finish()
    moved = sum(tensor.nbytes for tensor in sources) + sum(entry.nbytes for entry in publisher.layout.tensors)
    return median(seconds[2:]), moved


class CopyTimer:
    """Seconds that each commit's copy takes on the engine's stream, events around the loader's `apply`."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.device = device
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.times: list[float] = []
        self._loader, self._apply = loader, loader.apply
        loader.apply = self._timed

    def _timed(self) -> None:
        if self.device.type != "cuda":
            start = time.monotonic()
            self._apply()
            self.times.append(time.monotonic() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._apply()
        end.record()
        self.events.append((begin, end))

    def seconds(self) -> list[float]:
        """Those so far; the loader is as before."""
        self._loader.apply = self._apply
        for begin, end in self.events:
            end.synchronize()
            self.times.append(begin.elapsed_time(end) / 1e3)
        return self.times
