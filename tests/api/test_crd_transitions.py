"""What a stored job may change: the API server refuses the immutable with a message that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from builders import make_body
from control_plane_kit import ControlPlane
from raw_api import DRY, RawApi

from fp8rl_operator.spec.checks import TRANSITIONS

HUB = {"repository": "a/b"}
ANEW = "create a job of another name with the new value, or delete this one first"
LIVE: dict[str, Any] = {
    "model": {"source": {"hub": HUB, "builtin": None}, "chatTemplate": "{{ messages }}"},
    "trainer": {"checkpoint": {"claimName": "c"}},
    "rollout": {"environment": {"args": {"a": {"b": [1]}}}, "dataset": {"split": "train"}},
}
IMMUTABLE: list[tuple[str, dict[str, Any], str]] = [
    ("managedBy", {"managedBy": "kueue.x-k8s.io/multikueue"}, "managedBy is immutable: a second controller"),
    ("seed", {"seed": 1}, "seed is immutable"),
    ("model", {"model": {"maxModelLen": 512}}, "model is immutable"),
    ("model", {"model": {"source": {"hub": {"secretName": "s"}}}}, "model is immutable"),
    ("model", {"model": {"chatTemplate": None}}, "model is immutable"),
    ("precision", {"precision": {"recipe": "bf16"}}, "precision is immutable"),
    ("precision", {"precision": {"ignoredLayers": ["lm_head"]}}, "precision is immutable"),
    ("backend", {"trainer": {"backend": "megatron", "gpusPerReplica": 1}}, "trainer.backend is immutable"),
    ("claim", {"trainer": {"checkpoint": {"claimName": "d"}}}, "trainer.checkpoint.claimName is immutable"),
    ("claim", {"trainer": {"checkpoint": {"claimName": None}}}, "trainer.checkpoint.claimName is immutable"),
    (
        "claim",
        {"trainer": {"checkpoint": {"claimName": None, "volumeClaimTemplate": {"storage": "1Gi"}}}},
        "trainer.checkpoint.volumeClaimTemplate is immutable",
    ),
    ("environment", {"rollout": {"environment": {"id": "arithmetic"}}}, "rollout.environment is immutable"),
    ("environment", {"rollout": {"environment": {"args": {"a": {"b": [2]}}}}}, "rollout.environment is immutable"),
    ("dataset", {"rollout": {"dataset": {"split": "test"}}}, "rollout.dataset is immutable"),
    ("dataset", {"rollout": {"dataset": {"hub": HUB}}}, "rollout.dataset is immutable"),
    ("volume", {"orchestrator": {"volume": {"claimName": "v"}}}, "orchestrator.volume is immutable"),
]
CHANGES: list[dict[str, Any]] = [
    {"suspend": True},
    {"inference": {"replicas": 3, "minReplicas": 2, "template": {"metadata": {"labels": {"a": "b"}}}}},
    {"trainer": {"checkpoint": {"everySteps": 1, "keep": 9}, "optimizer": {"learningRate": "1e-9"}}},
    {"rollout": {"steps": 9, "maxOffPolicySteps": 0, "loss": {"name": "grpo"}}},
    {"failurePolicy": {"maxRestarts": 0}, "stallDeadlineSeconds": 5, "ttlSecondsAfterFinished": 0},
    {"networkPolicy": "disabled", "podDisruptionBudget": "disabled", "cleanupPolicy": "keepPods"},
    {"orchestrator": {"resources": {"limits": {"memory": "1Gi"}}}, "topology": {"numa": "required"}},
]


def changed(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A copy with the change laid over it; None removes."""
    result = copy.deepcopy(spec)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = changed(result[key], value)
        else:
            result[key] = value
    return result


@pytest.fixture
def live(plane: ControlPlane, namespace: str) -> tuple[RawApi, dict[str, Any]]:
    """A stored job."""
    api = RawApi(plane.kubeconfig)
    body = make_body(LIVE, namespace=namespace)
    code, stored = api.create(body, namespace, "fieldValidation=Strict")
    assert code == 201, stored
    return api, stored


def replaced(live: tuple[RawApi, dict[str, Any]], change: dict[str, Any]) -> tuple[int, Any]:
    """The answer to a PUT of the changed job."""
    api, stored = live
    path = f"/apis/fp8rl.dev/v1alpha1/namespaces/{stored['metadata']['namespace']}/fp8rljobs/job?{DRY}"
    return api.request("PUT", path, stored | {"spec": changed(stored["spec"], change)})


def test_what_belongs_to_the_jobs_past_is_immutable_and_the_message_says_what_to_do(live: Any) -> None:
    for name, change, words in IMMUTABLE:
        code, answer = replaced(live, change)
        assert code == 422, (name, change)
        assert words in answer["message"], (name, answer["message"])
        way = "delete the job and create it anew" if name == "managedBy" else ANEW
        assert way in answer["message"], name


def test_every_transition_rule_is_seen_to_refuse() -> None:
    for rule in TRANSITIONS:
        assert [words for _, _, words in IMMUTABLE if rule.message.startswith(words)], rule.message


def test_everything_else_may_change(live: Any) -> None:
    for change in CHANGES:
        code, answer = replaced(live, change)
        assert code == 200, (change, answer)


def test_a_job_that_was_stored_with_less_may_be_applied_again_as_it_was(live: Any) -> None:
    api, stored = live
    body = make_body(LIVE, namespace=stored["metadata"]["namespace"])
    body["metadata"] = {"name": "job", "namespace": stored["metadata"]["namespace"]}
    code, answer = api.apply(body, stored["metadata"]["namespace"])
    assert code == 200, answer
    assert answer["metadata"]["generation"] == 1
