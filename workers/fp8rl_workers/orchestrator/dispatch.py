"""Which engine gets a request. `choose` is pure; `Dispatcher` holds the replicas and acts.

A request goes to the least loaded replica that serves a committed version and is not fenced, at most `max_in_flight` at a
time on each. The samples of one group share their prompt, so they prefer one home replica (its prefix cache) as long as
that one is not more than a group busier than the least loaded.

A call that finds its engine gone is sent again elsewhere, and the engine gets no more until it has answered a question
about its state. A log-probability that is not finite fences its replica until the
current version has been sent to it again (rule 13) and the call is sent again; a replica that is fenced for it a second
time without a finite completion in between has `nan_faults` 2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.orchestrator.client import Engine
from fp8rl_workers.orchestrator.environments import Completion
from fp8rl_workers.orchestrator.sampling import EngineLostError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
NAN_LIMIT = 2
LOST_PAUSE_SECONDS = 0.2
LOST = "lost"
NOT_FINITE = "nonFinite"
SUSPECT = "gave no answer"

BodyOf = Callable[[int], dict[str, Any]]


@dataclass
class Replica:
    """One engine as dispatch sees it. `fenced`: why it gets no requests; empty when it does."""

    uid: str
    pod: str
    engine: Engine
    version: int | None = None
    in_flight: int = 0
    fenced: str = ""
    nan_faults: int = 0
    calls: set[asyncio.Task[Completion]] = field(default_factory=set)

    @property
    def serving(self) -> bool:
        """Whether requests may go to it."""
        return self.version is not None and not self.fenced


def choose(replicas: Iterable[Replica], max_in_flight: int, home: str | None = None, slack: int = 0) -> Replica | None:
    """The replica for the next request, None when all are full or fenced.

    `home` (a uid) wins while it has room and at most `slack` requests more than the least loaded.
    """
    open_ones = [item for item in replicas if item.serving and item.in_flight < max_in_flight]
    if not open_ones:
        return None
    least = min(open_ones, key=lambda item: (item.in_flight, item.uid))
    for item in open_ones:
        if item.uid == home and item.in_flight <= least.in_flight + slack:
            return item
    return least


def all_not_finite(replicas: Iterable[Replica]) -> bool:
    """Whether every replica that can answer did so twice with values that are not finite: the weights are broken, not an engine.

    Those that boot or are gone say nothing about the weights.
    """
    faults = [item.nan_faults for item in replicas if item.version is not None and item.fenced in ("", NOT_FINITE)]
    return bool(faults) and min(faults) >= NAN_LIMIT


class Dispatcher:
    """The replicas and the requests in flight."""

    def __init__(self, max_in_flight: int) -> None:
        self.replicas: dict[str, Replica] = {}
        self.max_in_flight = max_in_flight
        self.on_not_finite: Callable[[Replica], None] = lambda _: None
        self.on_fence: Callable[[], None] = lambda: None
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """Requests that all serving replicas take together."""
        return self.max_in_flight * sum(item.serving for item in self.replicas.values())

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return sum(item.in_flight for item in self.replicas.values())

    def add(self, uid: str, pod: str, engine: Engine) -> None:
        """A replica that may get requests once it serves a version. A node's restart may give a pod another address."""
        self.replicas.setdefault(uid, Replica(uid, pod, engine)).engine = engine

    def remove(self, uid: str) -> None:
        """A replica that is no longer part of the job; its calls in flight are sent again elsewhere at once."""
        self.lose(uid, "removed")
        self.replicas.pop(uid, None)

    def fence(self, uid: str, reason: str) -> None:
        """Send no more requests to a replica; the ones in flight may end."""
        replica = self.replicas.get(uid)
        if replica is not None and replica.fenced != reason:
            replica.fenced = reason
            log.warning("%s fenced: %s", replica.pod, reason)
            self.on_fence()

    def lose(self, uid: str, reason: str = LOST) -> None:
        """Fence a replica that is gone; its calls in flight are sent again elsewhere."""
        self.fence(uid, reason)
        replica = self.replicas.get(uid)
        for call in tuple(replica.calls) if replica is not None else ():
            call.cancel()

    async def serve(self, uid: str, version: int) -> None:
        """A replica has committed `version`: it gets requests again."""
        replica = self.replicas.get(uid)
        if replica is None:
            return
        replica.version, replica.fenced = version, ""
        async with self._changed:
            self._changed.notify_all()

    async def generate(self, body_of: BodyOf, home: str | None = None, slack: int = 0) -> Completion:
        """Sample one completion; `body_of(version)` makes the request for the version that the replica serves.

        Raises:
            EngineLostError: MAX_ATTEMPTS engines gave no answer.
            InvalidInputError: an engine refused the request.
        """
        lost = 0
        while True:
            replica = await self._acquire(home, slack)
            version = replica.version
            try:
                completion = await self._call(replica, body_of(version or 0))
            except EngineLostError as error:
                lost += 1
                if lost >= MAX_ATTEMPTS:
                    raise
                log.warning("sent again elsewhere: %s", error)
                if replica.serving:
                    self.fence(replica.uid, SUSPECT)
                await asyncio.sleep(LOST_PAUSE_SECONDS)
            except NonFiniteError:
                self._not_finite(replica, version)
            else:
                replica.nan_faults = 0
                return completion
            finally:
                await self._release(replica)

    async def _call(self, replica: Replica, body: dict[str, Any]) -> Completion:
        call = asyncio.create_task(replica.engine.generate(body))
        replica.calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
            replica.calls.discard(call)
        if call.cancelled():
            raise EngineLostError(f"{replica.pod} was lost while it generated")
        return call.result()

    def _not_finite(self, replica: Replica, version: int | None) -> None:
        if replica.serving and replica.version == version:
            replica.nan_faults += 1
            self.fence(replica.uid, NOT_FINITE)
        self.on_not_finite(replica)

    async def _acquire(self, home: str | None, slack: int) -> Replica:
        async with self._changed:
            while True:
                replica = choose(self.replicas.values(), self.max_in_flight, home, slack)
                if replica is not None:
                    replica.in_flight += 1
                    return replica
                await self._changed.wait()

    async def _release(self, replica: Replica) -> None:
        replica.in_flight -= 1
        async with self._changed:
            self._changed.notify_all()
