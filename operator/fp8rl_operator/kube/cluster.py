"""`Cluster` over the API server, for any number of jobs: reads from the store, writes through the API."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

from fp8rl_operator import names
from fp8rl_operator.cluster import ClusterError, Object
from fp8rl_operator.control import ControlClient
from fp8rl_operator.kube import claims, read
from fp8rl_operator.kube.api import CONFLICT, NOT_FOUND, Api, ApiError
from fp8rl_operator.kube.apply import Applier
from fp8rl_operator.kube.events import Recorder, Subject, Warnings
from fp8rl_operator.kube.kinds import DEPLOYMENT, JOB, STATEFUL_SET
from fp8rl_operator.kube.store import Store
from fp8rl_operator.observed import Observed, PodState, Trouble
from fp8rl_operator.plan_types import Outcome, Plan
from fp8rl_operator.spec import FP8RLJob

log = logging.getLogger(__name__)

SHORT_SECONDS: Final = 5.0
WORKLOAD_OF: Final = {
    names.TRAINER: STATEFUL_SET.kind,
    names.INFERENCE: DEPLOYMENT.kind,
    names.ORCHESTRATOR: STATEFUL_SET.kind,
}


class ApiCluster:
    """See `Cluster`. `store` is kept by whoever has the watches; `clock` gives Unix seconds."""

    def __init__(
        self,
        api: Api,
        store: Store,
        control: ControlClient | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.api = api
        self.store = store
        self.control = control or ControlClient()
        self._clock = clock
        self._applier = Applier(api, store)
        self._recorder = Recorder(api, os.environ.get("HOSTNAME", names.FIELD_MANAGER), clock)
        self._warnings = Warnings(api, clock)
        self._seen: dict[str, tuple[int, Observed]] = {}
        self._short_since: dict[str, float] = {}
        self._told: dict[str, tuple[tuple[Trouble, ...], Trouble | None]] = {}
        self._tokens: dict[str, str] = {}

    async def observe(self, job: FP8RLJob) -> Observed:
        """See `Cluster.observe`. The version of the job that the store has at the start is the one that a status is written to."""
        entry = self.store.entry(job.uid)
        seen_version, refusals = entry.version, tuple(entry.refusals.values())
        pods = self.store.pods_of(job.uid)
        token = self.token(job)
        trainer, orchestrator = (None, None) if token is None else await self.control.read(pods, token)
        troubles, blocked = await self.told(job, pods)
        seen = Observed(
            pods=pods,
            orchestrator=orchestrator,
            trainer=trainer,
            token=token,
            refusals=refusals,
            troubles=troubles,
            blocked=blocked,
        )
        self._seen[job.uid] = seen_version, seen
        return seen

    def token(self, job: FP8RLJob) -> str | None:
        """The control token of the job's Secret, once that was made. The first one stays: the job's processes have read it."""
        if job.uid not in self._tokens:
            body = self.store.body_of(job.uid, ("Secret", names.child_name(job.name, "control")))
            found = None if body is None else read.secret_value(body, "token")
            if found is not None:
                self._tokens[job.uid] = found
        return self._tokens.get(job.uid)

    async def told(self, job: FP8RLJob, pods: tuple[PodState, ...]) -> tuple[tuple[Trouble, ...], Trouble | None]:
        """What keeps the job from its pods. It only informs, so no pass fails for want of it: what was told last stands."""
        try:
            told = await self.troubles(job, pods), await self.blocked(job, pods)
        except ClusterError as error:
            log.warning("job %s/%s: what keeps it from its pods cannot be read: %s", job.namespace, job.name, error)
            return self._told.get(job.uid, ((), None))
        self._told[job.uid] = told
        return told

    async def troubles(self, job: FP8RLJob, pods: tuple[PodState, ...]) -> tuple[Trouble, ...]:
        """What Kubernetes says where a role has been short of pods for `SHORT_SECONDS`; no request otherwise.

        Raises:
            ClusterError: events cannot be listed.
        """
        now, lacking = self._clock(), short_pods(self.store, job, pods)
        if lacking is None:
            self._short_since.pop(job.uid, None)
            return ()
        if now - self._short_since.setdefault(job.uid, now) < SHORT_SECONDS:
            return ()
        unbound = any("PersistentVolumeClaim" in pod.message for pod in pods)
        named = {use.claim for use in claims.claims_of(job)} if unbound else set()
        return await self._warnings.troubles(job, lacking, sorted(named))

    async def blocked(self, job: FP8RLJob, pods: tuple[PodState, ...]) -> Trouble | None:
        """What a person must put right first; not asked for once there are pods, nor for a job that wants none.

        Raises:
            ClusterError: the API server does not answer.
        """
        if pods or job.spec.suspend or "completionTime" in job.status or job.spec.managed_by != names.MANAGED_BY:
            return None
        return await claims.blocked(self.api, job)

    async def apply(self, job: FP8RLJob, objects: list[Object], plan: Plan) -> Outcome:
        """See `Cluster.apply`."""
        outcome = await self._applier.apply(job, objects, plan.end_pods, plan.force_pods)
        token = self.token(job)
        if token is not None and plan.group is not None:
            await self.control.put_group(plan.group, self.store.pods_of(job.uid), token)
        return outcome

    async def write_status(self, job: FP8RLJob, status: dict[str, Any]) -> None:
        """See `Cluster.write_status`. Refused where the job has changed since `observe`; the store has the newest then.

        Raises:
            ApiError: status 409: pass again; status 404: the job is gone, and the store knows it.
        """
        version, seen = self._seen.get(job.uid, (self.store.entry(job.uid).version, Observed()))
        meta = {"namespace": job.namespace, "name": job.name, "uid": job.uid, "resourceVersion": str(version)}
        await self._put_status(meta, status)
        counted = (status.get("refusals") or {}).get("uids") or ()
        self.store.counted(job.uid, tuple(item for item in seen.refusals if item.uid in counted))

    async def write_status_of(self, body: Object, status: dict[str, Any]) -> None:
        """The same for a job that cannot be parsed; `body` is as the store gave it."""
        meta = {key: body["metadata"][key] for key in ("namespace", "name", "uid", "resourceVersion")}
        await self._put_status(meta, status)

    async def restore_status(self, uid: str) -> None:
        """Write the operator's own last status again where somebody else has edited it.

        Raises:
            ClusterError: it cannot be written.
        """
        body = self.store.job(uid) if self.store.entry(uid).edited else None
        if body is not None:
            await self.write_status_of(body, body["status"])

    async def _put_status(self, meta: Object, status: dict[str, Any]) -> None:
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta, "status": status}
        self.store.writing(meta["uid"], read.version(body), status)
        try:
            self.store.put_job(await self.api.replace_status(body), own=True)
        except ApiError as error:
            if error.status == NOT_FOUND:
                self.store.drop_uid(meta["uid"])
            if error.status != CONFLICT or not await self._written(meta, status):
                raise
        self._seen.pop(meta["uid"], None)

    async def _written(self, meta: Object, status: dict[str, Any]) -> bool:
        """Whether a write that was refused is one that an unheard answer had accepted before: the job is read again."""
        await self._reread(meta)
        return self.store.believes(meta["uid"], status)

    async def _reread(self, meta: Object) -> None:
        """Take the newest version of a job into the store."""
        try:
            body = await self.api.get(JOB, meta["namespace"], meta["name"])
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            body = None
        if body is None or body["metadata"]["uid"] != meta["uid"]:
            self.store.drop_uid(meta["uid"])
        else:
            self.store.put_job(body)

    async def record(self, job: Subject, reason: str, message: str, *, warning: bool = False) -> None:
        """See `Cluster.record`."""
        await self._recorder.record(job, reason, message, warning=warning)

    async def delete_job(self, job: FP8RLJob) -> None:
        """Delete the job itself, whose time after its end is over.

        Raises:
            ClusterError: it cannot be deleted.
        """
        await self.api.delete(JOB, job.namespace, job.name, uid=job.uid)

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._seen.pop(uid, None)
        self._short_since.pop(uid, None)
        self._told.pop(uid, None)
        self._tokens.pop(uid, None)
        self._recorder.forget(uid)
        self.control.forget(uid)

    async def close(self) -> None:
        """Close the connections to the jobs' pods."""
        await self.control.close()


def short_pods(store: Store, job: FP8RLJob, pods: tuple[PodState, ...]) -> list[str] | None:
    """Names of pods to ask about where a role is short of them; None where nothing is worth asking.

    Short: fewer pods than the workload shall have, or one on a node that has not begun, or one that waits for its volume.
    """
    lacking = False
    for role, kind in WORKLOAD_OF.items():
        body = store.body_of(job.uid, (kind, names.child_name(job.name, role)))
        wanted = 0 if body is None else int(body["spec"].get("replicas", 1))
        mine = [pod for pod in pods if pod.role == role and not pod.terminating and pod.phase != "Failed"]
        lacking = lacking or len(mine) < wanted
    stuck = [pod.name for pod in pods if pod.phase == "Pending" and not pod.terminating and silent(pod)]
    return stuck if lacking or stuck else None


def silent(pod: PodState) -> bool:
    """Whether a pod waits for something that it does not say itself: a mount, or the volume of a claim."""
    return (bool(pod.node) and not pod.ip and not pod.message) or "PersistentVolumeClaim" in pod.message
