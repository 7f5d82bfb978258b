"""A node is drained, or lost with all that runs on it."""

from __future__ import annotations

import pytest
from failure_cases import policy
from kube_world import RefusedError
from testcluster import lifecycle
from toy_jobs import merged

NODE = "node2"
LOST_SECONDS = 150


def prefers(node: str) -> dict:
    """A template that would rather be on a node."""
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    wish = {"weight": 100, "preference": {"matchExpressions": [term]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    return {"template": {"spec": {"affinity": affinity}}}


def placed(toy, spec: dict | None = None):
    """A job whose trainer and engines are on the node, its orchestrator on the other one."""
    roles = {"trainer": prefers(NODE), "inference": prefers(NODE), "orchestrator": prefers("node1")}
    job = toy(merged(policy(), merged(roles, spec or {}))).start().until_running()
    assert {pod["spec"]["nodeName"] for pod in job.pods("trainer") + job.pods("inference")} == {NODE}
    assert job.pod("orchestrator")["spec"]["nodeName"] == "node1"
    return job


@pytest.fixture
def cordoned(operated):
    """The node takes pods again afterwards."""
    yield operated
    operated.kubectl("uncordon", NODE)


def drain(world, *more: str) -> str:
    """kubectl drain; what it said, also when it gave up."""
    try:
        words = ("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=15s", *more)
        return world.kubectl(*words)
    except RefusedError as error:
        return str(error)


def test_a_drained_node_gives_its_engines_away_and_its_trainer_only_by_force(toy, cordoned):
    job = placed(toy)
    said = drain(cordoned, "--pod-selector=fp8rl.dev/role=inference")
    job.until(lambda: {pod["spec"].get("nodeName") for pod in job.pods("inference")} == {"node1"}, "the engines move")
    job.until_running()
    assert job.status["restarts"] == 0
    said = drain(cordoned, f"--pod-selector=app.kubernetes.io/instance={job.name}")
    assert "would violate the pod's disruption budget" in said
    assert job.status["restarts"] == 0
    print(said.splitlines()[-1])
    drain(cordoned, "--disable-eviction", f"--pod-selector=app.kubernetes.io/instance={job.name}")
    job.until(lambda: job.status["restarts"] == 1, "the attempt that it costs")
    job.until_running()
    assert job.pod("trainer")["spec"]["nodeName"] == "node1"
    assert job.status["lastFailure"]["reason"] == "TrainerLost"
    print(job.status["lastFailure"])


def test_a_node_that_is_lost_costs_the_trainer_an_attempt_and_its_pods_are_let_go(toy, operated):
    job = placed(toy)
    before = job.uids("trainer", "inference")
    lifecycle.stop(operated.cluster, NODE)
    try:
        job.until(lambda: job.status["restarts"] == 1, "the loss is seen", LOST_SECONDS)
        failure = job.status["lastFailure"]
        job.until(lambda: not before & job.uids("trainer"), "the old trainer is let go", LOST_SECONDS)
        job.until(lambda: job.condition("Ready")[:2] == ("True", "Running"), "the job runs", LOST_SECONDS)
        assert job.pod("trainer")["spec"]["nodeName"] == "node1"
        assert NODE in failure["message"]
        print(failure, job.told())
    finally:
        lifecycle.start(operated.cluster, NODE)
        operated.kubectl("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=60s")
