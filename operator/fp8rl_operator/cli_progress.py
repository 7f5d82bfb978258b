"""What `fp8rl run` shows while it runs: a bar on a terminal, else one line every few seconds."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fp8rl_operator import names
from fp8rl_operator.reconcile import Pass
from fp8rl_operator.spec import FP8RLJob

LINE_SECONDS = 10.0
WINDOW = 10


class Figures:
    """The newest figures of a run's metrics.jsonl, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.newest: dict[str, float] = {}

    def update(self) -> None:
        """Read what has been added."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]  # half a line may be cut off again by its writer's successor
        self._offset += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            self.newest |= record["metrics"]
            if record["kind"] == "step":
                self._steps.append((record["step"], record["time"]))

    def seconds_left(self, steps: int) -> float | None:
        """Estimated from the last steps; None before the second one."""
        if len(self._steps) < 2:
            return None
        (first, begin), (last, end) = self._steps[0], self._steps[-1]
        return None if last <= first else (steps - last) * (end - begin) / (last - first)

    def text(self) -> str:
        """Reward, KL, age and sync time in one line."""
        shown = (
            ("reward", "reward", "{:.3f}"),
            ("held out", "reward_heldout", "{:.3f}"),
            ("KL", "mismatch_kl", "{:.1e}"),
            ("age", "off_policy_max", "{:.0f}"),
            ("sync", "sync_seconds", "{:.2f} s"),
        )
        return "  ".join(f"{name} {form.format(self.newest[key])}" for name, key, form in shown if key in self.newest)


class Screen(Protocol):
    """Shows one pass."""

    def show(self, job: FP8RLJob, done: Pass) -> None:
        """Show a pass."""
        ...


def clock(seconds: float | None) -> str:
    """Minutes and seconds."""
    return "-:--" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def state_line(done: Pass) -> str:
    """What the job does or waits for."""
    if done.plan.verdict is not None:
        return f"{done.plan.verdict.reason}: {done.plan.verdict.message}"
    what = done.plan.stalled or done.plan.waiting
    return "starting" if what is None else what.message.splitlines()[-1]


class Lines:
    """For logs: one line every LINE_SECONDS, and at once when something else is waited for."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._last = 0.0
        self._state = ""

    def show(self, job: FP8RLJob, done: Pass) -> None:
        """Print a line when it is time."""
        self._figures.update()
        now, state = time.monotonic(), state_line(done)
        step = done.seen.orchestrator.step if done.seen.orchestrator is not None else 0
        kind = done.plan.waiting.reason if done.plan.waiting is not None else state
        changed = kind != self._state
        if now - self._last < LINE_SECONDS and not changed:
            return
        self._last, self._state = now, kind
        steps = job.spec.rollout.steps
        left = f"left {clock(self._figures.seconds_left(steps))}" if step else ""
        parts = [time.strftime("%H:%M:%S"), job.name, state, self._figures.text(), left]
        sys.stdout.write("  ".join(part for part in parts if part) + "\n")
        sys.stdout.flush()


class Bar:
    """For terminals: a rich progress bar."""

    def __init__(self, figures: Figures, progress: Any, task: Any) -> None:
        self._figures = figures
        self._progress = progress
        self._task = task

    def show(self, job: FP8RLJob, done: Pass) -> None:
        """Redraw the bar."""
        self._figures.update()
        step = done.seen.orchestrator.step if done.seen.orchestrator is not None else 0
        steps = job.spec.rollout.steps
        runs = done.plan.waiting is not None and done.plan.waiting.reason == names.RUNNING
        text = (self._figures.text() if runs else "") or state_line(done)
        self._progress.update(
            self._task, completed=step, total=steps, state=text, left=clock(self._figures.seconds_left(steps))
        )


@contextlib.contextmanager
def screen(folder: Path, name: str, steps: int) -> Iterator[Screen]:
    """A bar on a terminal, lines elsewhere."""
    figures = Figures(folder / "metrics.jsonl")
    if not sys.stdout.isatty():
        yield Lines(figures)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
    )
    with Progress(*columns) as progress:
        yield Bar(figures, progress, progress.add_task(name, total=steps, state="starting", left="-:--"))
