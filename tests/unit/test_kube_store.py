"""The store: echoes, edits, owners, memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
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
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {names.LABEL_JOB_UID: "u"},
        "ownerReferences": [{"kind": names.KIND, "uid": owner, "controller": True}],
        "managedFields": [{"manager": "x" * 1000}],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def controller(kind: str, name: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "name": name, "uid": "w", "controller": True}]


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
    assert not store.put_job(job(6, {"step": 1}), own=True)
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


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("answered", [True, False])
def test_an_own_status_is_believed_whether_the_watch_or_the_answer_tells_it_first(announced, answered) -> None:
    store = Store()
    store.put_job(job(10, {"attempt": 0}))
    if announced:
        store.writing("u", 10, {"attempt": 1})
    store.put_job(job(11, {"attempt": 1}))
    if answered:
        store.put_job(job(11, {"attempt": 1}), own=True)
    believed = announced or answered
    assert store.job("u")["status"] == {"attempt": int(believed)}  # type: ignore[index]
    assert store.entry("u").edited is not believed


def test_an_own_status_is_believed_under_an_edit_that_was_told_before_its_answer() -> None:
    store = Store()
    store.put_job(job(10, {"attempt": 0}))
    store.writing("u", 10, {"attempt": 1})
    store.put_job(job(12, {"attempt": 7}))
    store.put_job(job(11, {"attempt": 1}), own=True)
    found = store.job("u")
    assert found is not None
    assert (found["status"], found["metadata"]["resourceVersion"]) == ({"attempt": 1}, "12")
    assert store.entry("u").edited


def test_each_of_the_writes_that_were_never_answered_is_believed_when_it_is_told() -> None:
    store = Store()
    store.put_job(job(10, {"attempt": 0}))
    store.writing("u", 10, {"attempt": 1})
    store.writing("u", 10, {"attempt": 1, "time": 2})
    assert not store.put_job(job(11, {"attempt": 1}))
    assert store.believes("u", {"attempt": 1})
    assert store.put_job(job(12, {"attempt": 1, "time": 2}))
    assert store.entry("u").edited


def test_the_answer_to_a_status_of_a_job_that_is_gone_brings_it_not_back() -> None:
    store = Store()
    store.put_job(job(1))
    store.drop_job(job(1))
    assert not store.put_job(job(2), own=True)
    assert store.uids() == []


FOREIGN_PODS = {
    "another namespace": {"namespace": "evil"},
    "no workload": {"ownerReferences": []},
    "another workload": {"ownerReferences": controller("ReplicaSet", "mine-5d8f")},
    "another job's workload": {"ownerReferences": controller("StatefulSet", "other-trainer")},
    "the workload of another role": {"ownerReferences": controller("StatefulSet", "job-orchestrator")},
    "another kind of the name": {"ownerReferences": controller("Job", "job-trainer")},
}


@pytest.mark.parametrize("job_first", [True, False])
@pytest.mark.parametrize("case", FOREIGN_PODS)
def test_a_pod_that_no_workload_of_the_job_controls_is_not_the_jobs_whatever_its_labels_say(case, job_first) -> None:
    store = Store()
    body = pod({"phase": "Failed", "reason": "TopologyAffinityError"}, **FOREIGN_PODS[case])
    if job_first:
        store.put_job(job(1))
        assert store.put_child(body) is None
    else:
        store.put_child(body)
        store.put_job(job(1))
    assert (store.pods_of("u"), store.entry("u").refusals) == ((), {})


@pytest.mark.parametrize(
    ("role", "owner"),
    [
        ("trainer", controller("StatefulSet", "job-trainer")),
        ("orchestrator", controller("StatefulSet", "job-orchestrator")),
        ("inference", controller("ReplicaSet", "job-inference-5d8f9c7b6")),
    ],
)
@pytest.mark.parametrize("job_first", [True, False])
def test_the_pods_of_the_jobs_workloads_are_the_jobs(role, owner, job_first) -> None:
    store = Store()
    body = pod(labels={names.LABEL_ROLE: role, names.LABEL_JOB_UID: "u"}, ownerReferences=owner)
    if job_first:
        store.put_job(job(1))
    assert store.put_child(body) == "u"
    store.put_job(job(1))
    assert [found.role for found in store.pods_of("u")] == [role]


@pytest.mark.parametrize("job_first", [True, False])
def test_an_object_of_another_namespace_is_no_child_whoever_it_names_as_its_owner(job_first) -> None:
    store = Store()
    body = child(1)
    body["metadata"]["namespace"] = "evil"
    if job_first:
        store.put_job(job(1))
        assert store.put_child(body) is None
    else:
        store.put_child(body)
        store.put_job(job(1))
    assert store.entry("u").children == {}
    store.put_child(child(2))
    body["metadata"]["resourceVersion"] = "9"
    assert store.drop_child(body) is None
    assert (list(store.entry("u").children), store.entry("u").gone) == ([KEY], {})


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


def test_an_answer_for_a_job_that_is_gone_brings_nothing_back() -> None:
    store = Store()
    store.put_job(job(1))
    store.drop_job(job(1))
    store.put_own("u", child(2))
    assert store.entry("u").empty


def test_a_child_that_was_read_after_the_news_of_its_end_is_there() -> None:
    store = Store()
    store.put_job(job(1))
    store.put_child(child(7))
    store.drop_child(child(8))
    store.still_there("u", KEY, store.went("u", KEY))
    store.put_own("u", child(8))
    assert store.entry("u").children[KEY].version == 8


def test_a_child_whose_end_was_told_while_it_was_read_is_gone() -> None:
    store = Store()
    store.put_job(job(1))
    store.put_child(child(7))
    before = store.went("u", KEY)
    store.drop_child(child(8))
    store.still_there("u", KEY, before)
    store.put_own("u", child(7))
    assert store.entry("u").children == {}


def test_the_end_of_a_label_that_has_been_put_back_is_no_news() -> None:
    store = Store()
    store.put_job(job(1))
    store.put_child(child(9))
    assert store.drop_child(child(8)) is None
    assert list(store.entry("u").children) == [KEY]


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
                "namespace": "team",
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
            name, owner = f"job-{number}-trainer-{index}", controller("StatefulSet", f"job-{number}-trainer")
            store.put_child(
                pod({"phase": "Pending"}, uid=f"{number}-{index}", name=name, labels=labels, ownerReferences=owner)
            )
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store.entry(uid).children) == len(objects)
    assert len(store.pods_of(uid)) == 4
    assert used / count < 20 * 1024
