"""Pods as a pass sees them, from what the API server says."""

from __future__ import annotations

from typing import Any

import pytest
from kube_bodies import STAMP, pod

from fp8rl_operator import names
from fp8rl_operator.kube import read
from fp8rl_operator.observed import PodState, Refusal

INITIALIZED = {"type": "Initialized", "status": "True"}


def container(
    state: dict[str, Any], last: dict[str, Any] | None = None, restarts: int = 0, **more: Any
) -> dict[str, Any]:
    return {"name": "main", "state": state, "lastState": last or {}, "restartCount": restarts, **more}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def state(status: dict[str, Any], **more: Any) -> PodState:
    return read.pod_state(pod(status, **more))


def test_a_pod_that_runs_and_is_ready() -> None:
    conditions = [INITIALIZED, {"type": "Ready", "status": "True"}]
    found = state(
        {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": conditions,
            "containerStatuses": [container({"running": {}}, ready=True)],
        }
    )
    assert found == PodState(
        name="job-trainer-0", uid="p", role="trainer", attempt=2, ready=True, ip="10.0.0.1", node="n1"
    )


def test_a_pod_is_starting_until_its_init_containers_are_done_and_counts_their_restarts_until_then() -> None:
    init, main = [container({"running": {}}, restarts=3)], [container(waiting("PodInitializing"), restarts=5)]
    before = state({"phase": "Pending", "initContainerStatuses": init, "containerStatuses": main})
    after = state(
        {"phase": "Running", "conditions": [INITIALIZED], "initContainerStatuses": init, "containerStatuses": main}
    )
    assert (before.starting, before.restarts, before.message) == (True, 3, "")
    assert (after.starting, after.restarts) == (False, 5)


def test_an_init_container_that_failed_is_told_while_starting_and_forgotten_after() -> None:
    init = [container({"terminated": {"exitCode": 0}}, ended(1, message="no model"), restarts=1)]
    failing = [container(waiting("CrashLoopBackOff", "back-off 10s"), ended(1, message="no model"), restarts=1)]
    before = state({"phase": "Pending", "initContainerStatuses": failing})
    after = state({"phase": "Running", "conditions": [INITIALIZED], "initContainerStatuses": init})
    assert (before.exit_code, before.reason, before.message) == (1, "CrashLoopBackOff", "no model")
    assert (after.exit_code, after.reason, after.message) == (None, "", "")


@pytest.mark.parametrize(
    ("container_status", "told"),
    [
        (container(ended(137, "OOMKilled")), (137, "OOMKilled", "")),
        (container(ended(2, message="InvalidInput: x")), (2, "Error", "InvalidInput: x")),
        (container(ended(0, "Completed")), (None, "", "")),
        (container({"running": {}}, ended(1, message="died"), 1), (1, "Error", "died")),
        (container(waiting("CrashLoopBackOff", "back-off 5m0s"), ended(1, message="died"), 4), (1, "CrashLoopBackOff", "died")),
        (container(waiting("CrashLoopBackOff", "back-off 5m0s"), ended(1), 4), (1, "CrashLoopBackOff", "back-off 5m0s")),
        (container(waiting("CrashLoopBackOff", "b"), ended(137, "OOMKilled"), 4), (137, "OOMKilled", "b")),
        (container(waiting("ImagePullBackOff", "Back-off pulling")), (None, "ImagePullBackOff", "Back-off pulling")),
        (container(waiting("CreateContainerConfigError", "no secret")), (None, "CreateContainerConfigError", "no secret")),
        (container(waiting("ContainerCreating")), (None, "", "")),
    ],
)  # fmt: skip
def test_what_ended_or_keeps_a_container(container_status: dict[str, Any], told: tuple[int | None, str, str]) -> None:
    found = state({"phase": "Running", "conditions": [INITIALIZED], "containerStatuses": [container_status]})
    assert (found.exit_code, found.reason, found.message) == told


def test_what_ended_the_whole_pod_comes_before_its_containers() -> None:
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": [INITIALIZED]}
    found = state({**status, "containerStatuses": [container(ended(137))]})
    assert (found.phase, found.exit_code, found.reason, found.message) == ("Failed", 137, "Evicted", "low on memory")


def test_the_schedulers_words_are_told() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    found = state({"phase": "Pending", "conditions": [unscheduled]}, spec={"containers": []})
    assert (found.reason, found.message, found.node, found.starting) == ("Unschedulable", "0/2 nodes", "", True)


def test_a_pod_whose_node_lost_touch_is_unreachable_and_one_with_an_open_gate_is_not() -> None:
    status = {
        "phase": "Running",
        "conditions": [INITIALIZED, {"type": "Ready", "status": "False"}],
        "containerStatuses": [container({"running": {}}, ready=True)],
    }
    assert state(status).unreachable
    assert not state(status, spec={"readinessGates": [{"conditionType": "lb"}]}).unreachable
    assert not state({**status, "containerStatuses": [container({"running": {}}, ready=False)]}).unreachable


def test_a_pod_that_is_being_deleted_says_until_when() -> None:
    found = state({"phase": "Running"}, deletionTimestamp=STAMP)
    assert (found.terminating, found.gone_by) == (True, 1_796_040_000.0)


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        ("TopologyAffinityError", True),
        ("UnexpectedAdmissionError", True),
        ("OutOfnvidia.com/gpu", True),
        ("Evicted", False),
    ],
)
def test_a_kubelets_refusal(reason: str, refused: bool) -> None:
    found = read.refusal(state({"phase": "Failed", "reason": reason, "message": "m"}))
    assert found == (Refusal("p", "trainer", "n1", reason, "m") if refused else None)


@pytest.mark.parametrize("text", ["x", "", "-1", "1" * 10, "1" * 5000])
def test_an_attempt_that_is_no_number_of_nine_digits_is_never_wanted(text: str) -> None:
    assert state({}, annotations={names.ANNOTATION_ATTEMPT: text}).attempt == -1


def test_an_attempt_of_nine_digits_is_read() -> None:
    assert state({}, annotations={names.ANNOTATION_ATTEMPT: "9" * 9}).attempt == 999_999_999


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ({"data": {"token": "dA=="}}, "t"),
        ({"data": {"token": "%%"}}, None),
        ({"data": {"token": ""}}, None),
        ({"data": None}, None),
        ({}, None),
    ],
)
def test_a_secrets_value(body: dict[str, Any], value: str | None) -> None:
    assert read.secret_value(body, "token") == value
