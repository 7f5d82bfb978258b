"""The adapter of the API server as tests use it: connected, its store filled by lists in place of watches, requests counted."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from builders import make_body
from control_plane_kit import ControlPlane

from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.cluster import ApiCluster
from fp8rl_operator.kube.kinds import CHILDREN, JOB, POD, SELECTOR, Kind, Object
from fp8rl_operator.kube.store import Store
from fp8rl_operator.reconcile import Pass, reconcile
from fp8rl_operator.spec import FP8RLJob, parse

READS = {"get", "list"}


class Operator:
    """An operator without its process: `restart` forgets everything, `sync` is what the watches would have told."""

    def __init__(self, api: Api, calls: list[tuple[str, str, int]], clock: Callable[[], float] = time.time) -> None:
        self.api = api
        self.calls = calls
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        """A new process."""
        self.store = Store()
        self.cluster = ApiCluster(self.api, self.store, clock=self.clock)

    @property
    def writes(self) -> list[tuple[str, str]]:
        """Verb and kind of what was asked beside reads since `calls` was cleared."""
        return [(verb, kind) for verb, kind, _ in self.calls if verb not in READS]

    @property
    def child_writes(self) -> list[tuple[str, str]]:
        """The same without status and events."""
        return [(verb, kind) for verb, kind in self.writes if kind not in {"FP8RLJob", "Event"}]

    async def sync(self, namespace: str) -> None:
        """Take everything of a namespace into the store."""
        for kind in (JOB, *CHILDREN, POD):
            await self.sync_kind(kind, namespace)

    async def sync_kind(self, kind: Kind, namespace: str) -> None:
        """Take the objects of a kind, drop those that are gone."""
        gone = self.store.known(kind.kind)
        for body in await self.api.list_objects(kind, namespace, labels="" if kind is JOB else SELECTOR):
            gone.pop(body["metadata"]["uid"], None)
            self.store.put_job(body) if kind is JOB else self.store.put_child(body)
        for stub in gone.values():
            self.store.drop_job(stub) if kind is JOB else self.store.drop_child(stub)

    def job(self, name: str = "job") -> FP8RLJob:
        """A job as a pass gets it."""
        return parse(next(body for body in self.store.jobs() if body["metadata"]["name"] == name))

    async def run(self, name: str = "job", now: float | None = None) -> Pass:
        """One pass; what it asked for is in `calls`."""
        await self.cluster.restore_status(self.job(name).uid)
        self.calls.clear()
        return await reconcile(self.cluster, self.job(name), self.clock() if now is None else now)


@contextlib.asynccontextmanager
async def operator(plane: ControlPlane, clock: Callable[[], float] = time.time) -> AsyncIterator[Operator]:
    """An operator on a control plane, as its administrator."""
    calls: list[tuple[str, str, int]] = []
    api = await connect(plane.kubeconfig, lambda verb, kind, code, _: calls.append((verb, kind, code)))
    running = Operator(api, calls, clock)
    try:
        yield running
    finally:
        await running.cluster.close()
        await api.close()


async def connect(kubeconfig: Path, on_request: Any = None) -> Api:
    """The API as a kubeconfig says."""
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(kubeconfig)}):
        return await Api.connect(on_request=on_request)


def body(namespace: str, spec: dict[str, Any] | None = None, name: str = "job") -> Object:
    """A small job, as somebody applies it."""
    made = make_body(spec, name=name, namespace=namespace)
    del made["metadata"]["uid"], made["metadata"]["generation"]
    return made
