"""What the watches told: jobs, their children, their pods. Compact, since a cluster has thousands of them.

Children are packed: without what nobody here reads, as compressed JSON against the first object of their kind (children of
two jobs differ in little). Pods are kept as the few fields that a pass reads. Versions are compared as numbers, as Kubernetes
allows: an older event than what is known already is an echo and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fp8rl_operator import names
from fp8rl_operator.kube import read
from fp8rl_operator.kube.kinds import JOB, POD, Object
from fp8rl_operator.kube.pack import Packer
from fp8rl_operator.observed import PodState, Refusal

MAX_REFUSALS: Final = 64
MAX_WRITING: Final = 8

Key = tuple[str, str]  # kind, name


@dataclass(slots=True)
class Child:
    """A child as it is. `matched`: digest of the object as it was built that this very content was found or made to satisfy."""

    uid: str
    version: int
    content: bytes
    matched: str = ""


@dataclass(slots=True)
class JobEntry:
    """A job with what belongs to it; `body` is None for children that came first or stay behind.

    `place`: namespace and name, once the job was told. `status`: the one that is believed; `told`: the one that is there.
    `writing`: the operator's own writes that nobody has confirmed, each with the version that it was written to. `gone`:
    versions at which children went: an answer to a write that comes after the news of its end brings nothing back.
    """

    body: bytes | None = None
    place: tuple[str, str] | None = None
    status: bytes = b""
    told: bytes = b""
    version: int = 0
    writing: tuple[tuple[int, bytes], ...] = ()
    children: dict[Key, Child] = field(default_factory=dict)
    pods: dict[str, read.Pod] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    gone: dict[Key, int] = field(default_factory=dict)

    @property
    def edited(self) -> bool:
        """Whether somebody else has changed the status."""
        return self.told != self.status

    @property
    def empty(self) -> bool:
        """Whether nothing is left of the job."""
        return self.body is None and not self.children and not self.pods


class Store:
    """Jobs by uid. Not for threads: everything happens in the one event loop.

    The first status of a job that it is told is believed, and from then on what the operator itself writes: make a store when
    no other operator writes any more (the lease is held). What is not of the job's namespace is not the job's, nor is a pod
    that no workload of the job controls: whoever may make objects can give them any label.
    """

    def __init__(self) -> None:
        self._entries: dict[str, JobEntry] = {}
        self._packer = Packer()

    def put_job(self, body: Object, *, own: bool = False) -> bool:
        """Take a job as a watch told it; whether it is news. `own`: it is the answer to the operator's own status write."""
        uid, version = body["metadata"]["uid"], read.version(body)
        status = self._packer.pack("status", body.get("status") or {})
        entry = self._entries.get(uid)
        if entry is None or entry.body is None:
            return not own and self._first(body, status)
        if own or any(version > base and status == written for base, written in entry.writing):
            entry.status, entry.writing = status, ()
        if version <= entry.version:
            return False
        content = self._packer.pack(JOB.kind, read.job_content(body))
        news = entry.body != content or entry.status != status
        entry.told = entry.status if entry.status == status else status
        entry.body, entry.version = content, version
        return news

    def _first(self, body: Object, status: bytes) -> bool:
        meta = body["metadata"]
        entry = self._entries.setdefault(meta["uid"], JobEntry())
        entry.body, entry.version = self._packer.pack(JOB.kind, read.job_content(body)), read.version(body)
        entry.status = entry.told = status
        entry.place = meta["namespace"], meta["name"]
        self._sift(entry, *entry.place)
        return True

    def _sift(self, entry: JobEntry, namespace: str, name: str) -> None:
        """Forget what came before the job and is not the job's."""
        for key, child in list(entry.children.items()):
            if self._packer.unpack(key[0], child.content)["metadata"]["namespace"] != namespace:
                del entry.children[key]
        for uid, pod in list(entry.pods.items()):
            if not read.belongs(pod, namespace, name):
                del entry.pods[uid]
                entry.refusals.pop(uid, None)

    def writing(self, uid: str, version: int, status: Object) -> None:
        """The operator is about to write a status to this version: believed as soon as anybody tells of it, answered or not."""
        entry = self._entries.get(uid)
        if entry is not None and entry.body is not None:
            entry.writing = (*entry.writing, (version, self._packer.pack("status", status)))[-MAX_WRITING:]

    def believes(self, uid: str, status: Object) -> bool:
        """Whether this is the status that is believed."""
        return self.entry(uid).status == self._packer.pack("status", status)

    def drop_job(self, body: Object) -> None:
        """The job is gone; its children go one by one."""
        self.drop_uid(body["metadata"]["uid"])

    def drop_uid(self, uid: str) -> None:
        """The same, by uid."""
        if (entry := self._entries.get(uid)) is not None:
            entry.body, entry.status, entry.told, entry.writing = None, b"", b"", ()
            entry.refusals.clear()
            self._sweep(uid)

    def job(self, uid: str) -> Object | None:
        """The job with the believed status; None if it is not there."""
        entry = self._entries.get(uid)
        if entry is None or entry.body is None:
            return None
        body = self._packer.unpack(JOB.kind, entry.body)
        body["metadata"]["resourceVersion"] = str(entry.version)
        return body | {"status": self._packer.unpack("status", entry.status)}

    def uids(self) -> list[str]:
        """Uids of the jobs that are there."""
        return [uid for uid, entry in self._entries.items() if entry.body is not None]

    def jobs(self) -> Iterator[Object]:
        """The jobs that are there, unpacked one at a time."""
        for uid in self.uids():
            if (body := self.job(uid)) is not None:
                yield body

    def put_child(self, body: Object) -> str | None:
        """Take a child or a pod as a watch or an answer told it.

        Returns:
            The uid of the job to pass over; None if it is no job's, or nothing that a pass reads has changed.
        """
        uid = read.job_uid(body)
        if uid is None:
            return None
        entry = self._entries.setdefault(uid, JobEntry())
        changed = self._put_pod(entry, body) if body["kind"] == POD.kind else self._put_child(entry, uid, body)
        self._sweep(uid)
        return uid if changed else None

    def _put_child(self, entry: JobEntry, uid: str, body: Object) -> bool:
        key, meta = (body["kind"], body["metadata"]["name"]), body["metadata"]
        known = entry.children.get(key)
        version = read.version(body)
        if foreign(entry, meta) or version <= max(known.version if known is not None else 0, entry.gone.get(key, 0)):
            return False
        if not read.owned_by(body, uid):
            return entry.children.pop(key, None) is not None
        content = self._packer.pack(*read.child_content(body))
        if known is not None and known.uid == meta["uid"] and known.content == content:
            known.version = version
            return False
        entry.children[key] = Child(meta["uid"], version, content)
        return True

    def put_own(self, uid: str, body: Object, matched: str = "") -> None:
        """A child of a job that is there as an answer told it, whatever its labels. `matched`: see `Child`."""
        entry = self.entry(uid)
        if entry.body is None:
            return
        self._put_child(entry, uid, body)
        child = entry.children.get((body["kind"], body["metadata"]["name"]))
        if child is not None and child.uid == body["metadata"]["uid"] and child.version == read.version(body):
            child.matched = matched
        self._sweep(uid)

    @staticmethod
    def _put_pod(entry: JobEntry, body: Object) -> bool:
        pod = read.pod(body)
        known = entry.pods.get(pod.state.uid)
        if known is not None and pod.version <= known.version:
            return False
        if pod.owner == "" or not (entry.place is None or read.belongs(pod, *entry.place)):
            return entry.pods.pop(pod.state.uid, None) is not None
        entry.pods[pod.state.uid] = pod
        refusal = read.refusal(pod.state)
        if refusal is not None and len(entry.refusals) < MAX_REFUSALS:
            entry.refusals[refusal.uid] = refusal
        return known is None or known.state != pod.state

    def drop_child(self, body: Object) -> str | None:
        """A child or pod is gone; the uid of the job to pass over, None if nobody knew it."""
        uid = read.job_uid(body)
        entry = self._entries.get(uid) if uid is not None else None
        if uid is None or entry is None:
            return None
        meta = body["metadata"]
        if body["kind"] == POD.kind:
            found = entry.pods.pop(meta["uid"], None) is not None
        else:
            found = not foreign(entry, meta) and self._child_gone(entry, uid, body)
        self._sweep(uid)
        return uid if found else None

    def _child_gone(self, entry: JobEntry, uid: str, body: Object) -> bool:
        key, meta, version = (body["kind"], body["metadata"]["name"]), body["metadata"], read.version(body)
        known = entry.children.get(key)
        if known is not None and known.uid == meta["uid"] and known.version > version:
            return False
        found = self.drop_key(uid, key, meta["uid"])
        if found or read.owned_by(body, uid):
            entry.gone[key] = max(version, entry.gone.get(key, 0))
        return found

    def went(self, uid: str, key: Key) -> int:
        """The version at which a child went, as far as that was told; 0 if it was not."""
        return self.entry(uid).gone.get(key, 0)

    def still_there(self, uid: str, key: Key, went: int) -> None:
        """A child was read after `went` had been told: what went is not the child but the label by which it is watched."""
        if self.went(uid, key) == went:
            self.entry(uid).gone.pop(key, None)

    def drop_key(self, uid: str, key: Key, child_uid: str) -> bool:
        """Forget a child that is gone; whether it was known."""
        entry = self._entries.get(uid)
        known = entry.children.get(key) if entry is not None else None
        if entry is None or known is None or known.uid != child_uid:
            return False
        del entry.children[key]
        return True

    def known(self, kind: str) -> dict[str, Object]:
        """What is known of a kind, by uid, as bodies that `drop_job` and `drop_child` take, with their resourceVersion."""
        if kind == JOB.kind:
            return {uid: minimal(kind, uid, self._entries[uid].version) for uid in self.uids()}
        if kind == POD.kind:
            pods = ((job, pod) for job, entry in self._entries.items() for pod in entry.pods.values())
            return {pod.state.uid: minimal(kind, pod.state.uid, pod.version, pod.state.name, job) for job, pod in pods}
        return {
            child.uid: minimal(kind, child.uid, child.version, name, job)
            for job, entry in self._entries.items()
            for (of_kind, name), child in entry.children.items()
            if of_kind == kind
        }

    def _sweep(self, uid: str) -> None:
        if (entry := self._entries.get(uid)) is not None and entry.empty:
            del self._entries[uid]

    def entry(self, uid: str) -> JobEntry:
        """What belongs to a job; empty for one that is not known."""
        return self._entries.get(uid) or JobEntry()

    def body_of(self, uid: str, key: Key) -> Object | None:
        """A child's content."""
        child = self.entry(uid).children.get(key)
        return None if child is None else self._packer.unpack(key[0], child.content)

    def pods_of(self, uid: str) -> tuple[PodState, ...]:
        """The job's pods, by name."""
        return tuple(sorted((pod.state for pod in self.entry(uid).pods.values()), key=lambda pod: pod.name))

    def counted(self, uid: str, refusals: tuple[Refusal, ...]) -> None:
        """A status that knows of these refusals was written."""
        known = self.entry(uid).refusals
        for refusal in refusals:
            known.pop(refusal.uid, None)


def foreign(entry: JobEntry, meta: Object) -> bool:
    """Whether an object is of another namespace than its job; one that only tells which it is, is of none."""
    return entry.place is not None and meta.get("namespace", entry.place[0]) != entry.place[0]


def minimal(kind: str, uid: str, version: int, name: str = "", job: str = "") -> Object:
    """A body that only tells which object it is."""
    meta = {"name": name, "uid": uid, "resourceVersion": str(version), "labels": {names.LABEL_JOB_UID: job}}
    return {"kind": kind, "metadata": meta}
