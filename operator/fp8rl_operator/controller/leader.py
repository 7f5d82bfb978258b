"""One process of several acts: leader election by Lease, through the official client's own library.

The library holds and renews the Lease. Added here: an answer of the API server that does not come in time or at all is a failed
try and not an end; a leader that finds another's name in the Lease knows at once that it has lost; a process that was
frozen may not act before it has renewed; the Lease is given back at a regular end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.client.models import V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from fp8rl_operator.settings import Settings

log = logging.getLogger(__name__)

RENEW_SHARE = 2 / 3
RETRY_SHARE = 2 / 15
JITTER_OF_LIBRARY = 1.2


class LostLease(Exception):  # noqa: N818 - what happened, not what is wrong
    """Raised when this process does not lead any more: it must end."""


@dataclass(frozen=True)
class Times:
    """Seconds: a silent leader counts as lost after `lease`; it gives up by itself after `renew`; it renews every `retry`."""

    lease: int
    renew: float
    retry: float

    @classmethod
    def of(cls, lease: int) -> Times:
        """The times that a lease's length gives: 15 gives 10 and 2, as the controllers of Kubernetes have them."""
        retry = max(1.0, lease * RETRY_SHARE)
        return cls(lease, max(lease * RENEW_SHARE, 1.01 * JITTER_OF_LIBRARY * retry), retry)


@dataclass
class Leadership:
    """Whether this process leads. `held` is when the Lease was last renewed, in seconds of the monotonic clock."""

    identity: str
    times: Times
    held: float | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    won: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def leads(self) -> bool:
        """Whether this process may act now: nobody else can hold the Lease yet."""
        fresh = self.held is not None and time.monotonic() - self.held < self.times.renew
        return self.won.is_set() and fresh and not self.lost.is_set()


class Lock:
    """The Lease, as the library asks for it. No call of it raises or takes longer than a try may."""

    def __init__(self, settings: Settings, leadership: Leadership, client: ApiClient) -> None:
        self.name, self.namespace = settings.lease_name, settings.lease_namespace
        self.identity = leadership.identity
        self.leadership = leadership
        self.lease = LeaseLock(self.name, self.namespace, self.identity, client)

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """(True, the record that the Lease holds), or (False, an ApiException that says why not)."""
        found = await self.in_time(self.lease.get(name, namespace))
        if isinstance(found, ApiException):
            return False, found
        there, record = found
        if there and self.leadership.won.is_set() and record.holder_identity != self.identity:
            log.error("the Lease %s is held by %s", self.name, record.holder_identity or "nobody")
            self.leadership.lost.set()
        return there, record

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        """Whether the Lease was made in this process' name. (The library's own call is refused by the library's client.)"""
        body = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.lease.update_lease(election_record))
        made = await self.in_time(self.lease.api_instance.create_namespaced_lease(namespace, body))
        return self.noted(not isinstance(made, ApiException))

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        """Whether the Lease was renewed, or taken."""
        if self.leadership.lost.is_set():
            return False
        return self.noted(await self.in_time(self.lease.update(name, namespace, updated_record)))

    async def release(self) -> None:
        """Leave the Lease to whoever asks next, if it is this process'."""
        if not self.leadership.leads:
            return
        there, record = await self.get(self.name, self.namespace)
        self.leadership.lost.set()
        held = self.lease.lease_reference
        if there and record.holder_identity == self.identity and held is not None:
            held.spec.holder_identity, held.spec.lease_duration_seconds = "", 1
            await self.in_time(self.lease.api_instance.replace_namespaced_lease(self.name, self.namespace, held))

    async def in_time(self, call: Awaitable[Any]) -> Any:
        """The answer, or an ApiException that says why there is none."""
        try:
            return await asyncio.wait_for(call, self.leadership.times.renew / 2)
        except ApiException as error:
            return error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return ApiException(status=0, reason=f"no answer: {error!r}")

    def noted(self, done: object) -> bool:
        """Whether a write was done; when it was is noted."""
        if done is not True:
            return False
        self.leadership.held = time.monotonic()
        return True


async def lead(lock: Lock, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the Lease, then act for as long as it is held. Ends when `act` ends.

    Raises:
        LostLease: it was not renewed in time, or somebody else holds it.
    """
    leadership = lock.leadership
    times = leadership.times
    acting: list[asyncio.Task[None]] = []

    async def begin() -> None:
        leadership.won.set()
        acting.append(asyncio.create_task(act(), name="leader"))

    config = Config(lock, times.lease, times.renew, times.retry, begin, None)
    holding = asyncio.create_task(LeaderElection(config).run(), name="lease")
    losing = asyncio.create_task(leadership.lost.wait(), name="lease lost")
    winning = asyncio.create_task(leadership.won.wait(), name="lease won")
    try:
        await asyncio.wait({holding, winning}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        await asyncio.wait({holding, losing, *acting}, return_when=asyncio.FIRST_COMPLETED)
        if not acting or not acting[0].done():
            cause = holding.exception() if holding.done() else None
            raise LostLease(f"{lock.identity} has lost the Lease {lock.namespace}/{lock.name}") from cause
        await acting[0]
    finally:
        for task in (holding, losing, winning, *acting):
            task.cancel()
        await asyncio.gather(holding, losing, winning, *acting, return_exceptions=True)
