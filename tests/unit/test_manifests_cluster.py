"""What pods need on a real cluster: nodes, resources, caches, budgets, policies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import UID, make_job
from manifest_kit import PLAN, built, main_of, selectors, workloads

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_revisions import revision
from fp8rl_operator.plan_types import Plan, Refusals, Verdict
from fp8rl_operator.spec import FP8RLJob

GPUS = {
    "trainer": {"backend": "torch", "gpusPerReplica": 1},
    "inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}},
}
EXCLUDING = replace(PLAN, refusals=Refusals(engines_avoid=("bad-1",)))


def pod_of(job: FP8RLJob, role: str, plan: Plan = PLAN) -> dict[str, Any]:
    """PodSpec of a role."""
    found: dict[str, Any] = workloads(job, plan)[role]["spec"]["template"]["spec"]
    return found


def env_of(pod: dict[str, Any]) -> dict[str, str | None]:
    """Plain variables of the main container."""
    return {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}


def terms_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Required node selector terms."""
    node = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    found: list[dict[str, Any]] = node["nodeSelectorTerms"]
    return found


def template(**spec: Any) -> dict[str, Any]:
    return {"template": {"spec": spec}}


def main_asks(**resources: Any) -> dict[str, Any]:
    return template(containers=[{"name": "main", "resources": resources}])


def test_workloads_and_configs_carry_the_revision_of_their_role() -> None:
    job = make_job()
    for item in built(job).values():
        if item["kind"] in {"StatefulSet", "Deployment", "ConfigMap"}:
            role = item["metadata"]["labels"]["fp8rl.dev/role"]
            assert item["metadata"]["annotations"] == {"fp8rl.dev/revision": revision(job, role)}
        else:
            assert "annotations" not in item["metadata"]


@pytest.mark.parametrize(
    "change",
    [
        {"suspend": True},
        {"inference": {"replicas": 4, "minReplicas": 2}},
        {"failurePolicy": {"maxRestarts": 9, "replicaLoss": "restart"}},
        {"stallDeadlineSeconds": 77, "activeDeadlineSeconds": 7777, "ttlSecondsAfterFinished": 5},
        {"cleanupPolicy": "keepPods", "podDisruptionBudget": "disabled", "networkPolicy": "disabled"},
    ],
)
def test_what_changes_in_place_is_in_no_template_and_no_config(change: dict[str, Any]) -> None:
    before, after = built(make_job()), built(make_job(change))
    for key, item in before.items():
        if item["kind"] == "ConfigMap":
            assert item == after[key]
        if item["kind"] in {"StatefulSet", "Deployment"}:
            assert item["spec"]["template"] == after[key]["spec"]["template"]
            assert item["metadata"] == after[key]["metadata"]


def test_an_excluded_node_is_left_out_by_the_roles_that_the_plan_says() -> None:
    expected = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["bad-1"]}
    job = make_job()
    assert terms_of(pod_of(job, "inference", EXCLUDING)) == [{"matchExpressions": [expected]}]
    assert "affinity" not in pod_of(job, "trainer", EXCLUDING)


def test_each_of_the_users_affinity_terms_holds_together_with_the_jobs_own() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    node = {"key": "metadata.name", "operator": "In", "values": ["n"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [node]}, {}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
    }
    job = make_job(
        {
            "topology": {"gpuProduct": ["NVIDIA-H200"]},
            "inference": {**GPUS["inference"], **template(affinity=affinity)},
        }
    )
    pod = pod_of(job, "inference", EXCLUDING)
    product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]}
    hostname = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["bad-1"]}
    assert terms_of(pod) == [
        {"matchExpressions": [zone, product, hostname]},
        {"matchFields": [node], "matchExpressions": [product, hostname]},
    ]
    assert pod["affinity"]["podAntiAffinity"] == affinity["podAntiAffinity"]


def lost(seconds: int, *keys: str) -> list[dict[str, Any]]:
    return [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key in keys
    ]


def test_pods_leave_a_lost_node_after_30_seconds() -> None:
    for role in ("trainer", "inference", "orchestrator"):
        assert pod_of(make_job(), role)["tolerations"] == lost(30, "not-ready", "unreachable")


def test_tolerations_of_job_and_template_are_kept_and_win_over_the_short_ones() -> None:
    spot = {"key": "spot", "operator": "Exists"}
    given = make_job({"topology": {"tolerations": [spot]}})
    assert pod_of(given, "trainer")["tolerations"] == [spot, *lost(30, "not-ready", "unreachable")]
    stays = lost(900, "unreachable")
    own = make_job({"topology": {"tolerations": [spot]}, "trainer": template(tolerations=stays)})
    assert pod_of(own, "trainer")["tolerations"] == [*stays, *lost(30, "not-ready")]
    all_taints = [{"operator": "Exists"}]
    assert pod_of(make_job({"trainer": template(tolerations=all_taints)}), "trainer")["tolerations"] == all_taints


def test_an_engine_is_told_where_caches_are_and_a_template_may_name_each() -> None:
    compiled = {"VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"}
    plain = pod_of(make_job(), "inference")
    assert env_of(plain)["FP8RL_CACHE_ROOT"] == "/var/cache/fp8rl"
    assert not compiled & env_of(plain).keys()
    assert {"name": "cache", "mountPath": "/var/cache/fp8rl"} in main_of(workloads(make_job())["inference"])[
        "volumeMounts"
    ]
    mine = template(
        containers=[{"name": "main", "env": [{"name": "VLLM_CACHE_ROOT", "value": "/mine"}]}],
        volumes=[{"name": "cache", "hostPath": {"path": "/var/cache/fp8rl", "type": "Directory"}}],
    )
    pod = pod_of(make_job({"inference": mine}), "inference")
    assert env_of(pod)["VLLM_CACHE_ROOT"] == "/mine"
    volume = next(item for item in pod["volumes"] if item["name"] == "cache")
    assert volume == {"name": "cache", "hostPath": {"path": "/var/cache/fp8rl", "type": "Directory"}}


def test_scratch_is_bounded_and_a_template_sets_another_bound() -> None:
    sizes = {
        item["name"]: item["emptyDir"].get("sizeLimit")
        for item in pod_of(make_job(), "trainer")["volumes"]
        if "emptyDir" in item
    }
    assert sizes == {"state": None, "cache": "64Gi", "tmp": "8Gi", "shm": "8Gi", "model": None, "model-cache": None}
    larger = template(volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}])
    volumes = {item["name"]: item for item in pod_of(make_job({"trainer": larger}), "trainer")["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_a_start_may_take_longer_than_a_cold_engine_does() -> None:
    for role in ("trainer", "inference"):
        probe = main_of(workloads(make_job())[role])["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] > 3 * 465


def test_a_folder_of_the_node_must_be_there_since_kubernetes_would_make_it_for_root() -> None:
    pod = pod_of(make_job({"orchestrator": {"volume": {"hostPath": "/srv/state"}}}), "orchestrator")
    state = next(item for item in pod["volumes"] if item["name"] == "state")
    assert state["hostPath"] == {"path": "/srv/state", "type": "Directory"}


def test_a_hubs_files_are_kept_on_a_claim() -> None:
    hub = {"repository": "a/b", "secretName": "hf", "cacheClaimName": "hub"}
    job = make_job({"model": {"source": {"builtin": None, "hub": hub}, "revision": "v1"}})
    for role in ("trainer", "inference", "orchestrator"):
        pod = pod_of(job, role)
        cache = next(item for item in pod["volumes"] if item["name"] == "model-cache")
        assert cache == {"name": "model-cache", "persistentVolumeClaim": {"claimName": "hub"}}
        env = {item["name"]: item for item in pod["initContainers"][0]["env"]}
        assert env["FP8RL_CACHE_DIR"]["value"] == "/var/cache/fp8rl-models"
        assert json.loads(env["FP8RL_MODEL_SOURCE"]["value"])["revision"] == "v1"
        assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


def budgets(job: FP8RLJob, plan: Plan = PLAN) -> dict[str, dict[str, Any]]:
    return {
        key.removeprefix("PodDisruptionBudget/job-"): {k: v for k, v in item["spec"].items() if k != "selector"}
        for key, item in built(job, plan).items()
        if item["kind"] == "PodDisruptionBudget"
    }


def test_budgets_never_ask_for_more_engines_than_there_shall_be() -> None:
    always = {"unhealthyPodEvictionPolicy": "AlwaysAllow"}
    job = make_job({"inference": {"replicas": 3, "minReplicas": 2}})
    assert budgets(job) == {
        "trainer": {"maxUnavailable": 0, **always},
        "orchestrator": {"maxUnavailable": 0, **always},
        "inference": {"minAvailable": 2, **always},
    }
    assert budgets(job, replace(PLAN, running=False))["inference"]["minAvailable"] == 0


def test_pods_of_a_finished_job_may_be_evicted() -> None:
    done = replace(PLAN, verdict=Verdict(complete=True, reason="StepsDone", message="4 of 4 steps"))
    assert budgets(make_job({"cleanupPolicy": "keepPods"}), done) == {}


def test_only_the_jobs_own_pods_reach_the_stores_and_the_engines_routes() -> None:
    objects = built(make_job())
    own = {"app.kubernetes.io/name": "fp8rl", "app.kubernetes.io/instance": "job", "fp8rl.dev/job-uid": UID}
    http = [{"port": "http", "protocol": "TCP"}]
    prometheus = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}, "namespaceSelector": {}}
    assert objects["NetworkPolicy/job-workers"]["spec"] == {
        "podSelector": {"matchLabels": own},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": own}}]}, {"from": [prometheus], "ports": http}],
    }
    operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "fp8rl-operator"}}, "namespaceSelector": {}}
    roles = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["trainer", "orchestrator"]}
    assert objects["NetworkPolicy/job-control"]["spec"] == {
        "podSelector": {"matchLabels": own, "matchExpressions": [roles]},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [operator], "ports": http}],
    }


def test_every_port_but_http_is_closed_to_visitors() -> None:
    for workload in workloads(make_job()).values():
        assert [port["name"] for port in main_of(workload)["ports"]] == ["http"]


def test_the_operators_namespace_can_be_named() -> None:
    objects = build_objects(make_job(), PLAN, "t", operator_namespace="fp8rl-system")
    policy = next(
        item for item in objects if item["metadata"]["name"] == "job-control" and "ingress" in item.get("spec", {})
    )
    peer = policy["spec"]["ingress"][0]["from"][0]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "fp8rl-system"}}


def megatron(offload: str, **trainer: Any) -> dict[str, Any]:
    return {
        "model": {"parameters": 8_030_261_248},
        "trainer": {"backend": "megatron", "gpusPerReplica": 8, "offload": offload, **trainer},
    }


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        (megatron("full"), "184Gi"),  # 16 x 8.03e9 = 119.7 GiB, and 8 GiB for each of 8 ranks
        (megatron("optimizer"), "124Gi"),  # 8 x 8.03e9 = 59.8 GiB
        (megatron("full", replicas=2), "124Gi"),  # half of it on each node
        (megatron("none"), None),
        ({**megatron("full"), "model": {}}, None),
    ],
)
def test_the_trainers_memory_request_is_computed(spec: dict[str, Any], memory: str | None) -> None:
    resources = main_of(workloads(make_job(spec))["trainer"])["resources"]
    assert resources["requests"].get("memory") == memory
    assert "memory" not in resources["limits"]


def test_a_template_that_asks_for_memory_is_left_alone() -> None:
    job = make_job(megatron("full", **main_asks(limits={"memory": "200Gi"})))
    resources = main_of(workloads(job)["trainer"])["resources"]
    assert resources == {"requests": {"nvidia.com/gpu": "8"}, "limits": {"nvidia.com/gpu": "8", "memory": "200Gi"}}


def test_init_containers_ask_for_what_main_asks_but_for_gpus() -> None:
    asks = main_asks(requests={"cpu": "2", "memory": "4Gi"}, limits={"memory": "8Gi"})
    pod = pod_of(make_job({**GPUS, "inference": {**GPUS["inference"], **asks}}), "inference")
    assert pod["initContainers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "8Gi"},
    }
    own = [{"name": "prepare-model", "resources": {"limits": {"memory": "1Gi"}}}]
    job = make_job({"trainer": template(initContainers=own)})
    assert pod_of(job, "trainer")["initContainers"][0]["resources"] == {"limits": {"memory": "1Gi"}}


@pytest.mark.parametrize(
    ("asks", "expected"),
    [
        ({}, {"cpu": "16", "memory": "64Gi"}),
        ({"limits": {"cpu": 12, "memory": "100Gi"}}, {"cpu": 12, "memory": "100Gi"}),
        ({"requests": {"cpu": "4"}}, {"cpu": "4", "memory": "64Gi"}),
    ],
)
def test_numa_required_makes_pods_with_gpus_guaranteed(asks: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = {**GPUS, "topology": {"numa": "required"}}
    spec["inference"] = {**GPUS["inference"], **main_asks(**asks)}
    pod = pod_of(make_job(spec), "inference")
    amounts = {**expected, "nvidia.com/gpu": "2"}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["resources"] == {"requests": amounts, "limits": amounts}


def test_numa_required_leaves_pods_without_gpus_alone() -> None:
    job = make_job({"topology": {"numa": "required"}})
    for role in ("trainer", "inference", "orchestrator"):
        assert pod_of(job, role)["containers"][0]["resources"] == {}


def test_auto_stays_auto_in_every_config() -> None:
    for spec in ({}, {**GPUS, "topology": {"gpuProduct": ["NVIDIA-H200"]}}):
        objects = built(make_job(spec))
        for role in ("trainer", "inference", "orchestrator"):
            precision = json.loads(objects[f"ConfigMap/job-{role}"]["data"]["config.json"])["precision"]
            assert (precision["recipe"], precision["wire"], precision["scale_format"]) == ("auto", "auto", "auto")


def named(job: FP8RLJob) -> set[tuple[str, str, str]]:
    return {
        (item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])
        for item in build_objects(job, PLAN, "t")
    }


OTHER = UID[:-1] + "2"


@pytest.mark.parametrize("other", [{"name": "job-2", "uid": OTHER}, {"namespace": "team-2", "uid": OTHER}])
def test_two_runs_of_one_manifest_share_no_name_and_no_selected_pod(other: dict[str, Any]) -> None:
    one, two = make_job(), make_job(**other)
    assert not named(one) & named(two)
    for mine, theirs in ((one, two), (two, one)):
        labels = [w["spec"]["template"]["metadata"]["labels"] for w in workloads(theirs).values()]
        for selected in every_selector(mine):
            assert not [pod for pod in labels if selected.items() <= pod.items()]


def every_selector(job: FP8RLJob) -> list[dict[str, str]]:
    """Selectors that take pods of fp8rl."""
    found = [labels for item in built(job).values() if "spec" in item for labels in selectors(item["spec"])]
    return [labels for labels in found if labels["app.kubernetes.io/name"] == "fp8rl"]


def test_a_job_of_the_same_name_that_was_made_anew_selects_none_of_the_old_ones_pods() -> None:
    old, new = make_job(), make_job(uid=OTHER)
    labels = [w["spec"]["template"]["metadata"]["labels"] for w in workloads(old).values()]
    assert not [pod for pod in labels for selected in every_selector(new) if selected.items() <= pod.items()]


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({}, "1"),
        ({"requests": {"cpu": "1500m"}}, "1"),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "3500m"}}, "3"),
    ],
)
def test_a_role_on_cpus_takes_as_many_openmp_threads_as_whole_cpus_that_it_asks_for(resources, threads) -> None:
    template = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    job = make_job({"trainer": {"template": template}})
    env = {item["name"]: item.get("value") for item in main_of(built(job)["StatefulSet/job-trainer"])["env"]}
    assert env["OMP_NUM_THREADS"] == threads


def test_weights_are_prepared_for_the_trainer_alone() -> None:
    objects = built(make_job())
    told = {}
    for name in ("StatefulSet/job-trainer", "Deployment/job-inference", "StatefulSet/job-orchestrator"):
        init = objects[name]["spec"]["template"]["spec"]["initContainers"][0]
        told[name] = {item["name"]: item.get("value") for item in init["env"]}.get("FP8RL_MODEL_WEIGHTS")
    assert list(told.values()) == [None, "no", "no"]
