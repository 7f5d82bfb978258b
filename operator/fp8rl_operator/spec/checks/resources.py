"""CPUs and memory of the pods: what binding and offload need, and what Kubernetes takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.memory import MAIN, arithmetic, asked, main_resources, state_bytes
from fp8rl_operator.spec.pods import PodTemplate, VolumeClaimTemplate
from fp8rl_operator.spec.quantities import gibibytes, quantity

OWN = {"containers": (MAIN,), "initContainers": ("prepare-model", "prepare-prompts")}
"""Containers that the operator builds: what a template leaves out it fills in."""


def memory_holds_the_state(job: FP8RLJob) -> Iterator[Fault]:
    """The trainer's template asks for at least the host memory of the offloaded state, where model.parameters tells it."""
    if job.spec.model.parameters is not None:
        yield from state_faults(job, job.spec.model.parameters)


def state_faults(job: FP8RLJob, parameters: int) -> Iterator[Fault]:
    """Faults of the trainer's memory for a model of this many parameters."""
    trainer = job.spec.trainer
    need = state_bytes(trainer, parameters)
    index, resources = main_resources(trainer.template)
    found = asked(resources, "memory")
    if found is not None and found[1] < need:
        kind, name = found[0].split(".")
        yield Fault(
            f"spec.trainer.template.spec.containers[{index}].resources.{found[0]}",
            resources[kind][name],
            f"does not hold the state that offload {trainer.offloaded} keeps in host memory:"
            f" {arithmetic(trainer, parameters)}",
            f"ask for {gibibytes(need)} or more, leave it out (then it is computed), or set offload: none",
        )


def numa_pods_are_guaranteed(job: FP8RLJob) -> Iterator[Fault]:
    """With topology.numa required each container of a pod with GPUs has requests equal to limits, and ours whole CPUs."""
    if job.spec.topology.numa != "required":
        return
    roles = (("spec.trainer", job.spec.trainer), ("spec.inference", job.spec.inference))
    for path, role in roles:
        if role.gpus_per_replica:
            yield from _template_faults(f"{path}.template.spec", role.template)


def _template_faults(path: str, template: PodTemplate) -> Iterator[Fault]:
    for field, own in OWN.items():
        items = template.spec.get(field)
        for index, container in enumerate(items if isinstance(items, list) else []):
            if isinstance(container, dict) and container.get("$patch") != "delete":
                yield from _container_faults(f"{path}.{field}[{index}]", container, ours=container.get("name") in own)


def _container_faults(path: str, container: dict[str, Any], *, ours: bool) -> Iterator[Fault]:
    resources = container.get("resources")
    resources = resources if isinstance(resources, dict) else {}
    for name in ("cpu", "memory"):
        request, limit = (_amount(resources, kind, name) for kind in ("requests", "limits"))
        if request is not None and limit is not None and quantity(request) != quantity(limit):
            yield Fault(
                f"{path}.resources.requests.{name}",
                request,
                f"is not limits.{name} {limit}: topology.numa required needs a Guaranteed pod, whose requests equal its limits",
                "write the limit only (the request follows), or set topology.numa: preferred",
            )
        elif limit is None and not ours:
            yield Fault(
                f"{path}.resources.limits.{name}",
                None,
                f"is not set: topology.numa required needs a Guaranteed pod, in which every container limits cpu and memory"
                f" ({container.get('name')} does not)",
                f"set resources.limits.{name}, or set topology.numa: preferred",
            )
    found = asked(resources, "cpu")
    if ours and found is not None and (found[1].denominator != 1 or found[1] < 1):
        whole = max(1, -(-found[1] // 1))
        yield Fault(
            f"{path}.resources.{found[0]}",
            f"{float(found[1]):g}",
            "is no whole number of CPUs, and topology.numa required pins whole CPUs only (the kubelet leaves fractions"
            " in the shared pool)",
            f"write {whole}, leave it out (8 a GPU), or set topology.numa: preferred",
        )


def _amount(resources: dict[str, Any], kind: str, name: str) -> Any:
    amounts = resources.get(kind)
    return amounts.get(name) if isinstance(amounts, dict) else None


def requests_are_within_limits(job: FP8RLJob) -> Iterator[Fault]:
    """A request of the orchestrator is at most its limit; Kubernetes refuses the pod otherwise."""
    resources = job.spec.orchestrator.resources
    for name, request in resources.requests.items():
        limit = resources.limits.get(name)
        wanted, most = quantity(request), quantity(limit)
        if wanted is not None and most is not None and wanted > most:
            yield Fault(
                f"spec.orchestrator.resources.requests.{name}",
                request,
                f"is over limits.{name} {limit}",
                "raise the limit, or lower the request",
            )


def claims_can_be_made(job: FP8RLJob) -> Iterator[Fault]:
    """A claim made for the job has a size over 0, and ReadWriteOncePod alone where it is asked for."""
    for path, claim in _claims(job):
        if not quantity(claim.storage):
            yield Fault(f"{path}.storage", claim.storage, "is no size over 0", "write a size such as 100Gi")
        if "ReadWriteOncePod" in claim.access_modes and len(claim.access_modes) > 1:
            yield Fault(
                f"{path}.accessModes",
                ", ".join(claim.access_modes),
                "has ReadWriteOncePod beside other modes, which Kubernetes refuses",
                "keep ReadWriteOncePod alone, or leave it out",
            )


def _claims(job: FP8RLJob) -> Iterator[tuple[str, VolumeClaimTemplate]]:
    spec = job.spec
    if spec.trainer.checkpoint.volume_claim_template is not None:
        yield "spec.trainer.checkpoint.volumeClaimTemplate", spec.trainer.checkpoint.volume_claim_template
    volumes = (
        ("spec.orchestrator.volume", spec.orchestrator.volume),
        ("spec.releases.volume", spec.releases.volume if spec.releases else None),
    )
    for path, volume in volumes:
        if volume is not None and volume.volume_claim_template is not None:
            yield f"{path}.volumeClaimTemplate", volume.volume_claim_template


CLAIMS = (
    "spec.trainer.checkpoint.volumeClaimTemplate",
    "spec.orchestrator.volume.volumeClaimTemplate",
    "spec.releases.volume.volumeClaimTemplate",
)
FREE_JSON = "the resources in a template: free JSON has no CEL type"

CHECKS = (
    Check(
        memory_holds_the_state,
        reads=(
            "spec.model.parameters",
            "spec.trainer.offload",
            "spec.trainer.backend",
            "spec.trainer.replicas",
            "spec.trainer.template",
        ),
        beyond_cel=FREE_JSON,
    ),
    Check(
        numa_pods_are_guaranteed,
        reads=(
            "spec.topology.numa",
            "spec.trainer.gpusPerReplica",
            "spec.trainer.template",
            "spec.inference.gpusPerReplica",
            "spec.inference.template",
        ),
        beyond_cel=FREE_JSON,
    ),
    Check(
        requests_are_within_limits,
        reads=("spec.orchestrator.resources",),
        cel=(
            Cel(
                "spec.orchestrator.resources",
                "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) ||"
                " quantity(self.requests[k]).compareTo(quantity(self.limits[k])) <= 0)",
                "a request is over its limit; raise the limit, or lower the request",
            ),
        ),
    ),
    Check(
        claims_can_be_made,
        reads=CLAIMS,
        cel=tuple(
            rule
            for claim in CLAIMS
            for rule in (
                Cel(
                    claim,
                    "quantity(self.storage).isGreaterThan(quantity('0'))",
                    "storage must be a size over 0, such as 100Gi",
                ),
                Cel(
                    claim,
                    "!('ReadWriteOncePod' in self.accessModes) || size(self.accessModes) == 1",
                    "accessModes: ReadWriteOncePod stands alone, or not at all",
                ),
            )
        ),
    ),
)
