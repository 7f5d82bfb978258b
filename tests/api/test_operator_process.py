"""The operator's process against a real API server: children appear, rest is rest, restarts and fail-over write nothing twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_plane_kit import ControlPlane, RefusedError
from operator_kit import (
    CHILDREN,
    LEASE_SECONDS,
    OperatorProcess,
    children,
    condition,
    eventually,
    has_children,
    manifest,
    operators,
    ready_reason,
)

from fp8rl_operator.settings import Settings, refusals
from fp8rl_operator.spec import parse

Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts processes that serve this test's namespace and hold their Lease in it."""
    with operators(plane.kubeconfig, tmp_path) as begin:
        yield lambda **changes: begin(**{"namespaces": namespace, "lease_namespace": namespace, **changes})


def test_a_job_gets_its_children_a_status_and_its_series_and_then_nothing_is_written(
    start: Start, plane: ControlPlane, namespace: str
):
    process = start().wait_leading()
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    eventually(lambda: ready_reason(plane, namespace) == "WaitingForPods")
    before = process.at_rest()
    versions = children(plane, namespace)
    time.sleep(5)
    assert process.writes() == before
    assert children(plane, namespace) == versions
    assert process.samples("fp8rl_job_info")
    assert process.samples("fp8rl_operator_leader") == {"fp8rl_operator_leader": 1.0}
    job = plane.get("fp8rljob", "job", namespace)
    assert "finalizers" not in job["metadata"]
    assert "annotations" not in job["metadata"]
    fields = plane.kubectl("get", "fp8rljob", "job", "-n", namespace, "-o", "yaml", "--show-managed-fields")
    assert [line.split()[1] for line in fields.splitlines() if line.strip().startswith("manager:")] == [
        "test",
        "fp8rl-operator",
    ]


def test_a_restart_reads_everything_and_writes_nothing(start: Start, plane: ControlPlane, namespace: str):
    first = start().wait_leading()
    for name in ("a", "b"):
        plane.apply(manifest(name), namespace=namespace)
    has_children(plane, namespace, 2 * CHILDREN)
    first.at_rest()
    assert first.stop() == 0
    versions = children(plane, namespace)
    jobs = [plane.get("fp8rljob", name, namespace)["metadata"]["resourceVersion"] for name in ("a", "b")]
    second = start().wait_leading()
    eventually(
        lambda: second.samples("fp8rl_operator_reconcile_seconds_count")["fp8rl_operator_reconcile_seconds_count"] >= 2
    )
    assert second.at_rest() == 0
    assert children(plane, namespace) == versions
    assert [plane.get("fp8rljob", name, namespace)["metadata"]["resourceVersion"] for name in ("a", "b")] == jobs


def test_of_two_processes_one_leads_and_the_other_takes_over_a_killed_leader_in_the_lease_time(
    start: Start, plane: ControlPlane, namespace: str
):
    first = start(lease_identity="one").wait_leading()
    second = start(lease_identity="two")
    eventually(lambda: second.page("/readyz") == (200, "standby: another process leads\n"))
    plane.apply(manifest("a"), namespace=namespace)
    has_children(plane, namespace)
    assert second.writes() == 0
    first.at_rest()
    versions = children(plane, namespace)
    first.kill()
    plane.apply(manifest("b"), namespace=namespace)
    killed = time.monotonic()
    second.wait_leading(LEASE_SECONDS + 15)
    assert time.monotonic() - killed < LEASE_SECONDS + 15
    has_children(plane, namespace, 2 * CHILDREN)
    second.at_rest()
    assert {key: value for key, value in children(plane, namespace).items() if "/a-" in key} == versions


def test_a_leader_that_is_told_to_end_gives_the_lease_back_at_once(start: Start, namespace: str):
    first = start(lease_identity="one", lease_seconds=60).wait_leading()
    second = start(lease_identity="two", lease_seconds=60)
    eventually(lambda: second.page("/readyz")[1].startswith("standby"))
    assert first.stop() == 0
    second.wait_leading(40)  # the Lease alone would hold it for 60 s


def test_a_deleted_job_leaves_nothing_behind(start: Start, plane: ControlPlane, namespace: str):
    process = start().wait_leading()
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    plane.kubectl("delete", "fp8rljob", "job", "-n", namespace, "--timeout=10s")
    eventually(lambda: not children(plane, namespace), 30)
    eventually(lambda: not process.samples("fp8rl_job_"))
    assert not process.samples("fp8rl_operator_reconcile_errors_total")


def test_a_child_that_somebody_deletes_or_changes_is_put_right(start: Start, plane: ControlPlane, namespace: str):
    start().wait_leading()
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    plane.kubectl("delete", "service", "job-trainer", "-n", namespace)
    has_children(plane, namespace)
    patch = '{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":1}}}}'
    plane.kubectl("patch", "deployment", "job-inference", "-n", namespace, "--type=merge", "-p", patch)

    def whole() -> bool:
        spec = plane.get("deployment", "job-inference", namespace)["spec"]["template"]["spec"]
        return bool(spec["terminationGracePeriodSeconds"] != 1)

    eventually(whole)


def test_suspend_takes_the_pods_away_and_resume_brings_them_back(start: Start, plane: ControlPlane, namespace: str):
    start().wait_leading()
    plane.apply(manifest(), namespace=namespace)

    def replicas() -> list[int]:
        kinds = ("statefulset", "job-trainer"), ("deployment", "job-inference"), ("statefulset", "job-orchestrator")
        return [plane.get(kind, name, namespace)["spec"]["replicas"] for kind, name in kinds]

    has_children(plane, namespace)
    eventually(lambda: replicas() == [1, 2, 1])
    plane.apply(manifest(spec={"suspend": True}), namespace=namespace)
    eventually(lambda: replicas() == [0, 0, 0])
    job = eventually(lambda: plane.get("fp8rljob", "job", namespace))
    eventually(lambda: condition(plane.get("fp8rljob", "job", namespace), "Suspended").get("status") == "True")
    plane.apply(manifest(spec={"suspend": False}), namespace=namespace)
    eventually(lambda: replicas() == [1, 2, 1])
    again = plane.get("fp8rljob", "job", namespace)
    assert again["metadata"]["uid"] == job["metadata"]["uid"]


HOST_PATH = {"trainer": {"template": {"spec": {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}]}}}}


def test_a_job_that_the_settings_forbid_says_why_in_the_words_of_validate_and_gets_nothing(
    start: Start, plane: ControlPlane, namespace: str
):
    process = start().wait_leading()
    plane.apply(manifest(spec=HOST_PATH), namespace=namespace)
    eventually(lambda: ready_reason(plane, namespace) == "InvalidSpec")
    job = plane.get("fp8rljob", "job", namespace)
    (fault,) = refusals(parse({key: value for key, value in job.items() if key != "status"}), Settings())
    assert condition(job, "Ready")["message"] == str(fault)
    assert condition(job, "Ready")["status"] == "False"
    assert condition(job, "Ready")["observedGeneration"] == job["metadata"]["generation"]
    assert children(plane, namespace) == {}
    (event,) = eventually(lambda: plane.get("events", namespace=namespace)["items"])
    said = (event["type"], event["reason"], event["message"], event["involvedObject"]["uid"])
    assert said == ("Warning", "InvalidSpec", str(fault), job["metadata"]["uid"])
    writes = process.at_rest()
    passes = process.samples("fp8rl_operator_reconcile_seconds_count")
    time.sleep(4)
    assert process.writes() == writes
    assert process.samples("fp8rl_operator_reconcile_seconds_count") == passes
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)


def test_a_status_edited_by_hand_is_put_right(start: Start, plane: ControlPlane, namespace: str):
    process = start().wait_leading()
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    eventually(lambda: ready_reason(plane, namespace) == "WaitingForPods")
    process.at_rest()
    good = plane.get("fp8rljob", "job", namespace)["status"]
    bad = {"status": {"attempt": 7, "conditions": [], "restarts": 3}}
    plane.kubectl(
        "patch", "fp8rljob", "job", "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(bad)
    )

    def right() -> bool:
        now = plane.get("fp8rljob", "job", namespace)["status"]
        return {**now, "progressTime": ""} == {**good, "progressTime": ""}

    eventually(right)


def test_an_operator_of_one_namespace_touches_nothing_elsewhere(start: Start, plane: ControlPlane, namespace: str):
    other = f"{namespace}-other"
    plane.kubectl("create", "namespace", other)
    process = start().wait_leading()
    plane.apply(manifest(), namespace=other)
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    process.at_rest()
    assert children(plane, other) == {}
    assert "status" not in plane.get("fp8rljob", "job", other)
    plane.kubectl("delete", "namespace", other, "--wait=false")


def test_bad_settings_are_all_said_and_the_process_ends_with_two(start: Start):
    process = start(concurrency="many", log_format="xml")
    assert process.process.wait(20) == 2
    text = process.log.read_text()
    assert "FP8RL_CONCURRENCY: value 'many'" in text
    assert "FP8RL_LOG_FORMAT: value 'xml'" in text


def test_a_second_job_of_a_name_owns_nothing_of_the_first(start: Start, plane: ControlPlane, namespace: str):
    start().wait_leading()
    plane.apply(manifest(), namespace=namespace)
    has_children(plane, namespace)
    first = plane.get("secret", "job-control", namespace)["data"]
    plane.kubectl("delete", "fp8rljob", "job", "-n", namespace, "--wait=true")
    plane.apply(manifest(), namespace=namespace)
    uid = plane.get("fp8rljob", "job", namespace)["metadata"]["uid"]

    def renewed() -> bool:
        secret = plane.get("secret", "job-control", namespace)
        return bool(secret["metadata"]["ownerReferences"][0]["uid"] == uid and secret["data"] != first)

    try:
        eventually(renewed, 60)
    except RefusedError as error:
        pytest.fail(str(error))
    has_children(plane, namespace)
