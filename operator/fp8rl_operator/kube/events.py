"""Events of Kubernetes: those that the operator records, and the warnings about what keeps a job from its pods."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from fp8rl_operator import names
from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.kinds import EVENT, Object
from fp8rl_operator.kube.read import seconds
from fp8rl_operator.observed import Trouble
from fp8rl_operator.plan_memory import from_time
from fp8rl_operator.spec import FP8RLJob

log = logging.getLogger(__name__)

SAME_SECONDS: Final = 600.0
LIST_SECONDS: Final = 15.0
KEPT_SECONDS: Final = 120.0  # a list that is older stands in for none that fails
RECENT_SECONDS: Final = 900.0
MAX_MESSAGE: Final = 1024
MAX_NAME: Final = 253
CUT: Final = " …"
STATE_CLAIM: Final = "state"

Clock = Callable[[], float]


class Subject(Protocol):
    """The job that an event is about; one that cannot be parsed has these all the same."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def name(self) -> str:
        """Its name."""


@dataclass
class Recorder:
    """Records events of jobs; the same one of a job at most once in `SAME_SECONDS`. Never fails a pass."""

    api: Api
    instance: str
    clock: Clock = time.time
    _told: dict[tuple[str, str, str], float] = field(default_factory=dict)

    async def record(self, job: Subject, reason: str, message: str, *, warning: bool) -> None:
        """Record one event."""
        now, key = self.clock(), (job.uid, reason, message)
        self._told = {old: when for old, when in self._told.items() if now - when < SAME_SECONDS}
        if key in self._told:
            return
        self._told[key] = now
        try:
            await self.api.create(event(job, reason, message, self.instance, now, warning=warning))
        except ClusterError as error:
            log.warning("event %s of job %s/%s was not recorded: %s", reason, job.namespace, job.name, error)

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._told = {key: when for key, when in self._told.items() if key[0] != uid}


def event(job: Subject, reason: str, message: str, instance: str, now: float, *, warning: bool) -> Object:
    """A core/v1 Event of a job."""
    stamp = from_time(now)
    text = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - len(CUT)] + CUT
    suffix = f".{secrets.token_hex(8)}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": job.name[: MAX_NAME - len(suffix)] + suffix, "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "reason": reason,
        "message": text,
        "type": "Warning" if warning else "Normal",
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "reportingInstance": instance,
    }


Answer = asyncio.Task[list[Object] | ClusterError]


@dataclass(frozen=True)
class Listing:
    """A list of events, begun at a time in Unix seconds and perhaps not answered."""

    begun: float
    task: Answer


@dataclass
class Warnings:
    """Warning events of namespaces, listed when somebody asks and at most every `LIST_SECONDS` for all jobs of one together."""

    api: Api
    clock: Clock = time.time
    _lists: dict[tuple[str, str], Listing] = field(default_factory=dict)

    async def troubles(self, job: FP8RLJob, pods: Iterable[str], claims: Iterable[str]) -> tuple[Trouble, ...]:
        """What is said of the job's workloads, of these pods and of these claims, one of each role, the newest first.

        Raises:
            ClusterError: events cannot be listed.
        """
        found = await self.listed(job.namespace, "type=Warning")
        for claim in claims:
            fields = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}"
            found = [*found, *await self.listed(job.namespace, fields)]
        return newest(job, found, frozenset(pods), frozenset(claims), self.clock())

    async def listed(self, namespace: str, fields: str) -> list[Object]:
        """Events, those of a list that is not too old; all who ask meanwhile wait for the same list.

        Raises:
            ClusterError: they cannot be listed, nor were they shortly before.
        """
        now = self.clock()
        self._lists = {key: item for key, item in self._lists.items() if now - item.begun < KEPT_SECONDS}
        listing = self._lists.get((namespace, fields))
        if listing is None or now - listing.begun >= LIST_SECONDS:
            before = None if listing is None else listing.task
            listing = Listing(now, asyncio.create_task(self._list(namespace, fields, before)))
            self._lists[namespace, fields] = listing
        items = await asyncio.shield(listing.task)
        if not isinstance(items, ClusterError):
            return items
        if self._lists.get((namespace, fields)) is listing:
            del self._lists[namespace, fields]
        raise ClusterError(str(items)) from items

    async def _list(self, namespace: str, fields: str, before: Answer | None) -> list[Object] | ClusterError:
        try:
            return [short(item) for item in await self.api.list_objects(EVENT, namespace, fields=fields)]
        except ClusterError as error:
            last = await before if before is not None else error
            if isinstance(last, ClusterError):
                return error
            log.warning("events of namespace %s were not listed, those of before stand: %s", namespace, error)
            return last


def short(item: Object) -> Object:
    """What is read of an event."""
    times = (item.get("series") or {}).get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime")
    stamp = next((text for text in (*times, item["metadata"].get("creationTimestamp")) if text), None)
    about = item["involvedObject"]
    return {
        "kind": about.get("kind", ""),
        "name": about.get("name", ""),
        "reason": item.get("reason") or "",
        "message": item.get("message") or "",
        "time": 0.0 if stamp is None else seconds(stamp),
    }


def newest(
    job: FP8RLJob, events: Iterable[Object], pods: frozenset[str], claims: frozenset[str], now: float
) -> tuple[Trouble, ...]:
    """The newest trouble of each role within `RECENT_SECONDS`; a claim that the job names is of no role."""
    found: dict[str, tuple[float, Trouble]] = {}
    for item in events:
        role = role_of(job, item, pods, claims)
        if role is None or now - item["time"] > RECENT_SECONDS or (role in found and found[role][0] >= item["time"]):
            continue
        found[role] = (item["time"], Trouble(role, item["reason"], item["message"]))
    return tuple(trouble for _, trouble in sorted(found.values(), key=lambda pair: -pair[0]))


def role_of(job: FP8RLJob, item: dict[str, Any], pods: frozenset[str], claims: frozenset[str]) -> str | None:
    """The role that an event is about: by its workload, its ReplicaSet, one of `pods` or its claim; None for others'."""
    kind, name = item["kind"], item["name"]
    if kind == "PersistentVolumeClaim" and name in claims:
        return ""
    for role in (names.TRAINER, names.INFERENCE, names.ORCHESTRATOR):
        child = names.child_name(job.name, role)
        about = {
            "StatefulSet": name == child,
            "Deployment": name == child,
            "ReplicaSet": re.fullmatch(rf"{re.escape(child)}-[a-z0-9]+", name) is not None,
            "Pod": name in pods and name.startswith(f"{child}-"),
            "PersistentVolumeClaim": name.startswith(f"{STATE_CLAIM}-{child}-"),
        }
        if about.get(kind, False):
            return role
    return None
