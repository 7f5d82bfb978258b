"""What a process ran on the card: each kernel and copy of a while, from torch's profiler, on the monotonic clock."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from weight_sync.spans import Span

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH = 48


class KernelWatch:
    """The profiler of one process; `of` finds it again."""

    known: ClassVar[dict[str, KernelWatch]] = {}

    def __init__(self, process: str) -> None:
        self.process = process
        self.profiler: Any = None

    @classmethod
    def of(cls, process: str) -> KernelWatch:
        """The process's one watch."""
        return cls.known.setdefault(process, cls(process))

    def turn(self, *, begin: bool) -> list[Span]:
        """Begin, or end and tell what was seen."""
        from torch.profiler import ProfilerActivity, profile

        if begin:
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.__enter__()
            return []
        self.profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            return read_trace(json.loads(file.read_text()), self.process, time.time() - time.monotonic())


def read_trace(trace: dict[str, Any], process: str, shift: float) -> list[Span]:
    """Spans of a Chrome trace's device work. `shift`: the wall clock less the monotonic one, in seconds."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e9 - shift
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") in KINDS:
            start = base + event["ts"] / 1e6
            found.append(Span(f"{process}'s GPU", event["name"][:NAME_LENGTH], start, start + event["dur"] / 1e6))
    return sorted(found, key=lambda span: span.start)
