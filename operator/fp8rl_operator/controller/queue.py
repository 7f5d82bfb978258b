"""Which job is next: one pass of a job at a time, many causes become one pass, failures back off.

A job is known by its uid. Everything happens in one event loop; nothing here waits but `get`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MOST_SECONDS = 120.0
JITTER = 0.2
SETTLE_SECONDS = 1.0
SETTLE_MOST_SECONDS = 10.0
SETTLE_LINE = 8  # keys in line that double the rest
URGENT_AT_ONCE = 4


def backoff(failures: int, chance: float) -> float:
    """Seconds until the next try after so many failures: doubled by each, spread by a fifth. `chance` in [0, 1)."""
    plain = min(BACKOFF_FIRST_SECONDS * float(2 ** min(failures - 1, 30)), BACKOFF_MOST_SECONDS)
    return plain * (1 + JITTER * (2 * chance - 1))


def rest(settle: float, line: int) -> float:
    """Seconds that a key rests after a pass while so many wait."""
    return min(settle * (1 + line / SETTLE_LINE), max(settle, SETTLE_MOST_SECONDS))


@dataclass(eq=False)
class JobQueue:
    """Keys that wait for a pass.

    A key that is added while it waits is there once; one that is added while its pass runs comes again after it. After a pass a
    key rests for `settle` seconds, in which its causes are collected: what a pass writes comes back as events, a dozen at a
    time. The longer the line, the longer the rest, up to `SETTLE_MOST_SECONDS`: a thousand new jobs need their first pass, not each a
    third one. `urgent` causes (the job itself is new or was changed) are served before the others and do not rest; no more than
    `urgent_at_once` of them run, for theirs are the passes that write a lot: more at once would not be done sooner, only each later.
    """

    settle: float = SETTLE_SECONDS
    urgent_at_once: int = URGENT_AT_ONCE
    _urgent: deque[Hashable] = field(default_factory=deque)
    _normal: deque[Hashable] = field(default_factory=deque)
    _waiting: dict[Hashable, bool] = field(default_factory=dict)
    _running: dict[Hashable, bool] = field(default_factory=dict)
    _again: dict[Hashable, bool] = field(default_factory=dict)
    _timers: dict[Hashable, asyncio.TimerHandle] = field(default_factory=dict)
    _rested: dict[Hashable, float] = field(default_factory=dict)
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
            if urgent and not self._waiting[key]:
                self._waiting[key] = True
                self._urgent.append(key)
            return
        left = self._rested.get(key, 0.0) - asyncio.get_running_loop().time()
        if left > 0 and not urgent:
            self.add_after(key, left, sooner=True)
            return
        self._cancel(key)
        self._waiting[key] = urgent
        (self._urgent if urgent else self._normal).append(key)
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
        for memory in (self._waiting, self._again, self._rested, self._failures):
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

    def _pop(self) -> Hashable | None:
        """A waiting key whose pass runs from now on, urgent ones first. Keys that were forgotten or moved are passed over."""
        full = sum(self._running.values()) >= self.urgent_at_once
        for line, urgent in ((self._urgent, True), (self._normal, False)):
            while line and not (urgent and full):
                key = line.popleft()
                if self._waiting.get(key) is urgent:
                    self._running[key] = self._waiting.pop(key)
                    return key
        return None
