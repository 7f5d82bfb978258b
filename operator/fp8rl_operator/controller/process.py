"""The process: servers, leadership, and while it leads the watches, the lists and the workers.

Exit codes: 0 after SIGTERM or SIGINT, 1 when the Lease or the watches are lost (start it again), 2 for settings that cannot
be read, 3 for a CRD that is absent or too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.controller.events import Events
from fp8rl_operator.controller.leader import Leadership, Lock, LostLease, Times, lead
from fp8rl_operator.controller.metrics import Metrics
from fp8rl_operator.controller.passes import Passes
from fp8rl_operator.controller.queue import JobQueue
from fp8rl_operator.controller.resync import Resync
from fp8rl_operator.controller.schema import schema_fault
from fp8rl_operator.controller.server import Pages, serve
from fp8rl_operator.controller.watch import watch
from fp8rl_operator.controller.workers import Workers
from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.cluster import ApiCluster
from fp8rl_operator.kube.store import Store
from fp8rl_operator.settings import Settings

log = logging.getLogger(__name__)

ENDED: Final = 0
LOST: Final = 1
OLD_CRD: Final = 3
SCHEMA_TRIES: Final = 10
SCHEMA_RETRY_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 5.0
DRAIN_SECONDS: Final = 6.0  # with the next two less than the grace period of deploy/operator
RELEASE_SECONDS: Final = 4.0
STOP_SECONDS: Final = 8.0  # kopf waits five for what still runs
LEASE_CONNECTIONS: Final = 2
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Operator:
    """One process of the operator. The Lease has connections of its own: no crowd of requests may keep it waiting."""

    settings: Settings
    api: Api
    lease_api: Api
    metrics: Metrics
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Put the parts together."""
        settings = self.settings
        self.store = Store()
        self.cluster = ApiCluster(self.api, self.store)
        self.queue = JobQueue()
        self.events = Events(self.store, self.cluster, self.queue, self.metrics)
        self.resync = Resync(self.api, self.events, settings.namespaces, settings.resync_seconds)
        self.leadership = Leadership(settings.lease_identity, Times.of(settings.lease_seconds))
        self.api.may_write = lambda: self.leadership.leads
        self.lock = Lock(settings, self.leadership, self.lease_api._client)  # noqa: SLF001
        passes = Passes(self.store, self.cluster, settings)
        self.workers = Workers(self.queue, passes, self.metrics, self.leadership, settings.concurrency)
        self.metrics.measure(lambda: len(self.queue), lambda: self.leadership.leads)

    async def run(self) -> int:
        """Until a signal or a loss; the exit code."""
        self.catch_signals()
        runners = await serve(self.settings, Pages(self.metrics, self.healthy, self.ready))
        try:
            return await self.until_stopped()
        finally:
            for runner in runners:
                await runner.cleanup()
            await self.cluster.close()
            await self.api.close()
            await self.lease_api.close()

    async def until_stopped(self) -> int:
        """Lead when it is this process' turn."""
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        leading = asyncio.create_task(self.lead(), name="lead")
        await asyncio.wait({stopping, leading}, return_when=asyncio.FIRST_COMPLETED)
        if not leading.done():
            await self.hand_over(leading)
        stopping.cancel()
        leading.cancel()
        (ended,) = await asyncio.gather(leading, return_exceptions=True)
        if self.stop.is_set() or isinstance(ended, asyncio.CancelledError):
            return ENDED
        if isinstance(ended, LostLease):
            log.error("%s; this process ends", ended)
            return LOST
        if isinstance(ended, BaseException):
            raise ended
        return ended

    async def hand_over(self, leading: asyncio.Task[int]) -> None:
        """End in order: the passes that run are finished, the Lease is given back, the watches are closed."""
        log.info("stopping: %d passes run", len(self.workers.begun))
        await self.workers.drain(DRAIN_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.lock.release(), RELEASE_SECONDS)
        if self.leadership.lost.is_set():
            await asyncio.wait({leading}, timeout=STOP_SECONDS)

    async def lead(self) -> int:
        """Wait for the Lease and act. The exit code if there is nothing to be led."""
        if (fault := await self.find_fault()) is not None:
            log.error("%s", fault)
            return OLD_CRD
        await lead(self.lock, self.act)
        return LOST

    async def find_fault(self) -> str | None:
        """What is wrong with the served CRD; one that has just been applied is waited for."""
        tries = 0
        while True:
            try:
                fault = await schema_fault(self.api)
                tries += 1
            except ClusterError as error:
                fault = str(error)
            if fault is None or tries >= SCHEMA_TRIES:
                return fault
            log.warning("asked again in %g s: %s", SCHEMA_RETRY_SECONDS, fault)
            await asyncio.sleep(SCHEMA_RETRY_SECONDS)

    async def act(self) -> None:
        """What the leader does: list, work, watch. Ends when a part of it does."""
        await self.list_all()
        log.info("leading: %d jobs", len(self.metrics.facts))
        started, stop = asyncio.Event(), asyncio.Event()
        events = watch(self.settings.namespaces, self.events.told, self.events.list_over, started, stop)
        watching = asyncio.create_task(events, name="kopf")
        others = [asyncio.create_task(worker) for worker in self.workers.all()]
        others += [
            asyncio.create_task(self.resync.forever(), name="resync"),
            asyncio.create_task(self.take_signals_back(started), name="signals"),
        ]
        try:
            done, _ = await asyncio.wait({watching, *others}, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in others:
                part.cancel()
            stop.set()
            await asyncio.wait({watching}, timeout=STOP_SECONDS)
            watching.cancel()
            await asyncio.gather(watching, *others, return_exceptions=True)

    async def list_all(self) -> None:
        """The first lists, tried until they are in."""
        while True:
            try:
                return await self.resync.everything()
            except ClusterError as error:
                log.warning("objects cannot be listed, tried again in %g s: %s", RETRY_SECONDS, error)
            await asyncio.sleep(RETRY_SECONDS)

    def catch_signals(self) -> None:
        """SIGTERM and SIGINT stop this process in an orderly way."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)

    async def take_signals_back(self, started: asyncio.Event) -> None:
        """Kopf takes the signals for itself when it starts."""
        await started.wait()
        self.catch_signals()
        await asyncio.Event().wait()

    def healthy(self) -> tuple[bool, str]:
        """Whether this process should live on."""
        return self.workers.healthy(time.monotonic())

    def ready(self) -> tuple[bool, str]:
        """Whether it leads with all lists in, or stands by."""
        if not self.leadership.won.is_set():
            return True, "standby: another process leads"
        return self.resync.last is not None, f"leader: {self.resync.progress}"


async def run(settings: Settings) -> int:
    """Run the operator; the exit code."""
    metrics = Metrics()
    api = await Api.connect(on_request=lambda verb, kind, code, _: metrics.count_request(verb, kind, code))
    lease_api = await Api.connect(connections=LEASE_CONNECTIONS)
    return await Operator(settings, api, lease_api, metrics).run()
