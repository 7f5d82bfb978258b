"""Pod templates that could not be merged are refused with the place; those that Kubernetes takes are taken."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_body

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import inspect, parse

PLAN = Plan(attempt=0, fleet_attempt=0, restarts=0, attempt_time=0.0, running=True)
PLACE = "spec.trainer.template.spec"


def with_template(spec: dict[str, Any]) -> dict[str, Any]:
    """A manifest with a trainer's template, its nulls as they are."""
    body = make_body()
    body["spec"]["trainer"]["template"] = {"spec": spec}
    return body


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
        ({"nodeSelector": "gpu"}, ".nodeSelector: value gpu: is no map; write it as in a PodSpec"),
        ({"containers": None}, ".containers: is null, which would remove container main; remove it"),
        (
            {"tolerations": {"key": "a"}},
            ".tolerations: value {'key': 'a'}: is no list of records; write it as in a PodSpec",
        ),
        (
            {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}},
            ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution: value []: is no map; write it as in a PodSpec",
        ),
        (
            {"containers": [{"name": "main", "resources": {"limits": ["cpu"]}}]},
            ".containers[0].resources.limits: value ['cpu']: is no map; write it as in a PodSpec",
        ),
        (
            {"containers": [{"name": "main", "resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}]},
            ".containers[0].resources.requests.cpu: value 2: is over limits.cpu 1500m; raise the limit, or lower the request",
        ),
        (
            {"volumes": [{"name": "v", "$patch": "replace"}]},
            ".volumes[0].$patch: value replace: is no directive of this merge; write $patch: delete",
        ),
    ],
)
def test_a_template_that_cannot_be_merged_is_a_fault(template: dict[str, Any], words: str) -> None:
    faults = inspect(with_template(template))[1]
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
    job = parse(with_template(template))
    assert len(build_objects(job, PLAN, "t")) == 16
