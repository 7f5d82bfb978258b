"""Objects: what Kubernetes gets, exactly where it matters."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from builders import UID, make_body, make_job
from manifest_kit import PLAN, built, main_of, selectors, workloads

from fp8rl_operator.manifests import Images, build_objects
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import parse
from fp8rl_workers.config import EngineConfig, OrchestratorConfig, TrainerConfig

ROLES = ("trainer", "inference", "orchestrator")


def test_the_children_of_a_job() -> None:
    assert list(built(make_job())) == [
        "Secret/job-control",
        "ServiceAccount/job-workers",
        "NetworkPolicy/job-workers",
        "NetworkPolicy/job-control",
        "PodDisruptionBudget/job-trainer",
        "PodDisruptionBudget/job-orchestrator",
        "PodDisruptionBudget/job-inference",
        "ConfigMap/job-trainer",
        "Service/job-trainer",
        "StatefulSet/job-trainer",
        "ConfigMap/job-inference",
        "Service/job-inference",
        "Deployment/job-inference",
        "ConfigMap/job-orchestrator",
        "Service/job-orchestrator",
        "StatefulSet/job-orchestrator",
    ]


def test_every_child_is_owned_by_the_job_and_in_its_namespace() -> None:
    for item in built(make_job()).values():
        assert item["metadata"]["namespace"] == "team"
        assert item["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "fp8rl.dev/v1alpha1",
                "kind": "FP8RLJob",
                "name": "job",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_every_selector_of_own_pods_contains_instance_and_uid() -> None:
    count = 0
    for item in built(make_job()).values():
        for labels in selectors(item["spec"]) if "spec" in item else []:
            if labels["app.kubernetes.io/name"] == "fp8rl":
                assert labels["app.kubernetes.io/instance"] == "job"
                assert labels["fp8rl.dev/job-uid"] == UID
                count += 1
    assert count == 3 + 3 + 3 + 2 + 1


def test_selectors_select_the_pods_of_their_own_template() -> None:
    for workload in workloads(make_job()).values():
        selected = workload["spec"]["selector"]["matchLabels"]
        assert selected.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_only_the_attempt_changes_in_a_pod_template() -> None:
    job = make_job()
    first = workloads(job, Plan(attempt=0, fleet_attempt=0, restarts=0, attempt_time=0.0, running=True))
    own = {"trainer": "2", "inference": "1", "orchestrator": "1"}
    for role, workload in workloads(job).items():
        template, before = workload["spec"]["template"], first[role]["spec"]["template"]
        assert template["metadata"]["annotations"] == {"fp8rl.dev/attempt": own[role]}
        assert before["metadata"]["annotations"] == {"fp8rl.dev/attempt": "0"}
        assert template["spec"] == before["spec"]


def test_prompts_of_a_hub_are_fetched_beside_the_orchestrators_state() -> None:
    hub = {"repository": "o/d", "subset": "easy", "revision": "v1", "secretName": "hf"}
    pods = workloads(make_job({"rollout": {"dataset": {"hub": hub, "split": "test"}}}))
    init = {
        role: [c["name"] for c in item["spec"]["template"]["spec"]["initContainers"]] for role, item in pods.items()
    }
    assert init["orchestrator"] == ["prepare-model", "prepare-prompts"]
    assert init["trainer"] == init["inference"] == ["prepare-model"]
    fetch = pods["orchestrator"]["spec"]["template"]["spec"]["initContainers"][1]
    env = {item["name"]: item for item in fetch["env"]}
    assert fetch["command"] == ["python", "-m", "fp8rl_workers.models.prompts"]
    asked = {"repository": "o/d", "revision": "v1", "split": "test", "subset": "easy"}
    assert json.loads(env["FP8RL_DATASET_SOURCE"]["value"]) == asked
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    objects = built(make_job({"rollout": {"dataset": {"hub": hub, "split": "test"}}}))
    config = json.loads(objects["ConfigMap/job-orchestrator"]["data"]["config.json"])
    assert config["dataset"]["path"] == env["FP8RL_DATASET_PATH"]["value"]
    assert re.fullmatch(r"/var/lib/fp8rl/prompts-[0-9a-f]{8}\.jsonl", config["dataset"]["path"])


def test_a_plan_without_running_pods_scales_to_zero() -> None:
    job = make_job()
    stopped = workloads(job, Plan(attempt=0, fleet_attempt=0, restarts=0, attempt_time=0.0))
    assert {role: item["spec"]["replicas"] for role, item in stopped.items()} == dict.fromkeys(ROLES, 0)
    running = {role: item["spec"]["replicas"] for role, item in workloads(job).items()}
    assert running == {"trainer": 1, "inference": 2, "orchestrator": 1}


def test_how_the_workloads_start_and_are_replaced() -> None:
    objects = built(make_job())
    trainer = objects["StatefulSet/job-trainer"]["spec"]
    assert (trainer["podManagementPolicy"], trainer["updateStrategy"]) == ("Parallel", {"type": "OnDelete"})
    assert trainer["serviceName"] == "job-trainer"
    service = objects["Service/job-trainer"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    rolling = objects["Deployment/job-inference"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": "100%"}
    assert "clusterIP" not in objects["Service/job-inference"]["spec"]


def test_pods_are_locked_down() -> None:
    for workload in workloads(make_job()).values():
        spec = workload["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_mount_has_its_volume_and_shm_is_in_memory() -> None:
    for workload in workloads(
        make_job({"trainer": {"checkpoint": {"volumeClaimTemplate": {"storage": "1Gi"}}}})
    ).values():
        spec = workload["spec"]["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | claims
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_the_environment_is_the_workers_contract() -> None:
    env = {item["name"]: item for item in main_of(workloads(make_job())["trainer"])["env"]}
    assert env["FP8RL_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["FP8RL_ATTEMPT"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['fp8rl.dev/attempt']"
    assert env["FP8RL_CONFIG"]["value"] == "/etc/fp8rl/config/config.json"
    assert {"FP8RL_TOKEN_FILE", "FP8RL_POD_NAME", "FP8RL_POD_UID", "FP8RL_STATE_DIR"} <= env.keys()


def test_the_configs_are_what_the_workers_read() -> None:
    spec = {
        "seed": 7,
        "precision": {"recipe": "blockwise", "ignoredLayers": ["lm_head"]},
        "trainer": {"optimizer": {"learningRate": "1e-5", "gradClip": "1.0"}, "checkpoint": {"everySteps": 3}},
        "rollout": {"loss": {"name": "grpo", "tisCap": "3.0"}, "stop": ["\n"], "maxOffPolicySteps": 2},
        "evaluation": {"everySteps": 5, "samples": 16},
    }
    objects = built(make_job(spec))
    texts = {role: objects[f"ConfigMap/job-{role}"]["data"]["config.json"] for role in ROLES}
    trainer = TrainerConfig.model_validate_json(texts["trainer"])
    assert (trainer.optimizer.learning_rate, trainer.optimizer.grad_clip, trainer.loss.tis_cap) == (1e-5, 1.0, 3.0)
    assert (trainer.seed, trainer.precision.ignored_layers, trainer.model_path) == (7, ["lm_head"], "/models/base")
    engine = EngineConfig.model_validate_json(texts["inference"])
    assert (engine.tensor_parallel, engine.precision.recipe, engine.uid) == (1, "blockwise", UID)
    orchestrator = OrchestratorConfig.model_validate_json(texts["orchestrator"])
    assert (orchestrator.max_off_policy_steps, orchestrator.evaluation.samples, orchestrator.stop) == (2, 16, ["\n"])


def test_the_token_is_in_the_secret_and_nowhere_else() -> None:
    objects = built(make_job())
    assert base64.b64decode(objects["Secret/job-control"]["data"]["token"]) == b"secret-token"
    rest = [item for key, item in objects.items() if key != "Secret/job-control"]
    assert "secret-token" not in json.dumps(rest)


def test_a_template_wins_but_for_config_token_and_ports() -> None:
    main = {
        "name": "main",
        "image": "mine:1",
        "env": [{"name": "HOME", "value": "/h"}, {"name": "FP8RL_CONFIG", "value": "/x"}, {"name": "A", "value": "b"}],
        "resources": {"limits": {"memory": "8Gi"}},
    }
    template = {
        "metadata": {"labels": {"team": "red"}},
        "spec": {"containers": [main], "nodeSelector": {"disk": "ssd"}},
    }
    workload = workloads(make_job({"trainer": {"template": template}}))["trainer"]
    container, pod = main_of(workload), workload["spec"]["template"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert (container["image"], env["HOME"], env["A"]) == ("mine:1", "/h", "b")
    assert env["FP8RL_CONFIG"] == "/etc/fp8rl/config/config.json"
    assert container["resources"] == {"limits": {"memory": "8Gi"}}
    assert container["command"] == ["python", "-m", "fp8rl_workers.trainer"]
    assert pod["metadata"]["labels"]["team"] == "red"
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}


def test_gpus_are_asked_for_and_their_product_is_chosen() -> None:
    spec = {
        "inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}},
        "topology": {"gpuProduct": ["NVIDIA-H200"]},
    }
    found = workloads(make_job(spec))
    assert main_of(found["inference"])["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    affinity = found["inference"]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expected = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]}
    assert terms == [{"matchExpressions": [expected]}]
    assert main_of(found["trainer"])["resources"] == {}
    assert "affinity" not in found["trainer"]["spec"]["template"]["spec"]


def test_a_claim_made_for_the_job_outlives_its_suspension() -> None:
    claim = {"storage": "10Gi", "storageClassName": "fast"}
    trainer = workloads(make_job({"trainer": {"checkpoint": {"volumeClaimTemplate": claim}}}))["trainer"]["spec"]
    assert trainer["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}
    assert trainer["volumeClaimTemplates"] == [
        {
            "metadata": {"name": "state"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "10Gi"}},
                "storageClassName": "fast",
            },
        }
    ]


@pytest.mark.parametrize(
    ("model", "path", "volume"),
    [
        ({"source": {"pvc": {"claimName": "m"}}, "path": "qwen"}, "/models/qwen", "persistentVolumeClaim"),
        ({"source": {"hostPath": {"path": "/srv/m"}}}, "/models", "hostPath"),
        ({"source": {"hub": {"repository": "a/b", "secretName": "hf"}}}, "/models/base", "emptyDir"),
        ({"path": "/opt/model"}, "/opt/model", None),
    ],
)
def test_where_the_model_comes_from(model: dict[str, Any], path: str, volume: str | None) -> None:
    body = make_body()
    body["spec"]["model"] = model
    spec = workloads(parse(body))["trainer"]["spec"]["template"]["spec"]
    env = {item["name"]: item for item in spec["initContainers"][0]["env"]}
    assert env["FP8RL_MODEL_PATH"]["value"] == path
    assert json.loads(env["FP8RL_MODEL_SOURCE"]["value"]) == model
    volumes = {item["name"]: item for item in spec["volumes"]}
    assert ("model" in volumes) == (volume is not None)
    assert volume is None or volume in volumes["model"]


def test_images_are_chosen_by_the_operator() -> None:
    objects = build_objects(make_job(), PLAN, "t", Images(trainer="t:1", inference="i:1", orchestrator="o:1"))
    images = {main_of(item)["image"] for item in objects if item["kind"] in {"StatefulSet", "Deployment"}}
    assert images == {"t:1", "i:1", "o:1"}


def test_switched_off_budgets_and_policies_are_not_made() -> None:
    objects = built(make_job({"networkPolicy": "disabled", "podDisruptionBudget": "disabled"}))
    assert not [key for key in objects if key.startswith(("NetworkPolicy", "PodDisruptionBudget"))]


def test_a_job_that_is_named_like_an_account_of_the_namespace_leaves_that_account_alone() -> None:
    job = make_job(name="default")
    objects = built(job)
    assert [key for key in objects if key.startswith("ServiceAccount/")] == ["ServiceAccount/default-workers"]
    accounts = {
        item["spec"]["template"]["spec"]["serviceAccountName"]
        for item in objects.values()
        if item["kind"] in {"StatefulSet", "Deployment"}
    }
    assert accounts == {"default-workers"}


def test_a_template_cannot_hide_config_and_token_in_any_container_of_ours() -> None:
    stolen = [{"name": "x", "mountPath": "/etc/fp8rl/control"}, {"name": "x", "mountPath": "/etc/fp8rl/config"}]
    lies = {"env": [{"name": "FP8RL_TOKEN_FILE", "value": "/x"}], "volumeMounts": stolen}
    template = {
        "volumes": [{"name": "x", "emptyDir": {}}],
        "containers": [{"name": "main", **lies}],
        "initContainers": [{"name": "prepare-model", **lies}, {"name": "mine", "image": "i", **lies}],
    }
    spec = workloads(make_job({"trainer": {"template": {"spec": template}}}))["trainer"]["spec"]["template"]["spec"]
    ours, mine = [*spec["containers"], spec["initContainers"][0]], spec["initContainers"][1]
    for container in ours:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert (mounts["/etc/fp8rl/control"], mounts["/etc/fp8rl/config"]) == ("control", "config")
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert env["FP8RL_TOKEN_FILE"] == "/etc/fp8rl/control/token"
    assert mine == {"name": "mine", "image": "i", **lies}


def test_an_init_container_that_a_template_deletes_stays_away() -> None:
    template = {"initContainers": [{"name": "prepare-model", "$patch": "delete"}]}
    spec = workloads(make_job({"trainer": {"template": {"spec": template}}}))["trainer"]["spec"]["template"]["spec"]
    assert spec["initContainers"] == []


def test_merge_follows_strategic_merge() -> None:
    base = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "x": {"a": 1, "b": 2}, "args": [1, 2]}
    source = {"fieldRef": {"fieldPath": "metadata.name"}}
    patch = {
        "env": [{"name": "B", "valueFrom": source}, {"name": "A", "$patch": "delete"}, {"name": "C", "value": "3"}],
        "x": {"b": None, "c": 3},
        "args": [9],
    }
    assert merge(base, patch) == {
        "env": [{"name": "B", "valueFrom": source}, {"name": "C", "value": "3"}],
        "x": {"a": 1, "c": 3},
        "args": [9],
    }


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {
            "trainer": {"checkpoint": {"volumeClaimTemplate": {"storage": "1Gi", "storageClassName": "fast"}}},
            "inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}},
            "orchestrator": {"volume": {"claimName": "c"}, "resources": {"limits": {"memory": "4Gi"}}},
            "topology": {"gpuProduct": ["NVIDIA-H200"], "nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}]},
            "rollout": {"dataset": {"volume": {"claimName": "d", "path": "train.jsonl"}}},
            "priorityClassName": "high",
            "queueName": "q",
        },
    ],
)
def test_kubernetes_knows_every_field_of_every_object(spec: dict[str, Any]) -> None:
    from kubernetes import client

    api = client.ApiClient()
    for key, item in built(make_job(spec)).items():
        read = api.deserialize(json.dumps(item), f"V1{item['kind']}", "application/json")
        again = json.loads(json.dumps(api.sanitize_for_serialization(read)))
        assert again == item, key


def test_merge_drops_nulls_of_what_is_not_there_and_replaces_a_volumes_source() -> None:
    base = {"volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "tmp", "emptyDir": {}}]}
    patch = {
        "resources": {"limits": {"cpu": None, "memory": "1Gi"}},
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "tmp", "emptyDir": {"medium": "Memory"}},
        ],
    }
    assert merge(base, patch) == {
        "resources": {"limits": {"memory": "1Gi"}},
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "tmp", "emptyDir": {"medium": "Memory"}},
        ],
    }
