"""The workers: each takes the next job, runs its pass and says when the next one is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.controller.leader import Leadership
from fp8rl_operator.controller.metrics import Metrics, reason_of
from fp8rl_operator.controller.passes import Passes
from fp8rl_operator.controller.queue import JobQueue

log = logging.getLogger(__name__)

STUCK_SECONDS: Final = 180.0  # a request gives up after half a minute
PAUSE_SECONDS: Final = 0.1


@dataclass
class Workers:
    """So many workers on one queue. `begun`: since when the passes that run now do, in seconds of the monotonic clock."""

    queue: JobQueue
    passes: Passes
    metrics: Metrics
    leadership: Leadership
    count: int
    begun: dict[str, float] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False

    def all(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The workers, each to be made a task."""
        return (self.work() for _ in range(self.count))

    async def work(self) -> None:
        """Pass after pass, while this process leads."""
        while True:
            uid = str(await self.queue.get())
            if self.leadership.leads and not self.draining:
                await self.one(uid)
            else:
                await asyncio.sleep(PAUSE_SECONDS)
                self.queue.done(uid, PAUSE_SECONDS)

    async def one(self, uid: str) -> None:
        """One pass. Whatever goes wrong with one job is told and tried again, and stops no other."""
        self.begun[uid] = time.monotonic()
        self.idle.clear()
        try:
            self.queue.done(uid, await self.passes.run(uid))
            self.forget_gone(uid)
        except ClusterError as error:
            log.warning("job %s: tried again in %.1f s: %s", self.name(uid), self.fail(uid, error), error)
        except Exception as error:
            seconds = self.fail(uid, error)
            log.exception("job %s: tried again in %.1f s: a bug", self.name(uid), seconds)
        finally:
            self.metrics.passes.observe(time.monotonic() - self.begun.pop(uid))
            if not self.begun:
                self.idle.set()

    def forget_gone(self, uid: str) -> None:
        """Nothing is kept of a job whose children went after it."""
        if uid not in self.metrics.facts:
            self.queue.forget(uid)

    def fail(self, uid: str, error: Exception) -> float:
        """Count a failure; seconds until the next try."""
        self.metrics.errors.labels(reason_of(error)).inc()
        return self.queue.failed(uid)

    def name(self, uid: str) -> str:
        """Namespace and name for the log."""
        facts = self.metrics.facts.get(uid)
        return uid if facts is None else f"{facts.namespace}/{facts.name}"

    async def drain(self, seconds: float) -> None:
        """Begin no pass any more, and give those that run so many seconds."""
        self.draining = True
        if self.begun:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), seconds)

    def healthy(self, now: float) -> tuple[bool, str]:
        """Whether passes end. `now` in seconds of the monotonic clock."""
        stuck = [uid for uid, begun in self.begun.items() if now - begun > STUCK_SECONDS]
        if stuck:
            return False, f"the pass of job {self.name(stuck[0])} has been running for over {STUCK_SECONDS:.0f} s"
        return True, f"{len(self.begun)} passes run, {len(self.queue)} jobs wait"
