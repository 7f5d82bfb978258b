"""The trainer: ranks that divide, offload, checkpoints, backend."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob

EXPERT_TENSOR = ("expert_tensor_parallel_size", "expert-tensor-parallel-size")


def parallelism_divides_the_gpus(job: FP8RLJob) -> Iterator[Fault]:
    """The product tensor * pipeline * context divides the world."""
    trainer, layout = job.spec.trainer, job.spec.trainer.parallelism
    world = trainer.replicas * trainer.gpus_per_replica
    if world == 0:
        return
    total = f"replicas {trainer.replicas} x gpusPerReplica {trainer.gpus_per_replica} = {world} GPUs"
    dense = layout.tensor * layout.pipeline * layout.context
    if world % dense:
        yield Fault(
            "spec.trainer.parallelism",
            f"tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}",
            f"{layout.tensor} x {layout.pipeline} x {layout.context} = {dense} does not divide {total}",
            f"choose a product that divides {world}, or replicas and gpusPerReplica that are a multiple of {dense}",
        )


def experts_divide_the_gpus(job: FP8RLJob) -> Iterator[Fault]:
    """What the experts take (expert tensor * expert * pipeline) divides the world."""
    trainer, layout = job.spec.trainer, job.spec.trainer.parallelism
    world = trainer.replicas * trainer.gpus_per_replica
    given = next((trainer.megatron_args[key] for key in EXPERT_TENSOR if key in trainer.megatron_args), None)
    expert_tensor = given if isinstance(given, int) and given > 0 else layout.tensor
    sparse = expert_tensor * layout.expert * layout.pipeline
    if layout.expert > 1 and world and world % sparse:
        yield Fault(
            "spec.trainer.parallelism.expert",
            layout.expert,
            f"expert tensor {expert_tensor} x expert {layout.expert} x pipeline {layout.pipeline} = {sparse} does not divide"
            f" replicas {trainer.replicas} x gpusPerReplica {trainer.gpus_per_replica} = {world} GPUs",
            f"choose an expert parallelism whose product divides {world}, or set megatronArgs.expert_tensor_parallel_size",
        )


def torch_is_one_process(job: FP8RLJob) -> Iterator[Fault]:
    """Backend torch is one process on at most one GPU."""
    trainer = job.spec.trainer
    if trainer.backend != "torch":
        return
    layout = trainer.parallelism
    counts = {
        "replicas": (trainer.replicas, 1),
        "gpusPerReplica": (trainer.gpus_per_replica, 1),
        "parallelism.tensor": (layout.tensor, 1),
        "parallelism.pipeline": (layout.pipeline, 1),
        "parallelism.context": (layout.context, 1),
        "parallelism.expert": (layout.expert, 1),
    }
    for field, (value, most) in counts.items():
        if value > most:
            yield Fault(
                f"spec.trainer.{field}",
                value,
                "backend torch is one process on at most one GPU",
                f"set it to {most}, or backend: megatron",
            )


def torch_has_no_megatron_args(job: FP8RLJob) -> Iterator[Fault]:
    """Backend torch takes no arguments of Megatron."""
    trainer = job.spec.trainer
    if trainer.backend == "torch" and trainer.megatron_args:
        yield Fault(
            "spec.trainer.megatronArgs",
            ", ".join(trainer.megatron_args),
            "backend torch has no Megatron",
            "remove it, or set backend: megatron",
        )


def megatron_has_gpus(job: FP8RLJob) -> Iterator[Fault]:
    """Megatron and Transformer Engine need a GPU."""
    trainer = job.spec.trainer
    if trainer.backend == "megatron" and trainer.gpus_per_replica == 0:
        yield Fault(
            "spec.trainer.gpusPerReplica",
            0,
            "backend megatron computes on GPUs",
            "set backend: torch, or gpusPerReplica of 1 or more",
        )


def full_offload_clips_nothing(job: FP8RLJob) -> Iterator[Fault]:
    """With offload full gradients go to the host one by one as they appear: their common norm is never known in time."""
    trainer = job.spec.trainer
    clip = trainer.optimizer.grad_clip
    if trainer.offload == "full" and clip is not None:
        yield Fault(
            "spec.trainer.optimizer.gradClip",
            clip,
            "offload full updates each parameter as soon as its gradient is on the host, before the norm of all gradients,"
            " which clipping divides by, is known",
            "remove gradClip (unset means none), or set offload: optimizer",
        )


def checkpoint_has_one_place(job: FP8RLJob) -> Iterator[Fault]:
    """Either claimName or volumeClaimTemplate, and the latter with one replica only."""
    trainer, checkpoint = job.spec.trainer, job.spec.trainer.checkpoint
    path = "spec.trainer.checkpoint.volumeClaimTemplate"
    template = checkpoint.volume_claim_template
    if template is None:
        return
    if checkpoint.claim_name is not None:
        yield Fault(
            path,
            template.storage,
            f"claimName {checkpoint.claim_name} is set too",
            "keep one of claimName, volumeClaimTemplate",
        )
    if trainer.replicas > 1:
        yield Fault(
            path,
            template.storage,
            f"makes one claim for each of {trainer.replicas} replicas, and the shards of a checkpoint need one place",
            "set claimName of a ReadWriteMany claim, or replicas: 1",
        )


AT = "spec.trainer"
GPUS = "self.replicas * self.gpusPerReplica"
DENSE = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context"

CHECKS = (
    Check(
        parallelism_divides_the_gpus,
        reads=("spec.trainer.parallelism", "spec.trainer.replicas", "spec.trainer.gpusPerReplica"),
        cel=(
            Cel(
                AT,
                f"({GPUS}) % ({DENSE}) == 0",
                "parallelism: tensor x pipeline x context must divide replicas x gpusPerReplica",
                filled="parallelism: tensor x pipeline x context = %d does not divide replicas x gpusPerReplica = %d GPUs",
                values=(DENSE, GPUS),
            ),
        ),
    ),
    Check(
        experts_divide_the_gpus,
        reads=(
            "spec.trainer.parallelism",
            "spec.trainer.replicas",
            "spec.trainer.gpusPerReplica",
            "spec.trainer.megatronArgs",
        ),
        beyond_cel="the experts' tensor parallelism may stand in megatronArgs: free JSON has no CEL type",
    ),
    Check(
        torch_is_one_process,
        reads=(
            "spec.trainer.backend",
            "spec.trainer.replicas",
            "spec.trainer.gpusPerReplica",
            "spec.trainer.parallelism",
        ),
        cel=(
            Cel(
                AT,
                "self.backend != 'torch' || (self.replicas == 1 && self.gpusPerReplica <= 1 && self.parallelism.expert == 1 &&"
                f" {DENSE} == 1)",
                "backend torch is one process on at most one GPU: replicas and every parallelism must be 1",
            ),
        ),
    ),
    Check(
        torch_has_no_megatron_args,
        reads=("spec.trainer.backend", "spec.trainer.megatronArgs"),
        beyond_cel="whether megatronArgs is empty: free JSON has no CEL type",
    ),
    Check(
        megatron_has_gpus,
        reads=("spec.trainer.backend", "spec.trainer.gpusPerReplica"),
        cel=(
            Cel(
                AT,
                "self.backend != 'megatron' || self.gpusPerReplica > 0",
                "gpusPerReplica: backend megatron computes on GPUs; set backend: torch, or gpusPerReplica of 1 or more",
            ),
        ),
    ),
    Check(
        full_offload_clips_nothing,
        reads=("spec.trainer.offload", "spec.trainer.optimizer.gradClip"),
        cel=(
            Cel(
                AT,
                "!has(self.offload) || self.offload != 'full' || !has(self.optimizer.gradClip)",
                "optimizer.gradClip: offload full never holds all gradients at once, and clipping needs their norm; remove"
                " gradClip, or set offload: optimizer",
            ),
        ),
    ),
    Check(
        checkpoint_has_one_place,
        reads=("spec.trainer.checkpoint", "spec.trainer.replicas"),
        cel=(
            Cel(
                f"{AT}.checkpoint",
                "!has(self.claimName) || !has(self.volumeClaimTemplate)",
                "keep one of claimName, volumeClaimTemplate",
            ),
            Cel(
                AT,
                "!has(self.checkpoint.volumeClaimTemplate) || self.replicas == 1",
                "checkpoint.volumeClaimTemplate makes a claim for each replica, and the shards of a checkpoint need one place;"
                " set claimName of a ReadWriteMany claim, or replicas: 1",
            ),
        ),
    ),
)
