"""Pod templates that could not be merged are refused with the place; those that Kubernetes takes are taken."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_body, make_job

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import inspect

PLAN = Plan(attempt=0, fleet_attempt=0, restarts=0, attempt_time=0.0, running=True)
PLACE = "spec.trainer.template.spec"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"containers": [{"image": "x"}]}, ".containers[0]: has no name, by which it is merged; add name"),
        ({"containers": "x"}, ".containers: value x: is no list; write a list of records with name"),
        ({"volumes": ["x"]}, ".volumes[0]: value x: is no record; write {name: ...}"),
        (
            {"containers": [{"name": "main", "$patch": "delete"}]},
            ".containers[0].$patch: value delete: container main does the work; remove $patch",
        ),
        (
            {"containers": [{"name": "main", "env": [{"value": "1"}]}]},
            ".containers[0].env[0]: has no name, by which it is merged; add name",
        ),
        (
            {"initContainers": [{"name": "a", "volumeMounts": {"name": "x"}}]},
            ".initContainers[0].volumeMounts: value {'name': 'x'}: is no list; write a list of records with mountPath",
        ),
        ({"nodeSelector": "gpu"}, ".nodeSelector: value gpu: is no map of labels; write nodeSelector: {LABEL: VALUE}"),
    ],
)
def test_a_template_that_cannot_be_merged_is_a_fault(template: dict[str, Any], words: str) -> None:
    faults = inspect(make_body({"trainer": {"template": {"spec": template}}}))[1]
    assert [str(fault) for fault in faults] == [PLACE + words]


def test_templates_of_every_role_are_looked_at() -> None:
    bad = {"template": {"spec": {"volumes": [1]}}}
    faults = inspect(make_body(dict.fromkeys(("trainer", "inference", "orchestrator"), bad)))[1]
    assert sorted(fault.path for fault in faults) == [
        "spec.inference.template.spec.volumes[0]",
        "spec.orchestrator.template.spec.volumes[0]",
        "spec.trainer.template.spec.volumes[0]",
    ]


def test_a_template_that_kubernetes_takes_is_taken() -> None:
    template = {
        "nodeSelector": {"env": "prod", "volumes": "fast"},
        "containers": [{"name": "main", "env": [{"name": "A", "value": "1"}], "ports": [{"containerPort": 9}]}],
        "initContainers": None,
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "tmp", "$patch": "delete"}],
    }
    job = make_job({"trainer": {"template": {"spec": template}}})
    assert len(build_objects(job, PLAN, "t")) == 15
