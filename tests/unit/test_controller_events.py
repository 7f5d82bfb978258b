"""What events do to the store and the queue, and what they must not do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from builders import UID
from kopf._cogs.clients import watching
from kopf._cogs.structs.references import Resource
from kubernetes.aio.client import ApiClient, Configuration

from fp8rl_operator import names
from fp8rl_operator.controller import watch
from fp8rl_operator.controller.events import Events
from fp8rl_operator.controller.metrics import Metrics
from fp8rl_operator.controller.queue import JobQueue
from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.cluster import ApiCluster
from fp8rl_operator.kube.kinds import BY_NAME, POD
from fp8rl_operator.kube.store import Store

SERVICE = BY_NAME["Service"]


def events() -> Events:
    store = Store()
    return Events(store, ApiCluster(Api(ApiClient(Configuration())), store), JobQueue(), Metrics())


def service(uid: str, version: int, owner: Any = None) -> dict[str, Any]:
    """A child; one whose owner is no object cannot be read."""
    mine = {"kind": names.KIND, "uid": UID, "controller": True}
    meta = {
        "namespace": "team",
        "name": f"job-{uid}",
        "uid": uid,
        "resourceVersion": str(version),
        "ownerReferences": [owner or mine],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta}


@pytest.mark.parametrize("way", ["told", "listed"])
async def test_an_object_that_cannot_be_read_is_said_once_and_the_next_one_is_taken(
    way: str, caplog: pytest.LogCaptureFixture
):
    its = events()

    def come(body: dict[str, Any]) -> None:
        if way == "told":
            its.told(SERVICE, "MODIFIED", body)
        else:
            its.listed(SERVICE, body)

    with caplog.at_level(logging.ERROR):
        for body in (service("bad", 1, "nobody"), service("bad", 2, "nobody"), service("good", 3)):
            come(body)
    (record,) = caplog.records
    assert record.getMessage() == "Service team/job-bad cannot be read and is passed over"
    assert record.exc_info is not None
    assert "string indices must be integers" in str(record.exc_info[1])
    assert list(its.store.known("Service")) == ["good"]
    come(service("bad", 4))
    assert sorted(its.store.known("Service")) == ["bad", "good"]
    assert its.unread == set()


async def test_nothing_is_kept_of_an_unreadable_object_that_is_gone():
    its = events()
    its.told(SERVICE, "ADDED", service("bad", 1, "nobody"))
    its.told(SERVICE, "DELETED", service("bad", 2))
    assert its.unread == set()


async def test_the_end_of_an_object_that_cannot_be_read_does_not_end_the_watch(caplog: pytest.LogCaptureFixture):
    its = events()
    its.told(SERVICE, "DELETED", service("bad", 1, "nobody"))
    (record,) = caplog.records
    assert record.getMessage() == "Service team/job-bad cannot be read and is passed over"
    assert its.unread == set()


@pytest.mark.parametrize("objects", [0, 2])
async def test_a_watch_of_kopf_tells_its_objects_and_the_end_of_its_list_even_if_it_is_empty(
    objects: int, monkeypatch: pytest.MonkeyPatch
):
    heard: list[Any] = []
    events = [
        *([{"type": None, "object": {"n": 1}}] * objects),
        watching.Bookmark.LISTED,
        {"type": "ADDED", "object": {"n": 2}},
        {"type": "BOOKMARK", "object": {"n": 3}},
    ]

    async def stream(**_: Any):
        for item in events:
            yield item

    monkeypatch.setattr(watching, "infinite_watch", stream)
    with watch.streams(lambda *told: heard.append(told), heard.append):
        seen = [item async for item in watching.infinite_watch(resource=Resource("", "v1", "pods"), settings=None)]
    assert heard == [*([(POD, None, {"n": 1})] * objects), POD, (POD, "ADDED", {"n": 2})]
    assert seen == [watching.Bookmark.LISTED]
    assert watching.infinite_watch is stream
