"""Everything is listed before the first pass, again every so often, and a kind at once after kopf has listed it anew.

A watch that comes back after an outage tells what there is and not what is gone. Here a list decides: what it lacks, and what no
event has told since the list began, is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.controller.events import Events
from fp8rl_operator.controller.watch import WATCHED
from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.kinds import JOB, SELECTOR, Kind, Object

log = logging.getLogger(__name__)

PAGE_SIZE = 100
CALM_SECONDS = 5.0  # kopf's own list is over by then; a list more costs little


@dataclass
class Resync:
    """Lists of all watched kinds. `namespaces`: none for the whole cluster. `last` is in seconds of the monotonic clock."""

    api: Api
    events: Events
    namespaces: tuple[str, ...]
    every: float
    last: float | None = None
    listed: set[Kind] = field(default_factory=set)

    @property
    def progress(self) -> str:
        """How far the first lists are."""
        return f"{len(self.listed)} of {len(WATCHED)} kinds are listed"

    async def everything(self) -> None:
        """List all kinds, jobs first.

        Raises:
            ClusterError: a kind cannot be listed.
        """
        for kind in WATCHED:
            await self.one(kind)
        self.last = time.monotonic()
        self.events.metrics.count_resync()

    async def one(self, kind: Kind) -> None:
        """List one kind, and drop what is known and no more there."""
        before = self.events.store.known(kind.kind)
        unseen = dict(before)
        self.events.tombs.clear()
        async for page in self.pages(kind):
            for body in page:
                unseen.pop(body["metadata"]["uid"], None)
                self.events.listed(kind, body)
        after = self.events.store.known(kind.kind)
        for uid, body in unseen.items():
            if after.get(uid) == body:
                self.events.gone(kind, body)
        self.listed.add(kind)

    async def pages(self, kind: Kind) -> AsyncIterator[list[Object]]:
        """All objects of a kind in the served namespaces, page by page."""
        labels = "" if kind is JOB else SELECTOR
        for namespace in self.namespaces or (None,):
            async for page in self.api.pages(kind, namespace, labels=labels, size=PAGE_SIZE):
                yield page

    async def forever(self) -> None:
        """List again after kopf did, and every `every` seconds; a list that fails is tried at the next turn."""
        while True:
            await asyncio.sleep(CALM_SECONDS)
            due = time.monotonic() - (self.last or 0.0) > self.every
            kinds, self.events.relisted = self.events.relisted, set()
            try:
                if due:
                    await self.everything()
                else:
                    await self.some(kinds)
            except ClusterError as error:
                self.events.relisted |= kinds
                log.warning("objects could not be listed again: %s", error)

    async def some(self, kinds: Iterable[Kind]) -> None:
        """List a few kinds."""
        for kind in kinds:
            await self.one(kind)
