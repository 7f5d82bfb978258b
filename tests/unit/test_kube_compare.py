"""Whether a child is as it shall be, what is frozen, and what a claim is good for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from builders import make_job

from fp8rl_operator import names
from fp8rl_operator.kube.claims import Use, claims_of, classes_of, wrong_claim
from fp8rl_operator.kube.compare import ANNOTATION_APPLIED, satisfied, signed
from fp8rl_operator.kube.events import newest, role_of, short
from fp8rl_operator.kube.frozen import frozen
from fp8rl_operator.manifests import Images, build_objects
from fp8rl_operator.observed import Trouble
from fp8rl_operator.plan_types import Plan

PLAN = Plan(0, 0, 0, 0.0, running=True)


@pytest.mark.parametrize(
    ("desired", "live", "same"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": ""}, {}, True),
        ({"a": {}}, {}, True),
        ({"replicas": 0}, {"replicas": 1}, False),
        ({"args": ["a"]}, {"args": ["a", "b"]}, False),
        ({"env": [{"name": "a", "value": "1"}]}, {"env": [{"name": "b"}, {"name": "a", "value": "1"}]}, True),
        ({"env": [{"name": "a", "value": "1"}]}, {"env": [{"name": "a", "value": "2"}]}, False),
        ({"env": [{"name": "a", "value": "1"}]}, {"env": []}, False),
        ({"ports": [{"port": 1}]}, {"ports": [{"port": 1, "protocol": "TCP"}]}, True),
        ({"ports": [{"port": 1}]}, {"ports": [{"port": 2}]}, False),
        ({"requests": {"cpu": "0.5"}}, {"requests": {"cpu": "500m"}}, True),
        ({"requests": {"memory": "1024Mi"}}, {"requests": {"memory": "1Gi"}}, True),
        ({"requests": {"memory": "1G"}}, {"requests": {"memory": "1Gi"}}, False),
        ({"limits": {"cpu": 1}}, {"limits": {"cpu": "1"}}, True),
        ({"sizeLimit": "8192Mi"}, {"sizeLimit": "8Gi"}, True),
        ({"value": "1000m"}, {"value": "1"}, False),
        ({"nodeSelector": {"a": "b"}}, {"nodeSelector": {"a": "b", "c": "d"}}, False),
        ({"labels": {"a": "b"}}, {"labels": {"a": "b", "c": "d"}}, True),
    ],
)
def test_a_live_value_satisfies_a_desired_one(desired: Any, live: Any, same: bool) -> None:
    assert satisfied(desired, live) is same


def test_a_field_that_is_not_desired_any_more_is_a_difference_by_the_digest() -> None:
    old = {"kind": "Service", "metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}}
    new = {"kind": "Service", "metadata": {"name": "x"}, "spec": {"a": 1}}
    assert satisfied(signed(old), signed(old))
    assert not satisfied(signed(new), signed(old))
    assert (
        signed(old)["metadata"]["annotations"][ANNOTATION_APPLIED]
        != signed(new)["metadata"]["annotations"][ANNOTATION_APPLIED]
    )


def built(spec: dict[str, Any] | None = None, images: Images | None = None, plan: Plan = PLAN) -> dict[str, Any]:
    return {
        f"{item['kind']}/{item['metadata']['name']}": item
        for item in build_objects(make_job(spec), plan, "token", images)
    }


OTHER = Images(trainer="t:2", inference="i:2", orchestrator="o:2")
FROZEN = ("StatefulSet/job-trainer", "Deployment/job-inference", "StatefulSet/job-orchestrator")


@pytest.mark.parametrize("name", FROZEN)
def test_another_image_of_the_operator_changes_no_running_template(name: str) -> None:
    live = frozen(built()[name], None)
    after = frozen(built(images=OTHER)[name], copy.deepcopy(live))
    assert after["spec"] == live["spec"]
    assert after["metadata"]["annotations"] == live["metadata"]["annotations"]


@pytest.mark.parametrize("name", FROZEN)
def test_a_new_attempt_and_other_replicas_reach_a_frozen_template(name: str) -> None:
    live = frozen(built()[name], None)
    plan = Plan(3, 3, 0, 0.0, running=False)
    after = frozen(built(images=OTHER, plan=plan)[name], copy.deepcopy(live))
    assert after["spec"]["replicas"] == 0
    assert after["spec"]["template"]["metadata"]["annotations"][names.ANNOTATION_ATTEMPT] == "3"
    assert after["spec"]["template"]["spec"] == live["spec"]["template"]["spec"]


def test_a_changed_spec_thaws_the_template() -> None:
    live = frozen(built()["Deployment/job-inference"], None)
    after = frozen(built({"rollout": {"batchSize": 16}}, OTHER)["Deployment/job-inference"], live)
    assert after["spec"]["template"]["spec"]["containers"][0]["image"] == "i:2"


def test_a_config_of_another_release_is_kept() -> None:
    live = frozen(built()["ConfigMap/job-trainer"], None)
    live["data"] = {"config.json": "{}"}
    live["metadata"]["annotations"][names.ANNOTATION_BUILT] = "other"
    assert frozen(built()["ConfigMap/job-trainer"], live)["data"] == {"config.json": "{}"}


CHANGES: list[dict[str, Any]] = [
    {"rollout": {"batchSize": 16}},
    {"rollout": {"temperature": "0.5"}},
    {"inference": {"maxInFlight": 3}},
    {"inference": {"gpusPerReplica": 1}},
    {"inference": {"engineArgs": {"x": 1}}},
    {"inference": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
    {"trainer": {"optimizer": {"learningRate": "1e-4"}}},
    {"trainer": {"checkpoint": {"everySteps": 2, "claimName": "x"}}},
    {"orchestrator": {"resources": {"requests": {"cpu": "1"}}}},
    {"topology": {"nodeSelector": {"a": "b"}}},
    {"limits": {"mismatchKL": {"stop": "0.1"}}},
    {"evaluation": {"everySteps": 2}},
    {"weightSync": {"timeoutSeconds": 7}},
    {"priorityClassName": "p"},
    {"queueName": "q"},
    {"stallDeadlineSeconds": 7},
    {"failurePolicy": {"maxRestarts": 1, "backoffSeconds": 3, "replicaLoss": "restart"}},
    {"inference": {"replicas": 5, "minReplicas": 3}},
    {"activeDeadlineSeconds": 9, "cleanupPolicy": "keepPods", "podDisruptionBudget": "disabled"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_content_that_a_spec_changes_is_never_taken_for_another_releases(change: dict[str, Any]) -> None:
    before, after = built(), built(change)
    for name, item in after.items():
        marks = [frozen(body, None)["metadata"].get("annotations", {}) for body in (before.get(name, item), item)]
        if marks[0].get(names.ANNOTATION_BUILT) != marks[1].get(names.ANNOTATION_BUILT):
            assert marks[0][names.ANNOTATION_REVISION] != marks[1][names.ANNOTATION_REVISION], name


def event(kind: str, name: str, reason: str, message: str, time: str = "1970-01-01T00:00:10Z") -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return short({"metadata": {}, "involvedObject": about, "reason": reason, "message": message, "lastTimestamp": time})


@pytest.mark.parametrize(
    ("kind", "name", "role"),
    [
        ("StatefulSet", "job-trainer", "trainer"),
        ("ReplicaSet", "job-inference-5d4f8", "inference"),
        ("ReplicaSet", "job-inference-two-5d4f8", None),
        ("Pod", "job-orchestrator-0", "orchestrator"),
        ("Pod", "job-trainer-9", None),
        ("StatefulSet", "job2-trainer", None),
        ("PersistentVolumeClaim", "state-job-trainer-0", "trainer"),
        ("PersistentVolumeClaim", "ckpt", ""),
        ("PersistentVolumeClaim", "other", None),
    ],
)
def test_the_role_that_an_event_is_about(kind: str, name: str, role: str | None) -> None:
    item = event(kind, name, "R", "m")
    assert role_of(make_job(), item, frozenset({"job-orchestrator-0"}), frozenset({"ckpt"})) == role


def test_the_newest_trouble_of_each_role_is_told_and_old_ones_are_not() -> None:
    events = [
        event("StatefulSet", "job-trainer", "FailedCreate", "old"),
        event("StatefulSet", "job-trainer", "FailedCreate", "new", "1970-01-01T00:00:20Z"),
        event("StatefulSet", "job-orchestrator", "FailedCreate", "o", "1970-01-01T00:00:15Z"),
    ]
    none: frozenset[str] = frozenset()
    assert newest(make_job(), events, none, none, 30.0) == (
        Trouble("trainer", "FailedCreate", "new"),
        Trouble("orchestrator", "FailedCreate", "o"),
    )
    assert newest(make_job(), events, none, none, 2000.0) == ()


@pytest.mark.parametrize(
    ("modes", "nodes", "pods", "wrong"),
    [
        (["ReadWriteMany"], 4, 4, None),
        (["ReadOnlyMany"], 4, 4, None),
        (["ReadWriteOnce"], 1, 5, None),
        (["ReadWriteOnce"], 2, 2, "access mode ReadWriteOnce serves one node, trainer.replicas is 2, a node each"),
        (["ReadWriteOncePod"], 1, 2, "access mode ReadWriteOncePod serves one pod, 2 pods mount it"),
        (["ReadWriteOncePod"], 1, 1, None),
    ],
)
def test_what_a_claim_is_good_for(modes: list[str], nodes: int, pods: int, wrong: str | None) -> None:
    said = wrong_claim(Use("f", "c", "trainer", nodes, pods), make_job(), {"spec": {"accessModes": modes}})
    assert said is None if wrong is None else said is not None and wrong in said


def test_the_claims_and_classes_that_a_job_names() -> None:
    template = {"storage": "1Gi", "storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}
    job = make_job(
        {
            "model": {"path": "m", "source": {"pvc": {"claimName": "models"}, "builtin": None}},
            "trainer": {"checkpoint": {"claimName": "ckpt"}},
            "orchestrator": {"volume": {"volumeClaimTemplate": template}},
        }
    )
    assert [(use.claim, use.role, use.nodes, use.pods) for use in claims_of(job)] == [
        ("ckpt", "trainer", 1, 1),
        ("models", "trainer", 1, 4),
    ]
    assert [(use.name, use.field) for use in classes_of(job)] == [
        ("fast", "spec.orchestrator.volume.volumeClaimTemplate.storageClassName")
    ]
    assert claims_of(make_job()) == []
    hub = {"builtin": None, "hub": {"repository": "a/b", "cacheClaimName": "cache"}}
    assert claims_of(make_job({"model": {"source": hub}})) == [
        Use("spec.model.source.hub.cacheClaimName", "cache", "trainer", 1, 4)
    ]
