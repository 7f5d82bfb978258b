"""What the watches told: jobs, their children, their pods. Compact, since a cluster has thousands of them.

Children are packed: without what nobody here reads, as compressed JSON against the first object of their kind (children of
two jobs differ in little). Pods are kept as the few fields that a pass reads. Versions are compared as numbers, as Kubernetes
allows: an older event than what is known already is an echo and is dropped.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fp8rl_operator import names
from fp8rl_operator.kube import read
from fp8rl_operator.kube.kinds import JOB, POD, Object
from fp8rl_operator.observed import PodState, Refusal

MAX_DICTIONARY: Final = 32_768  # bytes that zlib looks back
MIN_DICTIONARY: Final = 256
MAX_REFUSALS: Final = 64
BARE: Final = b"\0"
AGAINST: Final = b"\1"

Key = tuple[str, str]  # kind, name


class Packer:
    """Objects as bytes. Equal objects of one kind give equal bytes, once the kind has its dictionary: its first object of size."""

    def __init__(self) -> None:
        self._dictionaries: dict[str, bytes] = {}

    def pack(self, kind: str, body: Object) -> bytes:
        """Compress against the kind's dictionary."""
        data = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
        if kind not in self._dictionaries and len(data) >= MIN_DICTIONARY:
            self._dictionaries[kind] = data[-MAX_DICTIONARY:]
        known = self._dictionaries.get(kind, b"")
        packer = zlib.compressobj(level=6, wbits=-15, zdict=known)
        return (BARE if known == b"" else AGAINST) + packer.compress(data) + packer.flush()

    def unpack(self, kind: str, data: bytes) -> Object:
        """The object again."""
        known = b"" if data[:1] == BARE else self._dictionaries[kind]
        return dict(json.loads(zlib.decompressobj(wbits=-15, zdict=known).decompress(data[1:])))


@dataclass(slots=True)
class Child:
    """A child as it is. `matched`: digest of the desired object that this very content was found or made to satisfy."""

    uid: str
    version: int
    content: bytes
    matched: str = ""


@dataclass(slots=True)
class JobEntry:
    """A job with what belongs to it; `body` is None for children that came first or stay behind.

    `status`: the one that is believed; `edited`: somebody else has changed it since. `gone`: versions at which children went:
    an answer to a write that comes after the news of its end brings nothing back.
    """

    body: bytes | None = None
    status: bytes = b""
    version: int = 0
    edited: bool = False
    children: dict[Key, Child] = field(default_factory=dict)
    pods: dict[str, read.Pod] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    gone: dict[Key, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing is left of the job."""
        return self.body is None and not self.children and not self.pods


class Store:
    """Jobs by uid. Not for threads: everything happens in the one event loop.

    The first status of a job that it is told is believed, and from then on what the operator itself writes: make a store when
    no other operator writes any more (the lease is held).
    """

    def __init__(self) -> None:
        self._entries: dict[str, JobEntry] = {}
        self._packer = Packer()

    def put_job(self, body: Object, *, own: bool = False) -> bool:
        """Take a job as a watch told it; whether it is news. `own`: it is the answer to the operator's own status write."""
        uid, version = body["metadata"]["uid"], read.version(body)
        entry = self._entries.setdefault(uid, JobEntry())
        if entry.body is not None and version <= entry.version:
            return False
        status = self._packer.pack("status", body.get("status") or {})
        content = self._packer.pack(JOB.kind, read.job_content(body))
        news = entry.body != content or entry.status != status
        if own or entry.body is None:
            entry.status = status
        entry.body, entry.version, entry.edited = content, version, entry.status != status
        return news

    def drop_job(self, body: Object) -> None:
        """The job is gone; its children go one by one."""
        self.drop_uid(body["metadata"]["uid"])

    def drop_uid(self, uid: str) -> None:
        """The same, by uid."""
        if (entry := self._entries.get(uid)) is not None:
            entry.body, entry.status, entry.edited = None, b"", False
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
        if version <= max(known.version if known is not None else 0, entry.gone.get(key, 0)):
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
        """A child of a job as an answer told it, whatever its labels. `matched`: see `Child`."""
        entry = self._entries.setdefault(uid, JobEntry())
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
        if pod.owner == "":
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
            key = body["kind"], meta["name"]
            entry.gone[key] = max(read.version(body), entry.gone.get(key, 0))
            found = self.drop_key(uid, key, meta["uid"])
        self._sweep(uid)
        return uid if found else None

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


def minimal(kind: str, uid: str, version: int, name: str = "", job: str = "") -> Object:
    """A body that only tells which object it is."""
    meta = {"name": name, "uid": uid, "resourceVersion": str(version), "labels": {names.LABEL_JOB_UID: job}}
    return {"kind": kind, "metadata": meta}
