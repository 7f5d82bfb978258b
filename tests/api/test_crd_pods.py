"""The pods that workloads would make, as the API server's own admission sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import make_job
from control_plane_kit import ControlPlane
from manifest_kit import PLAN, workloads
from raw_api import DRY, RawApi

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_types import Refusals
from fp8rl_operator.spec import FP8RLJob

ROLES = ("trainer", "inference", "orchestrator")
ZONE = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [ZONE]}]}
    }
}
RICH: dict[str, Any] = {
    "model": {"source": {"builtin": None, "hub": {"repository": "a/b", "secretName": "hf", "cacheClaimName": "hub"}}},
    "trainer": {"gpusPerReplica": 1, "checkpoint": {"volumeClaimTemplate": {"storage": "1Gi"}}},
    "inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}, "template": {"spec": {"affinity": AFFINITY}}},
    "orchestrator": {"resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}}},
    "topology": {
        "numa": "required",
        "gpuProduct": ["NVIDIA-H200"],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
}
EXCLUDING = replace(PLAN, refusals=Refusals(engines_avoid=("node-7",)))


@pytest.fixture
def restricted(plane: ControlPlane, namespace: str) -> tuple[RawApi, str]:
    """A namespace that takes only pods of the Pod Security Standard `restricted`."""
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return RawApi(plane.kubeconfig), namespace


def admitted(api: RawApi, namespace: str, job: FP8RLJob) -> dict[str, dict[str, Any]]:
    """Role to the pod that a dry run of its template gives; its account is made for real."""
    account = next(item for item in build_objects(job, PLAN, "t") if item["kind"] == "ServiceAccount")
    code, answer = api.apply(unowned(account), namespace, "fieldValidation=Strict")
    assert code in (200, 201), answer
    found = {}
    for role, workload in workloads(job, EXCLUDING).items():
        template = workload["spec"]["template"]
        claims = [
            {"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": f"state-{role}"}}
            for claim in workload["spec"].get("volumeClaimTemplates", [])
        ]
        spec = {**template["spec"], "volumes": [*template["spec"]["volumes"], *claims]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": role}, "spec": spec}
        code, answer = api.request("POST", f"/api/v1/namespaces/{namespace}/pods?{DRY}", pod)
        assert code == 201, answer["message"]
        found[role] = answer
    return found


def unowned(item: dict[str, Any]) -> dict[str, Any]:
    """A copy without owner: the garbage collector takes what is owned by nobody."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "ownerReferences"}
    return {**item, "metadata": metadata}


@pytest.mark.parametrize("spec", [{}, RICH], ids=["plain", "rich"])
def test_pods_meet_the_restricted_standard(restricted: tuple[RawApi, str], spec: dict[str, Any]) -> None:
    api, namespace = restricted
    pods = admitted(api, namespace, make_job(spec, namespace=namespace))
    assert set(pods) == set(ROLES)
    for pod in pods.values():
        mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        assert "/var/run/secrets/kubernetes.io/serviceaccount" not in [mount["mountPath"] for mount in mounts]


def test_numa_required_gives_guaranteed_pods_and_other_pods_are_burstable(restricted: tuple[RawApi, str]) -> None:
    api, namespace = restricted
    pods = admitted(api, namespace, make_job(RICH, namespace=namespace))
    quality = {role: pod["status"]["qosClass"] for role, pod in pods.items()}
    assert quality == {"trainer": "Guaranteed", "inference": "Guaranteed", "orchestrator": "Burstable"}


def test_admission_adds_no_longer_stay_on_lost_nodes(restricted: tuple[RawApi, str]) -> None:
    api, namespace = restricted
    for pod in admitted(api, namespace, make_job(RICH, namespace=namespace)).values():
        lost = [item for item in pod["spec"]["tolerations"] if item["key"].startswith("node.kubernetes.io/")]
        assert [item["tolerationSeconds"] for item in lost] == [30, 30]


@pytest.mark.parametrize("spec", [{}, RICH], ids=["plain", "rich"])
def test_every_object_applies_strictly_and_a_second_apply_changes_nothing(
    plane: ControlPlane, namespace: str, spec: dict[str, Any]
) -> None:
    api = RawApi(plane.kubeconfig)
    quiet = replace(PLAN, running=False)
    for item in build_objects(make_job(spec, namespace=namespace), quiet, "token", operator_namespace="fp8rl-system"):
        answers = [api.apply(unowned(item), namespace, "fieldValidation=Strict") for _ in range(2)]
        assert [code for code, _ in answers] == [201, 200], answers
        first, second = (answer["metadata"].get("generation", 1) for _, answer in answers)
        assert first == second
