"""Pools of engines: inference and samplers, and how weights reach them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.pods import EnginePool, Volume
from fp8rl_workers.config import TRAINER_PORT
from fp8rl_workers.inference.owned_args import canonical, owned


def pools(job: FP8RLJob) -> list[tuple[str, EnginePool]]:
    """(field path, pool) of inference and of each sampler."""
    samplers = [(f"spec.samplers[{i}]", sampler) for i, sampler in enumerate(job.spec.samplers)]
    return [("spec.inference", job.spec.inference), *samplers]


def engine_args_are_the_users(job: FP8RLJob) -> Iterator[Fault]:
    """Arguments that the job owns are refused by name: the engine's own list, so that both refuse the same."""
    for path, pool in pools(job):
        for key, field in owned(pool.engine_args).items():
            yield Fault(
                f"{path}.engineArgs.{key}",
                pool.engine_args[key],
                f"{canonical(key)} is set by {field}",
                "remove it from engineArgs",
            )


def enough_replicas(job: FP8RLJob) -> Iterator[Fault]:
    """A pool can reach its minReplicas: at most replicas."""
    for path, pool in pools(job):
        if pool.min_replicas > pool.replicas:
            yield Fault(
                f"{path}.minReplicas",
                pool.min_replicas,
                f"is over replicas {pool.replicas}: the job would wait for ever",
                f"set at most {pool.replicas}, or more replicas",
            )


def engine_ranks_are_its_gpus(job: FP8RLJob) -> Iterator[Fault]:
    """One rank for each GPU of an engine; expert parallelism over all of them or none."""
    for path, pool in pools(job):
        tensor, expert, gpus = pool.parallelism.tensor, pool.parallelism.expert, pool.gpus_per_replica
        ranks = max(gpus, 1)
        if tensor != ranks:
            have = f"{gpus} GPUs" if gpus != 1 else "1 GPU"
            how = f"leaves {ranks - tensor} of them idle" if tensor < ranks else f"needs {tensor}"
            yield Fault(
                f"{path}.parallelism.tensor",
                tensor,
                f"gpusPerReplica gives an engine {have}, and tensor {tensor} {how}",
                f"set tensor: {ranks}, or gpusPerReplica: {tensor} (more engines are more replicas)",
            )
        if expert not in (1, tensor):
            yield Fault(
                f"{path}.parallelism.expert",
                expert,
                f"vLLM spreads experts over all {tensor} tensor-parallel ranks of an engine or over none",
                f"set expert: {tensor}, or 1" if tensor > 1 else "set expert: 1, or raise tensor and gpusPerReplica",
            )


def samplers_have_releases(job: FP8RLJob) -> Iterator[Fault]:
    """Samplers load releases."""
    samplers = job.spec.samplers
    if samplers and job.spec.releases is None:
        yield Fault(
            "spec.samplers",
            ", ".join(sampler.name for sampler in samplers),
            "samplers load whole releases from a volume, and spec.releases publishes none",
            "set spec.releases {everySteps, volume}, or add replicas to spec.inference instead",
        )


def sampler_names_are_unique(job: FP8RLJob) -> Iterator[Fault]:
    """The name of a pool is part of its pods' names."""
    for name, count in Counter(sampler.name for sampler in job.spec.samplers).items():
        if count > 1:
            yield Fault("spec.samplers", name, f"{count} pools have this name", "give each pool a name of its own")


def volumes_are_one_thing(job: FP8RLJob) -> Iterator[Fault]:
    """A volume is exactly one of claimName, hostPath, volumeClaimTemplate."""
    volumes: list[tuple[str, Volume | None]] = [("spec.orchestrator.volume", job.spec.orchestrator.volume)]
    if job.spec.releases is not None:
        volumes.append(("spec.releases.volume", job.spec.releases.volume))
    for path, volume in volumes:
        given = [] if volume is None else [k for k, v in volume.model_dump(by_alias=True).items() if v is not None]
        if volume is not None and len(given) != 1:
            yield Fault(
                path,
                ", ".join(given) or None,
                f"has {len(given)} places and needs exactly one",
                "keep one of claimName, hostPath, volumeClaimTemplate",
            )


def sync_runs_on_the_devices(job: FP8RLJob) -> Iterator[Fault]:
    """Transports and casts that need a GPU, and a port that is free."""
    sync, trainer, inference = job.spec.weight_sync, job.spec.trainer, job.spec.inference
    without = {"trainer": trainer.gpus_per_replica, "inference": inference.gpus_per_replica}
    cpus = [f"{role}.gpusPerReplica" for role, gpus in without.items() if gpus == 0]
    if sync.transport == "nccl" and cpus:
        yield Fault(
            "spec.weightSync.transport",
            sync.transport,
            f"moves memory of GPUs, and {' and '.join(cpus)} {'are' if len(cpus) > 1 else 'is'} 0",
            "set transport: auto, gloo or ipc",
        )
    if sync.cast_backend in ("triton", "te") and trainer.gpus_per_replica == 0:
        yield Fault(
            "spec.weightSync.castBackend",
            sync.cast_backend,
            "runs on a GPU, and trainer.gpusPerReplica is 0",
            "set castBackend: auto, or torch (the same bits)",
        )
    if sync.port == TRAINER_PORT:
        yield Fault(
            "spec.weightSync.port", sync.port, "is the port of the trainer's own API", "use another, such as 29500"
        )


AT = "spec"
POOLS = ("spec.inference", "spec.samplers[]")
ONE_PLACE = Cel(
    "spec.orchestrator.volume",
    "[has(self.claimName), has(self.hostPath), has(self.volumeClaimTemplate)].filter(x, x).size() == 1",
    "needs exactly one of claimName, hostPath, volumeClaimTemplate",
)

CHECKS = (
    Check(
        engine_args_are_the_users,
        reads=("spec.inference.engineArgs", "spec.samplers"),
        beyond_cel="names in engineArgs: free JSON has no CEL type",
    ),
    Check(
        enough_replicas,
        reads=("spec.inference.replicas", "spec.inference.minReplicas", "spec.samplers"),
        cel=tuple(
            Cel(
                pool,
                "self.minReplicas <= self.replicas",
                "minReplicas must be at most replicas",
                filled="minReplicas %d is over replicas %d: the job would wait for ever",
                values=("self.minReplicas", "self.replicas"),
            )
            for pool in POOLS
        ),
    ),
    Check(
        engine_ranks_are_its_gpus,
        reads=("spec.inference.parallelism", "spec.inference.gpusPerReplica", "spec.samplers"),
        cel=tuple(
            rule
            for pool in POOLS
            for rule in (
                Cel(
                    pool,
                    "self.parallelism.tensor == (self.gpusPerReplica > 1 ? self.gpusPerReplica : 1)",
                    "parallelism.tensor must equal gpusPerReplica (more engines are more replicas)",
                    filled="parallelism.tensor %d is not gpusPerReplica %d: an engine has one rank for each GPU; more engines are more"
                    " replicas",
                    values=("self.parallelism.tensor", "self.gpusPerReplica"),
                ),
                Cel(
                    pool,
                    "self.parallelism.expert in [1, self.parallelism.tensor]",
                    "parallelism.expert must be 1 or equal parallelism.tensor",
                    filled="parallelism.expert %d must be 1 or parallelism.tensor %d",
                    values=("self.parallelism.expert", "self.parallelism.tensor"),
                ),
            )
        ),
    ),
    Check(
        samplers_have_releases,
        reads=("spec.releases",),
        cel=(
            Cel(
                AT,
                "!has(self.samplers) || size(self.samplers) == 0 || has(self.releases)",
                "samplers load releases, and spec.releases publishes none; set releases {everySteps, volume}, or add replicas to"
                " inference instead",
            ),
        ),
    ),
    Check(
        sampler_names_are_unique,
        reads=("spec.samplers",),
        by_schema="x-kubernetes-list-type: map, keyed by name",
    ),
    Check(
        volumes_are_one_thing,
        reads=("spec.orchestrator.volume", "spec.releases"),
        cel=(ONE_PLACE, Cel("spec.releases.volume", ONE_PLACE.rule, ONE_PLACE.message)),
    ),
    Check(
        sync_runs_on_the_devices,
        reads=(
            "spec.weightSync.transport",
            "spec.weightSync.castBackend",
            "spec.weightSync.port",
            "spec.trainer.gpusPerReplica",
            "spec.inference.gpusPerReplica",
        ),
        cel=(
            Cel(
                AT,
                "self.weightSync.transport != 'nccl' || (self.trainer.gpusPerReplica > 0 &&"
                " self.inference.gpusPerReplica > 0)",
                "weightSync.transport: nccl moves memory of GPUs, and a role has none; set transport: auto, gloo or ipc",
            ),
            Cel(
                AT,
                "!(self.weightSync.castBackend in ['triton', 'te']) || self.trainer.gpusPerReplica > 0",
                "weightSync.castBackend: triton and te run on a GPU, and trainer.gpusPerReplica is 0; set castBackend: auto",
            ),
            Cel(
                "spec.weightSync",
                f"self.port != {TRAINER_PORT}",
                f"port: {TRAINER_PORT} is the port of the trainer's own API; use another, such as 29500",
            ),
        ),
    ),
)
