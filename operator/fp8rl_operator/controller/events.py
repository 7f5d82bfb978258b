"""From what the watches and lists tell to the store, the metrics' facts and the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fp8rl_operator.controller.facts import Facts
from fp8rl_operator.controller.metrics import Metrics
from fp8rl_operator.controller.queue import JobQueue
from fp8rl_operator.kube.cluster import ApiCluster
from fp8rl_operator.kube.kinds import JOB, Kind, Object
from fp8rl_operator.kube.store import Store

log = logging.getLogger(__name__)

DELETED: Final = "DELETED"
UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class Events:
    """Keeps the store true and enqueues the jobs whose objects changed.

    `relisted`: kinds that kopf has listed anew since somebody looked: what was deleted meanwhile was not told. `tombs`: uids that
    went while a list of ours runs, whose older pages may still hold them. `unread`: uids of objects that cannot be read.
    """

    store: Store
    cluster: ApiCluster
    queue: JobQueue
    metrics: Metrics
    relisted: set[Kind] = field(default_factory=set)
    tombs: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)

    def told(self, kind: Kind, change: str | None, body: Object) -> None:
        """One event of a watch; `change` is None for an object that a list contained."""
        self.read(kind, body, self.gone if change == DELETED else self.there)
        if change == DELETED:
            self.unread.discard(body["metadata"]["uid"])

    def list_over(self, kind: Kind) -> None:
        """A watch has begun anew with a list, an empty one perhaps."""
        self.relisted.add(kind)

    def read(self, kind: Kind, body: Object, take: Callable[[Kind, Object], None]) -> None:
        """Take an object. One that cannot be read is said once and passed over: it may not keep all others waiting."""
        meta = body["metadata"]
        try:
            take(kind, body)
        except UNREADABLE:
            if meta["uid"] not in self.unread:
                log.exception("%s %s/%s cannot be read and is passed over", kind.kind, meta["namespace"], meta["name"])
            self.unread.add(meta["uid"])
        else:
            self.unread.discard(meta["uid"])

    def there(self, kind: Kind, body: Object) -> None:
        """An object as it is."""
        if kind is JOB:
            self.job_there(body)
        elif (uid := self.store.put_child(body)) is not None:
            self.queue.add(uid)

    def listed(self, kind: Kind, body: Object) -> None:
        """An object of a page."""
        if body["metadata"]["uid"] not in self.tombs:
            self.read(kind, body, self.there)

    def gone(self, kind: Kind, body: Object) -> None:
        """An object that is no more."""
        self.tombs.add(body["metadata"]["uid"])
        self.unread.discard(body["metadata"]["uid"])
        if kind is JOB:
            self.job_gone(body)
        elif (uid := self.store.drop_child(body)) is not None:
            self.queue.add(uid)

    def job_there(self, body: Object) -> None:
        """A job: one that is new or whose spec changed goes before the others."""
        uid = body["metadata"]["uid"]
        old = self.metrics.facts.get(uid)
        new = Facts.of(body)
        self.metrics.facts[uid] = new
        if self.store.put_job(body):
            self.queue.add(uid, urgent=old is None or old.generation != new.generation)

    def job_gone(self, body: Object) -> None:
        """Nothing is kept of a job that is no more; its children go by their owner references."""
        uid = body["metadata"]["uid"]
        self.store.drop_job(body)
        self.metrics.facts.pop(uid, None)
        self.queue.forget(uid)
        self.cluster.forget(uid)
