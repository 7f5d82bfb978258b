"""Status, events, claims and troubles on a real API server; an API server that goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from kube_bodies import pod
from kube_kit import body, operator

from fp8rl_operator import names
from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.kube.api import Api, ApiError, Call
from fp8rl_operator.kube.events import Warnings
from fp8rl_operator.kube.kinds import CHILDREN, EVENT, JOB, Kind

CONFIG_MAP = next(kind for kind in CHILDREN if kind.kind == "ConfigMap")
TWO_NODES = {
    "trainer": {
        "backend": "megatron",
        "replicas": 2,
        "gpusPerReplica": 8,
        "checkpoint": {"everySteps": 1, "claimName": "ckpt"},
    }
}


def claim(mode: str) -> dict:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "none"}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ckpt"}, "spec": spec}


def lose_answers(api: Api, count: int) -> list[str]:
    """Cut the connection after the API server has done the next status writes; the versions that it made of them."""
    lost: list[str] = []
    send = api._send

    async def cut(call: Call) -> Any:
        answer = await send(call)
        if call.verb == "status" and len(lost) < count:
            lost.append(json.loads(await answer.read())["metadata"]["resourceVersion"])
            raise aiohttp.ServerDisconnectedError
        return answer

    api._send = cut  # type: ignore[method-assign]
    return lost


async def test_a_status_edited_by_hand_is_not_believed_and_written_again(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        written = (await running.run()).status
        patch = json.dumps({"status": {"attempt": 7, "restarts": 3}})
        plane.kubectl("patch", "fp8rljob", "job", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
        await running.sync(namespace)
        assert running.job().status == written
        done = await running.run()
        assert done.plan.attempt == 0
        live = plane.get("fp8rljob", "job", namespace)["status"]
        assert (live["attempt"], live["restarts"]) == (0, 0)
        assert live == running.job().status
        await running.sync(namespace)
        assert not running.store.entry(running.job().uid).edited


async def test_after_a_restart_the_status_that_is_there_is_believed(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        await running.run()
        running.restart()
        await running.sync(namespace)
        assert running.job().status == plane.get("fp8rljob", "job", namespace)["status"]


async def test_a_status_of_an_older_job_is_refused_and_the_newest_is_read(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        job = running.job()
        await running.cluster.observe(job)
        plane.kubectl("patch", "fp8rljob", "job", "-n", namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        with pytest.raises(ApiError) as refused:
            await running.cluster.write_status(job, {"attempt": 1})
        assert refused.value.status == 409
        assert running.job().spec.suspend is True
        assert "status" not in plane.get("fp8rljob", "job", namespace)


async def test_a_status_whose_answer_was_lost_is_the_operators_own(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        lost = lose_answers(running.api, 1)
        written = (await running.run()).status
        live = plane.get("fp8rljob", "job", namespace)
        assert lost == [live["metadata"]["resourceVersion"]]
        assert running.job().status == written == live["status"]
        assert not running.store.entry(running.job().uid).edited


async def test_a_status_that_was_never_answered_is_believed_when_the_watch_tells_it(
    plane, namespace, monkeypatch
) -> None:
    monkeypatch.setattr("fp8rl_operator.kube.api.GIVE_UP_SECONDS", 0.0)
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        await running.run()
        job = running.job()
        status = {**job.status, "attempt": 1}
        lose_answers(running.api, 1)
        with pytest.raises(ClusterError, match="no answer"):
            await running.cluster.write_status(job, status)
        with pytest.raises(ApiError) as refused:
            await running.cluster.write_status(job, {**status, "attempt": 2})
        assert refused.value.status == 409
        assert running.job().status == status
        await running.sync(namespace)
        assert not running.store.entry(job.uid).edited
        await running.run()
        assert plane.get("fp8rljob", "job", namespace)["status"]["attempt"] == 1


async def test_a_pass_over_a_suspended_job_that_is_gone_ends_at_its_status_and_makes_no_children(
    plane, namespace
) -> None:
    plane.apply(body(namespace, {"suspend": True}), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        plane.kubectl("delete", "fp8rljob", "job", "-n", namespace)
        with pytest.raises(ApiError, match="not found"):
            await running.run()
        assert running.writes == [("status", "FP8RLJob")]
        assert running.store.uids() == []


async def test_a_status_of_a_job_that_is_gone_is_dropped(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        job = running.job()
        plane.kubectl("delete", "fp8rljob", "job", "-n", namespace)
        with pytest.raises(ApiError, match="not found"):
            await running.cluster.write_status(job, {"attempt": 1})
        assert running.store.uids() == []


async def test_a_job_is_deleted_by_its_uid_only(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        old = running.job()
        plane.kubectl("delete", "fp8rljob", "job", "-n", namespace)
        plane.apply(body(namespace), namespace=namespace)
        await running.cluster.delete_job(old)
        assert plane.get("fp8rljob", "job", namespace)["metadata"]["uid"] != old.uid
        await running.sync(namespace)
        await running.cluster.delete_job(running.job())
        assert plane.get("fp8rljob", "", namespace)["items"] == []


async def test_the_same_event_is_recorded_once_in_ten_minutes(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    now = [1_800_000_000.0]
    async with operator(plane, lambda: now[0]) as running:
        await running.sync(namespace)
        job = running.job()
        for _ in range(3):
            await running.cluster.record(job, "Restarting", "attempt 1", warning=True)
        await running.cluster.record(job, "Restarting", "attempt 2 " + "x" * 2000)
        now[0] += 601
        await running.cluster.record(job, "Restarting", "attempt 1", warning=True)
        found = await running.api.list_objects(EVENT, namespace, fields="involvedObject.name=job")
    mine = [item for item in found if item["reason"] == "Restarting"]
    assert sorted((item["type"], item["message"][:9], item["reportingComponent"]) for item in mine) == [
        ("Normal", "attempt 2", "fp8rl-operator"),
        ("Warning", "attempt 1", "fp8rl-operator"),
        ("Warning", "attempt 1", "fp8rl-operator"),
    ]
    assert {item["involvedObject"]["uid"] for item in mine} == {job.uid}


async def test_an_event_that_cannot_be_recorded_fails_nothing(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        elsewhere = running.job().model_copy(
            update={"metadata": running.job().metadata.model_copy(update={"namespace": "not-there"})}
        )
        await running.cluster.record(elsewhere, "Started", "attempt 0")


async def test_a_claim_that_is_missing_or_serves_too_few_nodes_blocks_the_job_until_it_is_put_right(
    plane, namespace
) -> None:
    plane.apply(body(namespace, TWO_NODES), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        seen = await running.cluster.observe(running.job())
        assert seen.blocked is not None
        assert seen.blocked.message == (
            f"spec.trainer.checkpoint.claimName: value ckpt: namespace {namespace} has no such PersistentVolumeClaim; make it, or"
            " name one that is there"
        )
        plane.apply(claim("ReadWriteOnce"), namespace=namespace)
        seen = await running.cluster.observe(running.job())
        assert seen.blocked is not None
        assert "access mode ReadWriteOnce serves one node, trainer.replicas is 2" in seen.blocked.message
        plane.kubectl("delete", "pvc", "ckpt", "-n", namespace)
        plane.apply(claim("ReadWriteMany"), namespace=namespace)
        assert (await running.cluster.observe(running.job())).blocked is None


async def test_a_storage_class_that_does_not_exist_blocks_the_job(plane, namespace) -> None:
    template = {"storage": "1Gi", "accessModes": ["ReadWriteOnce"], "storageClassName": "not-there"}
    spec = {"trainer": {"checkpoint": {"everySteps": 1, "volumeClaimTemplate": template}}}
    plane.apply(body(namespace, spec), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        blocked = (await running.cluster.observe(running.job())).blocked
    assert blocked is not None
    assert blocked.message.startswith(
        "spec.trainer.checkpoint.volumeClaimTemplate.storageClassName: value not-there: the cluster has"
    )


async def test_a_quota_is_told_in_the_clusters_words_after_a_few_seconds(plane, namespace) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    plane.apply(quota, body(namespace), namespace=namespace)
    now = [0.0]
    async with operator(plane) as running:
        running.clock = running.cluster._clock = lambda: now[0]
        await running.sync(namespace)
        await running.run(now=1_800_000_000.0)
        for _ in range(50):
            await asyncio.sleep(0.2)
            await running.sync(namespace)
            said = plane.kubectl("get", "events", "-n", namespace, "-o", "jsonpath={.items[*].message}")
            if "statefulset" in said.lower() and "exceeded quota" in said:
                break
        running.calls.clear()
        assert (await running.cluster.observe(running.job())).troubles == ()
        assert running.calls == []
        now[0] += 6
        troubles = (await running.cluster.observe(running.job())).troubles
        assert [call[:2] for call in running.calls] == [("list", "Event")]
        assert any("exceeded quota: q" in item.message for item in troubles)
        assert {item.role for item in troubles} <= {names.TRAINER, names.INFERENCE, names.ORCHESTRATOR}
        await running.cluster.observe(running.job())
        assert [call[:2] for call in running.calls] == [("list", "Event")]


def warning(namespace: str, job: str) -> dict:
    about = {"kind": "StatefulSet", "name": f"{job}-trainer", "namespace": namespace}
    told = {
        "type": "Warning",
        "reason": "FailedCreate",
        "message": "exceeded quota",
        "lastTimestamp": "2027-01-15T08:00:00Z",
    }
    meta = {"name": f"{job}.1", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Event", "metadata": meta, "involvedObject": about, **told}


async def test_two_jobs_of_a_namespace_that_ask_at_once_are_told_by_one_list(plane, namespace) -> None:
    jobs = ("job", "other")
    for name in jobs:
        plane.apply(body(namespace, name=name), warning(namespace, name), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        warnings = Warnings(running.api, lambda: 1_800_000_000.0)
        running.calls.clear()
        found = await asyncio.gather(*(warnings.troubles(running.job(name), [], []) for name in jobs))
        assert [[item.message for item in told] for told in found] == [["exceeded quota"], ["exceeded quota"]]
        assert running.calls == [("list", "Event", 200)]


async def test_a_list_of_events_that_fails_leaves_what_was_told_and_fails_no_pass(own_plane, monkeypatch) -> None:
    monkeypatch.setattr("fp8rl_operator.kube.api.GIVE_UP_SECONDS", 0.0)
    now = [1_800_000_000.0]
    plane = own_plane()
    plane.apply(body("default"), warning("default", "job"))
    async with operator(plane, lambda: now[0]) as running:
        await running.sync("default")
        await running.run()
        job = running.job()
        await running.cluster.observe(job)
        now[0] += 6
        assert [item.reason for item in (await running.cluster.observe(job)).troubles] == ["FailedCreate"]
        plane.stop()
        for later in (16, 200):
            now[0] += later
            seen = await running.cluster.observe(job)
            assert [item.reason for item in seen.troubles] == ["FailedCreate"]
        with pytest.raises(ClusterError, match="list /api/v1/namespaces/default/events: no answer"):
            await Warnings(running.api).troubles(job, [], [])


async def test_a_refusal_is_forgotten_only_when_the_status_that_is_written_knows_of_it(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        job = running.job()
        refused = pod(
            {"phase": "Failed", "reason": "TopologyAffinityError"},
            namespace=namespace,
            labels={names.LABEL_JOB_UID: job.uid, names.LABEL_ROLE: names.TRAINER},
        )
        running.store.put_child(refused)
        await running.cluster.observe(job)
        await running.cluster.write_status(job, {"attempt": 1})
        assert list(running.store.entry(job.uid).refusals) == ["p"]
        await running.cluster.observe(running.job())
        counted = {"attempt": 1, "refusals": {"uids": ["p"]}}
        await running.cluster.write_status(running.job(), counted)
        assert running.store.entry(job.uid).refusals == {}


async def test_a_pod_is_ended_by_its_uid(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        for _ in range(50):
            await running.sync(namespace)
            await running.run()
            await running.sync(namespace)
            pods = running.store.pods_of(running.job().uid)
            if len(pods) == 4:
                break
            await asyncio.sleep(0.2)
        assert {(pod.role, pod.attempt, pod.phase, pod.starting) for pod in pods} == {
            (role, 0, "Pending", True) for role in (names.TRAINER, names.INFERENCE, names.ORCHESTRATOR)
        }
        assert {pod.reason for pod in pods} == {"Unschedulable"}
        assert all(pod.message.startswith("no nodes available") for pod in pods)
        victim = next(pod for pod in pods if pod.role == names.TRAINER)
        done = await running.cluster._applier.end(running.job(), victim.uid, None)
        assert (done.name, done.changed) == ("Pod/job-trainer-0", True)
        done = await running.cluster._applier.end(running.job(), victim.uid, None)
        assert (done.changed, done.failed) == (False, "")


async def test_an_api_server_that_is_away_for_seconds_is_waited_for(own_plane) -> None:
    plane = own_plane()
    async with operator(plane) as running:
        plane.stop()
        waiting = asyncio.create_task(running.api.list_objects(CONFIG_MAP, "default"))
        await asyncio.sleep(1)
        plane.start()
        assert await waiting
        assert 0 in {code for _, _, code in running.calls}


async def test_what_is_not_answered_at_all_is_a_cluster_error(own_plane, monkeypatch) -> None:
    monkeypatch.setattr("fp8rl_operator.kube.api.GIVE_UP_SECONDS", 0.5)
    plane = own_plane()
    async with operator(plane) as running:
        plane.stop()
        with pytest.raises(ClusterError, match="get /api/v1/namespaces/default/configmaps/x: no answer"):
            await running.api.get(CONFIG_MAP, "default", "x")


async def test_a_refusal_carries_the_servers_words(plane, namespace) -> None:
    async with operator(plane) as running:
        with pytest.raises(ApiError) as missing:
            await running.api.get(JOB, namespace, "nobody")
        assert (missing.value.status, missing.value.reason) == (404, "NotFound")
        assert missing.value.message == 'fp8rljobs.fp8rl.dev "nobody" not found'
        with pytest.raises(ApiError) as unknown:
            await running.api.get(Kind("v9", "X", "xs"), namespace, "x")
        assert unknown.value.status == 404


async def test_a_list_of_many_pages_is_whole(plane, namespace, monkeypatch) -> None:
    monkeypatch.setattr("fp8rl_operator.kube.api.PAGE_SIZE", 3)
    items = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"c{number}"}} for number in range(7)]
    plane.apply(*items, namespace=namespace)
    async with operator(plane) as running:
        found = await running.api.list_objects(CONFIG_MAP, namespace)
        pages = [len(page) async for page in running.api.pages(CONFIG_MAP, namespace, size=3)]
    assert {f"c{number}" for number in range(7)} <= {item["metadata"]["name"] for item in found}
    assert {item["kind"] for item in found} == {"ConfigMap"}
    assert max(pages) == 3


async def test_a_list_whose_pages_have_expired_says_so_and_a_new_one_is_whole(own_plane) -> None:
    plane = own_plane()
    plane.apply(*({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"c{number}"}} for number in range(5)))
    async with operator(plane) as running:
        pages = running.api.pages(CONFIG_MAP, "default", size=2)
        assert len(await anext(pages)) == 2
        plane.kubectl("label", "configmap", "c0", "n=1")
        plane.forget_history()
        with pytest.raises(ApiError) as expired:
            await anext(pages)
        assert (expired.value.status, expired.value.reason) == (410, "Expired")
        assert len(await running.api.list_objects(CONFIG_MAP, "default")) >= 5
