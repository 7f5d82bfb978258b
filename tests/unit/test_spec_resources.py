"""Memory by arithmetic, Guaranteed pods, quantities, paths and tolerations: each refusal with its numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from builders import make_body

from fp8rl_operator.spec import inspect
from fp8rl_operator.spec.quantities import gibibytes, quantity

GPUS = {"trainer": {"gpusPerReplica": 1}, "inference": {"gpusPerReplica": 1}, "topology": {"numa": "required"}}
PLACE = "spec.inference.template.spec"


def faults_of(spec: dict[str, Any]) -> list[str]:
    return [str(fault) for fault in inspect(make_body(spec))[1]]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("100m", Fraction(1, 10)),
        (2, Fraction(2)),
        (0.5, Fraction(1, 2)),
        ("1.5Gi", Fraction(3 << 29)),
        ("1e3", Fraction(1000)),
        ("12E", Fraction(12 * 10**18)),
        ("1Ki", Fraction(1024)),
        ("abc", None),
        ("", None),
        (True, None),
        (None, None),
        ([1], None),
    ],
)
def test_quantities_are_exact(text: Any, number: Fraction | None) -> None:
    assert quantity(text) == number


def test_bytes_are_told_in_whole_gib_rounded_up() -> None:
    assert (gibibytes((1 << 30) + 1), gibibytes(1 << 30)) == ("2Gi", "1Gi")


def asks(**resources: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "main", "resources": resources}]}}}


def megatron(asked: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    own = {"backend": "megatron", "gpusPerReplica": 8, "offload": "full", **trainer}
    return {"model": {"parameters": 8_030_261_248}, "trainer": own | asked}


def test_a_template_with_less_memory_than_the_state_takes_is_refused_with_the_arithmetic() -> None:
    assert faults_of(megatron(asks(requests={"memory": "100Gi"}, limits={"memory": "200Gi"}))) == [
        (
            "spec.trainer.template.spec.containers[0].resources.requests.memory: value 100Gi: does not hold the state that offload"
            " full keeps in host memory: 16 bytes (masters 4, moments 8, gradients 4) x 8030261248 parameters / 1 replica = 120 GiB a"
            " pod; ask for 120Gi or more, leave it out (then it is computed), or set offload: none"
        )
    ]


@pytest.mark.parametrize(
    "spec",
    [
        megatron(asks(limits={"memory": "120Gi"})),
        megatron(asks(limits={"memory": "60Gi"}), replicas=2),
        megatron(asks(limits={"memory": "60Gi"}), offload="optimizer"),
        megatron(asks(limits={"memory": "1Gi"}), offload="none"),
        {**megatron(asks(limits={"memory": "1Gi"})), "model": {}},
    ],
)
def test_memory_that_holds_the_state_or_whose_model_is_not_known_is_taken(spec: dict[str, Any]) -> None:
    assert faults_of(spec) == []


def test_fractions_of_a_cpu_cannot_be_pinned() -> None:
    spec = GPUS | {"inference": {"gpusPerReplica": 1, **asks(limits={"cpu": "3500m"})}}
    assert faults_of(spec) == [
        (
            f"{PLACE}.containers[0].resources.limits.cpu: value 3.5: is no whole number of CPUs, and topology.numa required pins whole"
            " CPUs only (the kubelet leaves fractions in the shared pool); write 4, leave it out (8 a GPU), or set topology.numa:"
            " preferred"
        )
    ]


def test_requests_that_are_not_the_limits_are_no_guaranteed_pod() -> None:
    spec = GPUS | {"inference": {"gpusPerReplica": 1, **asks(requests={"memory": "4Gi"}, limits={"memory": "8Gi"})}}
    assert faults_of(spec) == [
        (
            f"{PLACE}.containers[0].resources.requests.memory: value 4Gi: is not limits.memory 8Gi: topology.numa required needs a"
            " Guaranteed pod, whose requests equal its limits; write the limit only (the request follows), or set topology.numa:"
            " preferred"
        )
    ]


def test_a_sidecar_without_limits_would_make_the_pod_burstable() -> None:
    side = {"template": {"spec": {"containers": [{"name": "side", "resources": {"limits": {"cpu": "500m"}}}]}}}
    assert faults_of(GPUS | {"inference": {"gpusPerReplica": 1, **side}}) == [
        (
            f"{PLACE}.containers[0].resources.limits.memory: is not set: topology.numa required needs a Guaranteed pod, in which every"
            " container limits cpu and memory (side does not); set resources.limits.memory, or set topology.numa: preferred"
        )
    ]


def test_templates_are_free_where_no_alignment_is_asked_for_or_the_pod_has_no_gpu() -> None:
    loose = asks(requests={"cpu": "1500m"}, limits={"cpu": "2"})
    assert faults_of({"inference": {"gpusPerReplica": 1, **loose}}) == []
    assert faults_of({"topology": {"numa": "required"}, "inference": loose}) == []


def test_an_orchestrators_request_over_its_limit_is_refused() -> None:
    resources = {"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}}
    assert faults_of({"orchestrator": {"resources": resources}}) == [
        "spec.orchestrator.resources.requests.memory: value 2Gi: is over limits.memory 2G; raise the limit, or lower the request"
    ]


def test_claims_that_kubernetes_would_not_make_are_refused() -> None:
    claim = {"storage": "0Gi", "accessModes": ["ReadWriteOncePod", "ReadWriteOnce"]}
    assert faults_of({"trainer": {"checkpoint": {"volumeClaimTemplate": claim}}}) == [
        "spec.trainer.checkpoint.volumeClaimTemplate.storage: value 0Gi: is no size over 0; write a size such as 100Gi",
        (
            "spec.trainer.checkpoint.volumeClaimTemplate.accessModes: value 'ReadWriteOncePod, ReadWriteOnce': has ReadWriteOncePod beside"
            " other modes, which Kubernetes refuses; keep ReadWriteOncePod alone, or leave it out"
        ),
    ]


@pytest.mark.parametrize("folder", ["relative", "/a/../b"])
def test_folders_of_the_node_are_absolute(folder: str) -> None:
    assert faults_of({"orchestrator": {"volume": {"hostPath": folder}}}) == [
        f"spec.orchestrator.volume.hostPath: value {folder}: is no absolute path without `..`; write the folder's whole path"
    ]


def test_prompts_lie_below_their_volume() -> None:
    assert faults_of({"rollout": {"dataset": {"volume": {"claimName": "c", "path": "../a.jsonl"}}}}) == [
        "spec.rollout.dataset.volume.path: value ../a.jsonl: is not below its volume; write a path without `..`"
    ]
    assert faults_of({"rollout": {"dataset": {"volume": {"path": "../a.jsonl"}}}}) == []


@pytest.mark.parametrize(
    ("toleration", "words"),
    [
        ({"value": "a"}, ".operator: must be Exists without a key; add key, or operator: Exists"),
        (
            {"key": "a", "operator": "Exists", "value": "b"},
            ".value: value b: is not compared with operator Exists; remove it",
        ),
        (
            {"key": "a", "tolerationSeconds": 5},
            ".tolerationSeconds: value 5: only effect NoExecute ends after a time; set effect: NoExecute, or remove it",
        ),
    ],
)
def test_a_toleration_that_kubernetes_refuses_is_refused_first(toleration: dict[str, Any], words: str) -> None:
    assert faults_of({"topology": {"tolerations": [toleration]}}) == [f"spec.topology.tolerations[0]{words}"]


def test_a_null_in_an_unknown_field_is_an_unknown_field() -> None:
    body = make_body()
    body["spec"]["trainer"]["stepz"] = None
    assert [fault.path for fault in inspect(body)[1]] == ["spec.trainer.stepz"]
