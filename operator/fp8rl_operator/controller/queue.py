"""Which job is next: one pass of a job at a time, many causes become one pass, failures back off.

A job is known by its uid. Everything happens in one event loop; nothing here waits but `get`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MOST_SECONDS = 120.0
JITTER = 0.2
SETTLE_SECONDS = 1.0
SETTLE_MOST_SECONDS = 10.0
SETTLE_LINE = 8  # keys in line that double the rest
YOUNG_SECONDS = 300.0
YOUNG_WAIT_SECONDS = 60.0
URGENT_AT_ONCE = 2
YOUNG_AT_ONCE = 4


class Line(IntEnum):
    """Where a key waits, the first served first."""

    URGENT = 0
    NORMAL = 1
    YOUNG = 2


def backoff(failures: int, chance: float) -> float:
    """Seconds until the next try after so many failures: doubled by each, spread by a fifth. `chance` in [0, 1)."""
    plain = min(BACKOFF_FIRST_SECONDS * float(2 ** min(failures - 1, 30)), BACKOFF_MOST_SECONDS)
    return plain * (1 + JITTER * (2 * chance - 1))


def rest(settle: float, line: int) -> float:
    """Seconds that a key rests after a pass while so many wait."""
    return min(settle * (1 + line / SETTLE_LINE), max(settle, SETTLE_MOST_SECONDS))


Waiters = deque[tuple[Hashable, float]]


@dataclass(eq=False)
class JobQueue:
    """Keys that wait for a pass.

    A key that is added while it waits is there once; one that is added while its pass runs comes again after it. After a pass a
    key rests for `settle` seconds, in which its causes are collected: what a pass writes comes back as events, a dozen at a
    time. The longer the line, the longer the rest, up to `SETTLE_MOST_SECONDS`. `urgent` causes (the job itself is new or was changed)
    are served before the others and do not rest; no more than `urgent_at_once` of them run, for theirs are the passes that write a lot:
    more at once would not be done sooner, only each later. A key is young for `YOUNG_SECONDS` after an urgent pass; young ones wait
    until no urgent one waits or runs, but no longer than `YOUNG_WAIT_SECONDS`, and no more than `young_at_once` run: a thousand new jobs
    need their first pass, not each a third one.
    """

    settle: float = SETTLE_SECONDS
    urgent_at_once: int = URGENT_AT_ONCE
    young_at_once: int = YOUNG_AT_ONCE
    _lines: tuple[Waiters, Waiters, Waiters] = field(default_factory=lambda: (deque(), deque(), deque()))
    _waiting: dict[Hashable, Line] = field(default_factory=dict)
    _running: dict[Hashable, Line] = field(default_factory=dict)
    _again: dict[Hashable, bool] = field(default_factory=dict)
    _timers: dict[Hashable, asyncio.TimerHandle] = field(default_factory=dict)
    _rested: dict[Hashable, float] = field(default_factory=dict)
    _urged: dict[Hashable, float] = field(default_factory=dict)
    _failures: dict[Hashable, int] = field(default_factory=dict)
    _gone: set[Hashable] = field(default_factory=set)
    _there: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        """Keys that wait for a worker; not those that rest or run."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Keys whose pass runs."""
        return len(self._running)

    def add(self, key: Hashable, *, urgent: bool = False) -> None:
        """A cause for a pass of this key."""
        if key in self._running:
            self._again[key] = self._again.get(key, False) or urgent
            return
        if key in self._waiting:
            if urgent and self._waiting[key] is not Line.URGENT:
                self._wait(key, Line.URGENT)
            return
        now = asyncio.get_running_loop().time()
        left = self._rested.get(key, 0.0) - now
        if left > 0 and not urgent:
            self.add_after(key, left, sooner=True)
            return
        self._cancel(key)
        young = now - self._urged.get(key, -YOUNG_SECONDS) < YOUNG_SECONDS
        self._wait(key, Line.URGENT if urgent else Line.YOUNG if young else Line.NORMAL)
        self._there.set()

    def add_after(self, key: Hashable, seconds: float, *, sooner: bool = False) -> None:
        """A cause in so many seconds, in place of the key's timer; `sooner`: only if that is earlier."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if sooner and timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel(key)
        self._timers[key] = loop.call_later(seconds, self._due, key)

    async def get(self) -> Hashable:
        """The next key; its pass runs until `done`."""
        while True:
            if (key := self._pop()) is not None:
                self._cancel(key)
                return key
            self._there.clear()
            await self._there.wait()

    def done(self, key: Hashable, again_after: float | None) -> None:
        """The pass of a key has ended well; the next one is in so many seconds at the latest, None: only on a new cause."""
        self._failures.pop(key, None)
        if self._running[key] is Line.URGENT:
            self._urged[key] = asyncio.get_running_loop().time()
        if self._end(key, rest(self.settle, len(self))) and again_after is not None:
            self.add_after(key, again_after, sooner=True)

    def failed(self, key: Hashable) -> float:
        """The pass of a key could not be done: it is tried again after a back-off, or at once if the job itself was changed.

        Returns the back-off in seconds.
        """
        failures = self._failures.get(key, 0) + 1
        seconds = backoff(failures, random.random())
        if self._end(key, seconds):
            self._failures[key] = failures
            self.add_after(key, seconds, sooner=True)
        return seconds

    def forget(self, key: Hashable) -> None:
        """The key's job is gone: nothing of it is kept."""
        self._cancel(key)
        for memory in (self._waiting, self._again, self._rested, self._failures, self._urged):
            memory.pop(key, None)
        if key in self._running:
            self._gone.add(key)  # its pass still runs: no second one may begin beside it

    def _end(self, key: Hashable, seconds: float) -> bool:
        """The key rests, unless its job was forgotten meanwhile; whether it is still known."""
        del self._running[key]
        self._there.set()
        if key in self._gone:
            self._gone.discard(key)
            self._again.pop(key, None)
            self._urged.pop(key, None)
            return False
        self._rested[key] = asyncio.get_running_loop().time() + seconds
        if key in self._again:
            self.add(key, urgent=self._again.pop(key))
        return True

    def _due(self, key: Hashable) -> None:
        del self._timers[key]
        self._rested.pop(key, None)
        self.add(key)

    def _cancel(self, key: Hashable) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _wait(self, key: Hashable, line: Line) -> None:
        self._waiting[key] = line
        self._lines[line].append((key, asyncio.get_running_loop().time()))

    def _first(self, line: Line) -> tuple[Hashable, float] | None:
        """Who waits first in a line, and since when. Keys that were forgotten or moved are passed over."""
        waiters = self._lines[line]
        while waiters and self._waiting.get(waiters[0][0]) is not line:
            waiters.popleft()
        return waiters[0] if waiters else None

    def _pop(self) -> Hashable | None:
        """A waiting key whose pass runs from now on."""
        for line in Line:
            first = self._first(line)
            if first is not None and self._may_run(line, first[1]):
                key, _ = self._lines[line].popleft()
                self._running[key] = self._waiting.pop(key)
                return key
        return None

    def _may_run(self, line: Line, since: float) -> bool:
        """Whether one more of a line, who has waited since then, may run beside those that do."""
        running = list(self._running.values())
        if line is Line.URGENT:
            return running.count(line) < self.urgent_at_once
        if line is Line.NORMAL:
            return True
        crowded = Line.URGENT in running or self._first(Line.URGENT) is not None
        late = asyncio.get_running_loop().time() - since >= YOUNG_WAIT_SECONDS
        return running.count(line) < self.young_at_once and (late or not crowded)
