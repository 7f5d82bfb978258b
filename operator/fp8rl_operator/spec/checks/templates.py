"""Pod templates: free JSON that is merged by keys, so lists and items must be what Kubernetes has there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Check
from fp8rl_operator.spec.checks.pools import pools
from fp8rl_operator.spec.job import FP8RLJob

MAIN = "main"
POD_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a PodSpec and the key that tells their items apart."""

CONTAINER_LISTS = {"env": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
"""Lists of a container and the key that tells their items apart."""


def templates_can_be_merged(job: FP8RLJob) -> Iterator[Fault]:
    """Keyed lists hold records with their key, maps are maps, and container `main` stays."""
    roles = [("spec.trainer", job.spec.trainer.template), ("spec.orchestrator", job.spec.orchestrator.template)]
    for path, template in [*roles, *((path, pool.template) for path, pool in pools(job))]:
        yield from faults_of_spec(f"{path}.template.spec", template.spec)


def faults_of_spec(path: str, spec: dict[str, Any]) -> Iterator[Fault]:
    """Faults of one PodSpec."""
    selector = spec.get("nodeSelector")
    if selector is not None and not isinstance(selector, dict):
        yield Fault(f"{path}.nodeSelector", selector, "is no map of labels", "write nodeSelector: {LABEL: VALUE}")
    for field, key in POD_LISTS.items():
        yield from faults_of_list(f"{path}.{field}", spec.get(field), key)
    for field in ("containers", "initContainers"):
        items = spec.get(field)
        for index, container in enumerate(items if isinstance(items, list) else []):
            place = f"{path}.{field}[{index}]"
            if not isinstance(container, dict):
                continue
            if field == "containers" and container.get("name") == MAIN and "$patch" in container:
                yield Fault(f"{place}.$patch", container["$patch"], "container main does the work", "remove $patch")
            for name, inner in CONTAINER_LISTS.items():
                yield from faults_of_list(f"{place}.{name}", container.get(name), inner)


def faults_of_list(path: str, items: Any, key: str) -> Iterator[Fault]:
    """Faults of one list whose items are told apart by `key`."""
    if items is None:
        return
    if not isinstance(items, list):
        yield Fault(path, items, "is no list", f"write a list of records with {key}")
        return
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            yield Fault(f"{path}[{index}]", item, "is no record", f"write {{{key}: ...}}")
        elif not isinstance(item.get(key), str | int):
            yield Fault(f"{path}[{index}]", None, f"has no {key}, by which it is merged", f"add {key}")


CHECKS = (
    Check(
        templates_can_be_merged,
        reads=(
            "spec.trainer.template",
            "spec.orchestrator.template",
            "spec.inference.template",
            "spec.samplers",
        ),
        beyond_cel="what stands in a template: free JSON has no CEL type",
    ),
)
