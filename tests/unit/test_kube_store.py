"""The store: echoes, edits, owners, memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

from builders import make_body, make_job
from kube_bodies import pod

from fp8rl_operator import names
from fp8rl_operator.kube.compare import signed
from fp8rl_operator.kube.store import Store
from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_types import Plan

PLAN = Plan(0, 0, 0, 0.0, running=True)


def job(version: int, status: dict[str, Any] | None = None, uid: str = "u", **metadata: Any) -> dict[str, Any]:
    return {**make_body(uid=uid, resourceVersion=str(version), **metadata), "status": status or {}}


def child(version: int = 1, uid: str = "c", owner: str = "u", **data: str) -> dict[str, Any]:
    meta = {
        "name": "job-trainer",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {names.LABEL_JOB_UID: "u"},
        "ownerReferences": [{"kind": names.KIND, "uid": owner, "controller": True}],
        "managedFields": [{"manager": "x" * 1000}],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


KEY = ("ConfigMap", "job-trainer")


def test_a_job_comes_back_as_it_was_without_what_nobody_reads() -> None:
    store = Store()
    body = job(
        5,
        {"step": 1},
        managedFields=[{}],
        annotations={"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "x"},
    )
    assert store.put_job(body)
    found = store.job("u")
    assert found is not None
    assert (found["spec"], found["status"]) == (body["spec"], {"step": 1})
    assert found["metadata"] == {
        "name": "job",
        "namespace": "team",
        "uid": "u",
        "generation": 1,
        "resourceVersion": "5",
        "annotations": {"a": "b"},
    }


def test_echoes_and_older_versions_are_no_news() -> None:
    store = Store()
    assert store.put_job(job(5))
    assert not store.put_job(job(5))
    assert not store.put_job(job(4, {"step": 9}))
    assert store.put_job(job(6, {"step": 1}), own=True)
    assert not store.put_job(job(6, {"step": 1}))
    assert store.put_child(child(3, a="1")) == "u"
    assert store.put_child(child(3, a="1")) is None
    assert store.put_child(child(2, a="2")) is None
    assert store.put_child(child(4, a="1")) is None
    assert store.put_child(child(5, a="2")) == "u"


def test_a_status_that_somebody_else_wrote_is_kept_apart() -> None:
    store = Store()
    store.put_job(job(1, {"attempt": 1}))
    assert store.put_job(job(2, {"attempt": 9}))
    found = store.job("u")
    assert found is not None
    assert (found["status"], found["metadata"]["resourceVersion"]) == ({"attempt": 1}, "2")
    assert store.entry("u").edited
    store.put_job(job(3, {"attempt": 2}), own=True)
    assert not store.entry("u").edited
    assert store.job("u")["status"] == {"attempt": 2}  # type: ignore[index]


def test_a_child_without_the_jobs_owner_reference_is_not_the_jobs() -> None:
    store = Store()
    assert store.put_child(child(1, owner="other")) == "other"
    assert store.entry("u").children == {}
    loose = child(2)
    loose["metadata"]["ownerReferences"] = []
    assert store.put_child(loose) is None
    store.put_child(child(3))
    loose["metadata"]["resourceVersion"] = "4"
    assert store.put_child(loose) == "u"
    assert KEY not in store.entry("u").children


def test_an_answer_that_comes_after_the_news_of_the_childs_end_brings_nothing_back() -> None:
    store = Store()
    store.put_job(job(1))
    store.drop_child(child(8))
    store.put_own("u", child(7))
    assert store.entry("u").children == {}
    store.put_own("u", child(9, uid="c2"))
    assert store.entry("u").children[KEY].uid == "c2"


def test_the_end_of_an_older_child_of_the_same_name_is_no_news() -> None:
    store = Store()
    store.put_child(child(9, uid="c2"))
    assert store.drop_child(child(8, uid="c1")) is None
    assert store.drop_child(child(10, uid="c2")) == "u"
    assert store.uids() == []


def test_children_may_come_before_their_job_and_stay_after_it() -> None:
    store = Store()
    store.put_child(child())
    assert store.job("u") is None
    store.put_job(job(1))
    store.drop_job(job(1))
    assert (store.uids(), list(store.entry("u").children)) == ([], [KEY])
    store.drop_child(child(2))
    assert store.entry("u").empty


def test_a_refused_pod_is_remembered_until_a_status_counted_it() -> None:
    store = Store()
    store.put_job(job(1))
    body = pod({"phase": "Failed", "reason": "TopologyAffinityError", "message": "m"})
    assert store.put_child(body) == "u"
    store.drop_child(body)
    refusals = tuple(store.entry("u").refusals.values())
    assert [item.node for item in refusals] == ["n1"]
    store.counted("u", refusals)
    assert store.entry("u").refusals == {}


def test_what_is_known_can_be_dropped_by_what_is_told_of_it() -> None:
    store = Store()
    store.put_job(job(1))
    store.put_child(child())
    store.put_child(pod())
    for kind in ("ConfigMap", "Pod"):
        (stub,) = store.known(kind).values()
        assert store.drop_child(stub) == "u"
    (stub,) = store.known(names.KIND).values()
    store.drop_job(stub)
    assert store.entry("u").empty


def test_a_thousand_jobs_with_their_children_and_pods_take_less_than_20_kib_each() -> None:
    store, made = Store(), make_job()
    count = 200
    objects = [signed(item) for item in build_objects(made, PLAN, "token")]
    text = [(item, item["metadata"]["name"]) for item in objects]
    store.put_job(job(1, uid="first"))
    tracemalloc.start()
    for number in range(count):
        uid = f"6b1f0b6e-0000-4000-8000-{number:012d}"
        store.put_job(
            job(1, {"conditions": [{"type": "Ready", "message": "m" * 50}] * 6}, uid=uid, name=f"job-{number}")
        )
        for item, name in text:
            meta = {
                **item["metadata"],
                "uid": f"{number}-{name}",
                "resourceVersion": "1",
                "labels": {
                    **item["metadata"]["labels"],
                    names.LABEL_JOB_UID: uid,
                    names.LABEL_INSTANCE: f"job-{number}",
                },
                "ownerReferences": [{**item["metadata"]["ownerReferences"][0], "uid": uid}],
            }
            store.put_child({**item, "metadata": meta})
        for index in range(4):
            labels = {names.LABEL_JOB_UID: uid, names.LABEL_ROLE: "trainer"}
            store.put_child(
                pod({"phase": "Pending"}, uid=f"{number}-{index}", name=f"job-{number}-trainer-{index}", labels=labels)
            )
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store.entry(uid).children) == len(objects)
    assert used / count < 20 * 1024
