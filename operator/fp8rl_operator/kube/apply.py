"""A job's children made equal to the desired ones, with no write where nothing differs.

A child that the store does not know is applied so that it can only be created: with a resourceVersion that nothing has, which the API
server ignores for an object that is not there and refuses with 409 for one that is. A known one is applied with its uid, which
no other object has. So nobody else's object is ever touched, and no request is spent on asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Final

from fp8rl_operator import names
from fp8rl_operator.kube import read
from fp8rl_operator.kube.api import CONFLICT, NOT_FOUND, Api, ApiError
from fp8rl_operator.kube.compare import digest, satisfied, signed
from fp8rl_operator.kube.frozen import frozen
from fp8rl_operator.kube.kinds import BY_NAME, POD, WORKLOADS, Object, kind_of
from fp8rl_operator.kube.store import Child, Key, Store
from fp8rl_operator.plan_types import Outcome
from fp8rl_operator.spec import FP8RLJob

CREATE_ONLY: Final = "1"  # a resourceVersion that no object of etcd can have
TRIES: Final = 3
INVALID: Final = 422


class Clash(Exception):  # noqa: N818 - an outcome, told in `Outcome.clashes`
    """Raised for an object that has a child's name and is not the job's."""


@dataclass(frozen=True)
class Done:
    """What became of one object: nothing of it is set where nothing was to be done."""

    name: str
    changed: bool = False
    failed: str = ""
    clash: bool = False

    @property
    def stands(self) -> bool:
        """Whether the object is as it shall be."""
        return not self.failed and not self.clash


@dataclass(frozen=True)
class Applier:
    """Applies to one API server what the store says is needed."""

    api: Api
    store: Store

    async def apply(
        self, job: FP8RLJob, objects: Iterable[Object], end: Iterable[str], force: Iterable[str]
    ) -> Outcome:
        """All children: what is not desired goes, workloads come last, a new one only on what stands, then pods are ended.

        `end` and `force`: uids of pods.

        Raises:
            ClusterError: the API server does not answer.
        """
        wanted = list(objects)
        keys = {key_of(item) for item in wanted}
        rest = [item for item in wanted if item["kind"] not in WORKLOADS]
        done = await together([*(self.child(job, item) for item in rest), *self.prune(job, keys)])
        ready = all(item.stands for item in done)
        known = self.store.entry(job.uid).children
        last = [item for item in wanted if item["kind"] in WORKLOADS and (ready or key_of(item) in known)]
        workloads = await together([self.child(job, item) for item in last])
        if all(item.stands for item in workloads):
            done += await together([self.end(job, uid, None) for uid in end])
        done += await together([self.end(job, uid, 0) for uid in force])
        return outcome([*done, *workloads])

    async def child(self, job: FP8RLJob, body: Object) -> Done:
        """One child."""
        key, mark = key_of(body), digest(body)
        name = "/".join(key)
        known = self.store.entry(job.uid).children.get(key)
        if known is not None and known.matched == mark:
            return Done(name)
        live = self.store.body_of(job.uid, key)
        desired = signed(frozen(body, live))
        if known is not None and live is not None and stands(known, desired, live, mark):
            return Done(name)
        try:
            await self.write(job, key, desired, mark)
        except Clash:
            return Done(name, clash=True)
        except ApiError as error:
            return Done(name, failed=error.message)
        return Done(name, changed=True)

    async def write(self, job: FP8RLJob, key: Key, desired: Object, mark: str) -> None:
        """Server-side apply of a child, looked at again when it is not what the store says. `mark`: see `Child.matched`.

        Raises:
            Clash: the name is somebody else's.
            ApiError: the API server refuses it.
        """
        for tries_left in reversed(range(TRIES)):
            child = self.store.entry(job.uid).children.get(key)
            guard = {"resourceVersion": CREATE_ONLY} if child is None else {"uid": child.uid}
            try:
                answer = await self.api.apply({**desired, "metadata": {**desired["metadata"], **guard}})
            except ApiError as error:
                if not tries_left or not other_object(error):
                    raise
                await self.look(job, key)
            else:
                self.store.put_own(job.uid, answer, mark)
                return

    async def look(self, job: FP8RLJob, key: Key) -> None:
        """Read the object that really has a child's name.

        Raises:
            Clash: it is somebody else's.
            ApiError: it is a leftover of a deleted job of the same name, which the garbage collector takes away.
        """
        known, went = self.store.entry(job.uid).children.get(key), self.store.went(job.uid, key)
        kind = BY_NAME[key[0]]
        try:
            live = await self.api.get(kind, job.namespace, key[1])
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            live = None
        if known is not None and (live is None or live["metadata"]["uid"] != known.uid):
            self.store.drop_key(job.uid, key, known.uid)
        if live is None:
            return
        if not read.owned_by(live, job.uid):
            if leftover(live, job):
                words = f"the one of a deleted job of the same name is still there, uid {live['metadata']['uid']}"
                raise ApiError("apply", kind.path(job.namespace, key[1]), CONFLICT, "AlreadyExists", words)
            raise Clash(key)
        self.store.still_there(job.uid, key, went)
        self.store.put_own(job.uid, live)

    def prune(self, job: FP8RLJob, keys: set[Key]) -> list[Awaitable[Done]]:
        """Deletions of the job's children that are not desired any more."""
        children = self.store.entry(job.uid).children
        return [self.remove(job, key, child.uid) for key, child in children.items() if key not in keys]

    async def remove(self, job: FP8RLJob, key: Key, uid: str) -> Done:
        """One deletion."""
        name = "/".join(key)
        live = self.store.body_of(job.uid, key) or {"metadata": {}}
        ours = (live["metadata"].get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.FIELD_MANAGER
        if not ours or "deletionTimestamp" in live["metadata"]:
            return Done(name)
        try:
            await self.api.delete(BY_NAME[key[0]], job.namespace, key[1], uid=uid)
        except ApiError as error:
            return Done(name, failed=error.message)
        self.store.drop_key(job.uid, key, uid)
        return Done(name, changed=True)

    async def end(self, job: FP8RLJob, uid: str, grace: int | None) -> Done:
        """End a pod, with its own grace period or with `grace` seconds."""
        pod = self.store.entry(job.uid).pods.get(uid)
        if pod is None:
            return Done(uid)
        name = f"{POD.kind}/{pod.state.name}"
        try:
            changed = await self.api.delete(POD, job.namespace, pod.state.name, uid=uid, grace=grace)
        except ApiError as error:
            return Done(name, failed=error.message)
        return Done(name, changed=changed)


def stands(child: Child, desired: Object, live: Object, mark: str) -> bool:
    """Whether nothing is to be written: the child satisfies, which is remembered, or is going away."""
    if satisfied(desired, live):
        child.matched = mark
        return True
    return "deletionTimestamp" in live["metadata"]


def key_of(body: Object) -> Key:
    """Kind and name."""
    return kind_of(body).kind, body["metadata"]["name"]


def other_object(error: ApiError) -> bool:
    """Whether an apply failed because the object is not the one that the store knows."""
    return error.status == CONFLICT or (error.status == INVALID and "metadata.uid" in error.message)


def leftover(live: Object, job: FP8RLJob) -> bool:
    """Whether an object belonged to a deleted job of the same name."""
    owners = live["metadata"].get("ownerReferences") or []
    return any(owner["kind"] == names.KIND and owner["name"] == job.name for owner in owners)


async def together(work: list[Awaitable[Done]]) -> list[Done]:
    """All of it at once, to the end; then the first error, if there was one.

    Raises:
        ClusterError: the API server does not answer.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Done)]


def outcome(done: Iterable[Done]) -> Outcome:
    """What an apply did."""
    items = list(done)
    return Outcome(
        changed=tuple(item.name for item in items if item.changed),
        failed=tuple((item.name, item.failed) for item in items if item.failed),
        clashes=tuple(item.name for item in items if item.clash),
    )
