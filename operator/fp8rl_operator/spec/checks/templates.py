"""Pod templates: free JSON that is merged by keys, so lists and items must be what Kubernetes has there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Check
from fp8rl_operator.spec.checks.pools import pools
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.memory import MAIN
from fp8rl_operator.spec.quantities import quantity

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

Shape = dict[str, Any] | list[Any]
TERMS: Shape = {"nodeSelectorTerms": [{"matchExpressions": [{}], "matchFields": [{}]}]}
POD_SHAPE: Shape = {
    "nodeSelector": {},
    "tolerations": [{}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": TERMS}},
}
"""What is read of a PodSpec: a map has known fields, a list holds what its one item is like."""
CONTAINER_SHAPE: Shape = {"resources": {"requests": {}, "limits": {}}}


def templates_can_be_merged(job: FP8RLJob) -> Iterator[Fault]:
    """Keyed lists hold records with their key, maps are maps, and container `main` stays."""
    roles = [("spec.trainer", job.spec.trainer.template), ("spec.orchestrator", job.spec.orchestrator.template)]
    for path, template in [*roles, *((path, pool.template) for path, pool in pools(job))]:
        yield from faults_of_spec(f"{path}.template.spec", template.spec)


def faults_of_spec(path: str, spec: dict[str, Any]) -> Iterator[Fault]:
    """Faults of one PodSpec."""
    if "containers" in spec and spec["containers"] is None:
        yield Fault(f"{path}.containers", None, "is null, which would remove container main", "remove it")
    yield from faults_of_shape(path, spec, POD_SHAPE)
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
            shaped = list(faults_of_shape(place, container, CONTAINER_SHAPE))
            yield from shaped or faults_of_amounts(f"{place}.resources", container.get("resources") or {})
            for name, inner in CONTAINER_LISTS.items():
                yield from faults_of_list(f"{place}.{name}", container.get(name), inner)


def faults_of_amounts(path: str, resources: dict[str, Any]) -> Iterator[Fault]:
    """Requests over their limits, with which Kubernetes refuses the workload."""
    limits = resources.get("limits") or {}
    for name, request in (resources.get("requests") or {}).items():
        wanted, most = quantity(request), quantity(limits.get(name))
        if wanted is not None and most is not None and wanted > most:
            reason = f"is over limits.{name} {limits[name]}"
            yield Fault(f"{path}.requests.{name}", request, reason, "raise the limit, or lower the request")


def faults_of_shape(path: str, value: Any, shape: Shape) -> Iterator[Fault]:
    """Faults of a value that is no map, or no list of maps, where its shape says so; null is nothing."""
    if isinstance(shape, list):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            yield Fault(path, value, "is no list of records", "write it as in a PodSpec")
            return
        for index, item in enumerate(value):
            yield from faults_of_shape(f"{path}[{index}]", item, shape[0])
    elif not isinstance(value, dict):
        yield Fault(path, value, "is no map", "write it as in a PodSpec")
    else:
        for name, below in shape.items():
            if value.get(name) is not None:
                yield from faults_of_shape(f"{path}.{name}", value[name], below)


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
        elif item.get("$patch", "delete") != "delete":
            yield Fault(
                f"{path}[{index}].$patch", item["$patch"], "is no directive of this merge", "write $patch: delete"
            )


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
