"""One pass over the job of a uid: what the store holds of it becomes a reconcile, and its outcome a time for the next one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fp8rl_operator import names
from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.errors import Fault, InvalidSpec
from fp8rl_operator.kube.cluster import ApiCluster
from fp8rl_operator.kube.kinds import Object
from fp8rl_operator.kube.store import Store
from fp8rl_operator.not_built import not_built
from fp8rl_operator.reconcile import Pass, reconcile
from fp8rl_operator.settings import Settings, refusals
from fp8rl_operator.spec import FP8RLJob, parse
from fp8rl_operator.status import invalid_status
from fp8rl_operator.status_events import invalid_event

SPREAD = 0.1


class Unfinished(ClusterError):  # noqa: N818 - what it is, not what is wrong
    """Raised when single objects of a job could not be applied: the job's status says which, the pass is tried again."""

    reason = "ApplyFailed"


@dataclass(frozen=True)
class Refused:
    """A job that is not gone into, as an event names it."""

    uid: str
    namespace: str
    name: str

    @classmethod
    def of(cls, body: Object) -> Refused:
        """The job of a body."""
        meta = body["metadata"]
        return cls(meta["uid"], meta["namespace"], meta["name"])


@dataclass(frozen=True)
class Passes:
    """Passes over jobs of one store. `clock` gives Unix seconds."""

    store: Store
    cluster: ApiCluster
    settings: Settings
    clock: Callable[[], float] = time.time

    async def run(self, uid: str) -> float | None:
        """One pass; in how many seconds the next one is due whatever happens, None: only when something happens.

        Raises:
            ClusterError: the pass could not be done, or not all of it.
        """
        body = self.store.job(uid)
        if body is None or not_ours(body):
            return None
        await self.cluster.restore_status(uid)
        body = self.store.job(uid)
        if body is None:
            return None
        job, faults = self.accepted(body)
        if job is None:
            await self.refuse(body, faults)
            return None
        done = await reconcile(
            self.cluster, job, self.clock(), self.settings.images, self.settings.operator_namespace or None
        )
        if done.plan.delete_job:
            await self.cluster.delete_job(job)
            return None
        return next_time(done)

    def accepted(self, body: Object) -> tuple[FP8RLJob | None, list[Fault]]:
        """The job, or everything that speaks against it."""
        try:
            job = parse(body)
        except InvalidSpec as error:
            return None, error.faults
        faults = [fault for fault in not_built(job, "cluster") if fault.level == "error"]
        faults += refusals(job, self.settings)
        return (None, faults) if faults else (job, [])

    async def refuse(self, body: Object, faults: list[Fault]) -> None:
        """Say what is wrong with a job; nothing else is done until it changes."""
        status = invalid_status(body, faults, self.clock())
        if status is None:
            return
        await self.cluster.write_status_of(body, status)
        told = invalid_event(body.get("status") or {}, status)
        if told is not None:
            await self.cluster.record(Refused.of(body), told.reason, told.message, warning=told.warning)


def not_ours(body: Object) -> bool:
    """Whether nothing is to be done: somebody else manages the job, or it is being deleted and its children go by themselves."""
    owner = body.get("spec", {}).get("managedBy", names.MANAGED_BY)
    return owner != names.MANAGED_BY or "deletionTimestamp" in body["metadata"]


def next_time(done: Pass) -> float | None:
    """Seconds until the next pass, spread so that a thousand jobs of one moment do not come back in one.

    Raises:
        Unfinished: something could not be applied.
    """
    if done.outcome.failed:
        raise Unfinished("; ".join(f"{name}: {words}" for name, words in done.outcome.failed))
    if done.plan.hands_off:
        return None
    return done.plan.requeue_after * random.uniform(1.0, 1.0 + SPREAD)
