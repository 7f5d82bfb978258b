"""GPUs and NUMA on real kubelets: fake GPUs by the device plugin API, nodes that pretend to have 32 CPUs on two NUMA nodes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from e2e_cluster import bring_up, take_down
from kube_world import World, enter
from operator_world import deploy
from test_nodes import prefers
from testcluster import binaries
from toy_jobs import ToyJob, merged

NUMA = {0: frozenset(range(16)), 1: frozenset(range(16, 32))}
KUBELET = {
    "nodeLeaseDurationSeconds": 4,
    "topologyManagerPolicy": "single-numa-node",
    "topologyManagerScope": "container",
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0",
}
REFUSED_SECONDS = 240
ASKED = {"cpu": "4", "memory": "1Gi"}


@pytest.fixture(scope="module")
def gpus() -> Iterator[World]:
    """Two nodes with four GPUs each, two on either NUMA node, and the operator."""
    kept = os.environ.get("FP8RL_E2E_CLUSTER")
    name = f"{kept or f'pytest-{os.getpid()}'}-gpu"
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    hardware = {"numa": "0-15;16-31", "meminfo_kb": 268435456, "no_cpuset": True, "gpus": 4}
    try:
        world = bring_up(name, kubelet=json.dumps(KUBELET), **hardware)
        deploy(world)
        yield world
    finally:
        if kept is None:
            take_down(name)
        enter(f"/proc/self/fd/{home}")
        os.close(home)


@pytest.fixture
def job(gpus: World, request: pytest.FixtureRequest) -> Iterator[ToyJob]:
    """A job of two engines with two GPUs each and a trainer with one, NUMA-aligned; not started."""
    namespace = f"gpu-{abs(hash(request.node.name)) % 10**6}"
    gpus.kubectl("create", "namespace", namespace)
    resources = {"requests": ASKED, "limits": ASKED}
    spec = {
        "failurePolicy": {"backoffSeconds": 0},
        "topology": {"numa": "required"},
        "trainer": {"gpusPerReplica": 1},
        "inference": {"replicas": 2, "gpusPerReplica": 2, "parallelism": {"tensor": 2}},
    }
    job = ToyJob(gpus, namespace, gpus.toys / namespace / "toy", spec)
    for role in ("trainer", "inference"):
        job.of_main(role, resources=resources)
    yield job
    gpus.kubectl("delete", "namespace", namespace, "--wait=false")
    for node in (1, 2):
        say(gpus, node, aligned())


def aligned() -> dict:
    """Two GPUs on either NUMA node."""
    return {"devices": [{"id": f"gpu-{i}", "numa": i // 2} for i in range(4)], "fail": False}


def say(world: World, node: int, state: dict) -> None:
    """Change a node's GPUs."""
    (world.cluster.node(node) / "gpus.json").write_text(json.dumps(state))


def given(world: World, namespace: str) -> dict[str, tuple[set[int], set[int]]]:
    """Pod to the NUMA nodes of its GPUs and of its CPUs, by the kubelets' podresources API."""
    found = {}
    for node in (1, 2):
        socket = world.cluster.node(node) / "kubelet" / "pod-resources" / "kubelet.sock"
        words = [str(binaries.folder() / "podresources"), str(socket)]
        answer = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        for pod in answer["podResources"]:
            if pod["namespace"] == namespace:
                found[pod["name"]] = (gpu_nodes(pod["containers"]), cpu_nodes(pod["containers"]))
    return found


def gpu_nodes(containers: list[dict]) -> set[int]:
    """NUMA nodes of the GPUs that containers hold."""
    devices = [item for container in containers for item in container["devices"]]
    return {int(node["ID"]) for device in devices for node in device["topology"]["nodes"]}


def cpu_nodes(containers: list[dict]) -> set[int]:
    """NUMA nodes of the CPUs that containers have for themselves."""
    cpus = {int(cpu) for container in containers for cpu in container["cpuIds"]}
    return {node for node, own in NUMA.items() if cpus & own}


def test_gpus_and_cpus_of_one_rank_lie_side_by_side(job, gpus):
    job.start().until_running()
    seen = given(gpus, job.namespace)
    for pod in job.pods("trainer") + job.pods("inference"):
        on_gpus, on_cpus = seen[pod["metadata"]["name"]]
        assert len(on_gpus) == 1
        assert on_cpus == on_gpus
        assert pod["status"]["qosClass"] == "Guaranteed"
    print(f"NUMA nodes of GPUs and of CPUs: {seen}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("TopologyAffinityError", {"devices": [{"id": "gpu-0", "numa": 0}, {"id": "gpu-1", "numa": 1}], "fail": False}),
        ("UnexpectedAdmissionError", aligned() | {"fail": True}),
    ],
)
def test_a_node_that_refuses_three_times_is_left_out_and_the_job_runs_elsewhere(job, gpus, reason, state):
    say(gpus, 1, state)
    job.body["spec"]["inference"]["replicas"] = 1
    for role, node in (("trainer", "node2"), ("inference", "node1")):
        part = job.body["spec"][role]
        part["template"] = merged(part["template"], prefers(node)["template"])
    job.start()
    message = job.until(
        lambda: reason in job.condition("Ready")[2] and job.condition("Ready")[2],
        "the kubelet's words",
        REFUSED_SECONDS,
    )
    job.until(
        lambda: [item["name"] for item in job.status.get("nodes", []) if item["excluded"]] == ["node1"],
        "node1 is left out",
        REFUSED_SECONDS,
    )
    job.until_running(REFUSED_SECONDS)
    assert {pod["spec"]["nodeName"] for pod in job.pods("inference")} == {"node2"}
    assert job.status["restarts"] == 0
    print(message, job.status["nodes"])
