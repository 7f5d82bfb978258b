"""CPUs, memory and GPUs of the containers, completed after the user's template was merged."""

from __future__ import annotations

import copy
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.manifests.meta import Object
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.memory import MAIN, PROCESS_BYTES, asked, state_bytes
from fp8rl_operator.spec.quantities import GIB, gibibytes

CPUS_A_GPU = 8
MEMORY_A_GPU = 32 * GIB


def own_resources(gpus: int, given: Object) -> Object:
    """Requests and limits of the main container before the template: GPUs, and what the spec gives the role."""
    cards = {names.GPU_RESOURCE: str(gpus)} if gpus else {}
    found = {kind: {**given.get(kind, {}), **cards} for kind in ("requests", "limits")}
    return {kind: amounts for kind, amounts in found.items() if amounts}


def completed(job: FP8RLJob, role: str, gpus: int, pod: Object, own_init: set[str]) -> Object:
    """A merged pod with the resources that its template leaves open.

    The operator's init containers ask for what `main` asks, GPUs excepted: a pod reserves the larger, so that costs nothing.
    Where the kubelet must align the pod they ask for the GPUs too, since it aligns each container and hands over what an init
    container had.
    """
    main = next(container for container in pod["containers"] if container["name"] == MAIN)
    bound = bool(gpus) and job.spec.topology.numa == "required"
    resources = with_memory(job, role, main.get("resources") or {})
    if bound:
        resources = guaranteed(resources, gpus, computed_memory(job, role))
    for_init = resources if bound else without_gpus(resources)

    def of(container: Object, wanted: Object) -> Object:
        return {**container, "resources": wanted} if wanted else container

    inits = [
        of(item, copy.deepcopy(for_init)) if item["name"] in own_init and (bound or not item.get("resources")) else item
        for item in pod.get("initContainers", [])
    ]
    containers = [of(item, resources) if item is main else item for item in pod["containers"]]
    return {**pod, "initContainers": inits, "containers": containers}


def computed_memory(job: FP8RLJob, role: str) -> int | None:
    """Bytes that the trainer's offloaded state and its processes take; None for other roles and where it is not known."""
    trainer, parameters = job.spec.trainer, job.spec.model.parameters
    if role != names.TRAINER or parameters is None or trainer.offloaded == "none":
        return None
    return state_bytes(trainer, parameters) + PROCESS_BYTES * max(1, trainer.gpus_per_replica)


def with_memory(job: FP8RLJob, role: str, resources: Object) -> Object:
    """Resources with the computed memory request, unless the template asks for memory itself."""
    need = computed_memory(job, role)
    if need is None or asked(resources, "memory") is not None:
        return resources
    return {**resources, "requests": {**(resources.get("requests") or {}), "memory": gibibytes(need)}}


def guaranteed(resources: Object, gpus: int, computed: int | None) -> Object:
    """Resources whose requests equal their limits, whole CPUs included."""
    requests, limits = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    memory = gibibytes(max(MEMORY_A_GPU * gpus, computed or 0))
    for name, default in (("cpu", str(CPUS_A_GPU * gpus)), ("memory", memory)):
        amount: Any = limits.get(name) or requests.get(name) or default
        requests[name] = limits[name] = amount
    return {**resources, "requests": requests, "limits": limits}


def without_gpus(resources: Object) -> Object:
    """CPU, memory and ephemeral storage of some resources."""
    kept = ("cpu", "memory", "ephemeral-storage")
    found = {
        kind: {name: amount for name, amount in (resources.get(kind) or {}).items() if name in kept}
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in found.items() if amounts}
