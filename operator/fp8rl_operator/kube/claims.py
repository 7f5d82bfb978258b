"""Claims and storage classes that a job names, looked at before its pods are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8rl_operator import names
from fp8rl_operator.kube.api import FORBIDDEN, NOT_FOUND, Api, ApiError
from fp8rl_operator.kube.kinds import CLAIM, STORAGE_CLASS, Object
from fp8rl_operator.observed import Trouble
from fp8rl_operator.spec import FP8RLJob

SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
ONE_POD: Final = "ReadWriteOncePod"


@dataclass(frozen=True)
class Use:
    """A claim that the job names. `nodes`: how many nodes mount it at least; `pods`: how many pods do."""

    field: str
    claim: str
    role: str
    nodes: int
    pods: int


@dataclass(frozen=True)
class ClassUse:
    """A storage class that a claim template of the job names."""

    field: str
    name: str
    role: str


def claims_of(job: FP8RLJob) -> list[Use]:
    """Claims that the job names."""
    spec = job.spec
    trainers, engines = spec.trainer.replicas, spec.inference.replicas
    found: list[Use] = []
    if (claim := spec.trainer.checkpoint.claim_name) is not None:
        found.append(Use("spec.trainer.checkpoint.claimName", claim, names.TRAINER, trainers, trainers))
    if spec.orchestrator.volume is not None and (claim := spec.orchestrator.volume.claim_name) is not None:
        found.append(Use("spec.orchestrator.volume.claimName", claim, names.ORCHESTRATOR, 1, 1))
    source = spec.model.source
    if source is not None and source.pvc is not None:
        field, pods = "spec.model.source.pvc.claimName", trainers + engines + 1
        found.append(Use(field, source.pvc.claim_name, names.TRAINER, trainers, pods))
    if source is not None and source.hub is not None and source.hub.cache_claim_name is not None:
        field, pods = "spec.model.source.hub.cacheClaimName", trainers + engines + 1
        found.append(Use(field, source.hub.cache_claim_name, names.TRAINER, trainers, pods))
    data = spec.rollout.dataset.volume
    if data is not None and (claim := data.claim_name) is not None:
        found.append(Use("spec.rollout.dataset.volume.claimName", claim, names.ORCHESTRATOR, 1, 1))
    return found


def classes_of(job: FP8RLJob) -> list[ClassUse]:
    """Storage classes that the job's claim templates name."""
    spec = job.spec
    volume = spec.orchestrator.volume
    templates = (
        ("spec.trainer.checkpoint", names.TRAINER, spec.trainer.checkpoint.volume_claim_template),
        ("spec.orchestrator.volume", names.ORCHESTRATOR, None if volume is None else volume.volume_claim_template),
    )
    return [
        ClassUse(f"{field}.volumeClaimTemplate.storageClassName", template.storage_class_name, role)
        for field, role, template in templates
        if template is not None and template.storage_class_name
    ]


async def blocked(api: Api, job: FP8RLJob) -> Trouble | None:
    """The first claim or class that cannot serve the job, None where none is in the way.

    Raises:
        ClusterError: the API server does not answer.
    """
    for use in claims_of(job):
        if (words := wrong_claim(use, job, await found(api, use.claim, job.namespace))) is not None:
            return Trouble(use.role, names.VOLUME_NOT_BOUND, words)
    for asked in classes_of(job):
        if await missing_class(api, asked.name):
            words = f"{asked.field}: value {asked.name}: the cluster has no such StorageClass; name one that it has, or make it"
            return Trouble(asked.role, names.VOLUME_NOT_BOUND, words)
    return None


async def found(api: Api, claim: str, namespace: str) -> Object | None:
    """A claim; None if it is not there."""
    try:
        return await api.get(CLAIM, namespace, claim)
    except ApiError as error:
        if error.status == NOT_FOUND:
            return None
        raise


async def missing_class(api: Api, name: str) -> bool:
    """Whether a storage class is not there; False where the operator may not ask, as in a namespaced installation."""
    try:
        await api.get(STORAGE_CLASS, None, name)
    except ApiError as error:
        if error.status in {NOT_FOUND, FORBIDDEN}:
            return error.status == NOT_FOUND
        raise
    return False


def wrong_claim(use: Use, job: FP8RLJob, claim: Object | None) -> str | None:
    """What is wrong with a claim for this use, with the way out; None for nothing."""
    said = f"{use.field}: value {use.claim}: "
    if claim is None:
        return f"{said}namespace {job.namespace} has no such PersistentVolumeClaim; make it, or name one that is there"
    if (claim.get("status") or {}).get("phase") == "Lost":
        return f"{said}the PersistentVolumeClaim is Lost, its volume is gone; bind it again, or name another"
    modes = (claim.get("spec") or {}).get("accessModes") or []
    if SHARED & set(modes):
        return None
    text = f"{said}access mode {', '.join(modes)}"
    if use.nodes > 1:
        return f"{text} serves one node, trainer.replicas is {use.nodes}, a node each; name a claim with ReadWriteMany"
    if use.pods > 1 and modes == [ONE_POD]:
        return f"{text} serves one pod, {use.pods} pods mount it; name a claim with ReadWriteMany or ReadOnlyMany"
    return None
