"""Who did what when: spans on the monotonic clock, which all processes of a Linux machine share."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

TRAINER_CALLS = {
    "fp8rl_workers.weights.group:Group.put_offer": "offer",
    "fp8rl_workers.weights.group:Group.put_layout": "layout",
    "fp8rl_workers.trainer.publish:Staging.fill": "cast",
    "fp8rl_workers.weights.group:Group.wait_released": "wait for release",
    "fp8rl_workers.weights.group:Group.put_seal": "seal",
    "fp8rl_workers.weights.group:Group.wait_reports": "wait for reports",
}
ENGINE_CALLS = {
    "fp8rl_workers.inference.agent:Member._take": "prepare",
    "fp8rl_workers.weights.group:Group.wait_seal": "wait for seal",
    "fp8rl_workers.weights.group:Group.put_report": "report",
    "fp8rl_workers.weights.load:Loader.prepare": "digest",
    "fp8rl_workers.weights.load:Loader.verify": "verify",
    "fp8rl_workers.weights.load:Loader.apply": "copy",
    "fp8rl_workers.inference.core:EngineControl.commit": "commit",
}


class Span(NamedTuple):
    """One piece of work. Times in seconds on the monotonic clock."""

    process: str
    name: str
    start: float
    end: float


class Recorder:
    """Collects the spans of one process."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.spans: list[Span] = []

    def add(self, name: str, start: float, end: float) -> None:
        """Keep one."""
        self.spans.append(Span(self.process, name, start, end))

    def take(self) -> list[Span]:
        """Those so far, which are then forgotten."""
        found, self.spans = self.spans, []
        return found

    @contextmanager
    def watching(self, calls: dict[str, str]) -> Iterator[None]:
        """Within it each call of these functions (`module:Class.method`) is a span. What does not exist is left out."""
        undo: list[tuple[Any, str, Any]] = []
        for path, label in calls.items():
            owner, name = located(path)
            if owner is not None and hasattr(owner, name):
                plain = getattr(owner, name)
                undo.append((owner, name, plain))
                setattr(owner, name, self._timed(plain, label))
        try:
            yield
        finally:
            for owner, name, plain in undo:
                setattr(owner, name, plain)

    def _timed(self, plain: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            try:
                return plain(*args, **kwargs)
            finally:
                self.add(label, start, time.monotonic())

        return call


def located(path: str) -> tuple[Any, str]:
    """Owner and attribute behind `module:Class.method`; None where the class is not there."""
    module, _, dotted = path.partition(":")
    *parents, name = dotted.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name


class TimedLock:
    """A lock that knows for how long it was held last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: tuple[float, float] = (0.0, 0.0)

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        """As `threading.Lock.acquire`."""
        got = self._lock.acquire(*args, **kwargs)
        if got:
            self.held = (time.monotonic(), 0.0)
        return got

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self.held = (self.held[0], time.monotonic())
        self._lock.release()

    def locked(self) -> bool:
        """As `threading.Lock.locked`."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def plot(spans: Sequence[Span], file: str, title: str) -> None:
    """The timeline as PNG: one row for each kind of work, coloured by process, milliseconds from the offer on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    first = min(span.start for span in spans)
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    rows = list(dict.fromkeys((span.process, span.name) for span in ordered))
    colours = dict(zip(dict.fromkeys(span.process for span in ordered), plt.get_cmap("tab10").colors, strict=False))
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.32 * len(rows)))
    for span in ordered:
        row = rows.index((span.process, span.name))
        axes.barh(row, 1e3 * (span.end - span.start), left=1e3 * (span.start - first), color=colours[span.process])
        axes.annotate(
            f" {1e3 * (span.end - span.start):.2f}",
            (1e3 * (span.end - first), row),
            fontsize=7,
            va="center",
            clip_on=False,
        )
    axes.set_yticks(range(len(rows)), [f"{process}: {name}" for process, name in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds after the offer")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(file, dpi=140)
    plt.close(figure)


def table(spans: Sequence[Span]) -> str:
    """Where the microseconds go, as a table in Markdown."""
    first = min(span.start for span in spans)
    lines = ["| process | work | from, us | to, us | takes, us |", "| --- | --- | --- | --- | --- |"]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        start, end = 1e6 * (span.start - first), 1e6 * (span.end - first)
        lines.append(f"| {span.process} | {span.name} | {start:.0f} | {end:.0f} | {end - start:.0f} |")
    return "\n".join(lines)
