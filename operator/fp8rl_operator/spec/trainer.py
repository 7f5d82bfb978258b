"""`spec.trainer`: backend, layout, optimizer, offload and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8rl_operator.spec.base import Decimal, FreeObject, Model, ObjectName
from fp8rl_operator.spec.pods import PodTemplate, VolumeClaimTemplate

Ranks = Annotated[int, Field(ge=1, le=4096)]


class TrainerParallelism(Model):
    """Layout of the trainer's ranks. Data parallelism is what remains: world / (tensor * pipeline * context)."""

    tensor: Ranks = Field(1, description="Tensor-parallel ranks.")
    pipeline: Ranks = Field(1, description="Pipeline stages.")
    context: Ranks = Field(1, description="Context-parallel ranks (a sequence is split over them).")
    expert: Ranks = Field(
        1, description="Expert-parallel ranks, taken from the data-parallel and context-parallel ones."
    )


class Optimizer(Model):
    """The optimizer and its schedule."""

    name: Literal["adamw", "signsgd"] = Field("adamw", description="Optimizer.")
    learning_rate: Decimal = Field(
        ge=0, le=10, description="Peak learning rate. 0 trains nothing (a control run).", examples=["1e-6"]
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up: constant, or down to 0 at the last step, linearly or as a cosine."
    )
    warmup_steps: int = Field(0, ge=0, le=10_000_000, description="Linear warm-up from 0. Unit: steps.")
    betas: tuple[Annotated[Decimal, Field(ge=0, lt=1)], ...] = Field(
        (0.9, 0.95),
        min_length=2,
        max_length=2,
        description="Decay of the first and the second moment (signsgd uses the first).",
    )
    weight_decay: Decimal = Field(0.0, ge=0, le=10, description="Decoupled weight decay.")
    grad_clip: Decimal | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Largest norm of the whole gradient. Unset: no clipping, for any value of offload; there is no default.",
    )


class Checkpoint(Model):
    """Checkpoints of the trainer and of the orchestrator's state; one atomic unit."""

    every_steps: int = Field(
        20, ge=0, le=1_000_000, description="Steps between checkpoints; a failure repeats at most one fewer. 0: none."
    )
    keep: int = Field(2, ge=1, le=1000, description="How many checkpoints are kept, the newest ones.")
    claim_name: ObjectName | None = Field(
        None, description="An existing PersistentVolumeClaim for them; ReadWriteMany with more than one replica."
    )
    volume_claim_template: VolumeClaimTemplate | None = Field(
        None,
        description="A claim made for the job. One replica only: each pod of a StatefulSet gets a claim of its own, and a"
        " sharded checkpoint needs one place. Neither: an emptyDir in a cluster, the run folder on one machine.",
    )


class Trainer(Model):
    """The trainer: one process per GPU, or one on the CPU."""

    backend: Literal["megatron", "torch"] = Field(
        "megatron",
        description="megatron: Megatron-Core and Transformer Engine on GPUs. torch: plain PyTorch and transformers, one"
        " process, with or without a GPU; FP8 recipes compute with the dequantized codes.",
    )
    replicas: int = Field(1, ge=1, le=1024, description="Pods of the trainer. Unit: nodes.")
    gpus_per_replica: int = Field(
        8, ge=0, le=64, description="GPUs of one pod. 0: on the CPU, backend torch only; recipe auto then means bf16."
    )
    parallelism: TrainerParallelism = Field(default_factory=TrainerParallelism, description="Layout of the ranks.")
    optimizer: Optimizer = Field(description="The optimizer and its schedule.")
    tokens_per_micro_batch: int = Field(
        8192,
        ge=1,
        le=16_777_216,
        description="Packed tokens of one micro-batch on one data-parallel rank. Unit: tokens. The last one is padded to what"
        " the recipe's kernels need.",
    )
    offload: Literal["none", "optimizer", "full"] | None = Field(
        None,
        description="What lives in host memory. none: nothing, activations included. optimizer: moments (8 bytes a local"
        " parameter). full: fp32 masters, moments and gradients (16 bytes); each rank is then bound to its GPU's NUMA node,"
        " and gradClip must be unset. Unset: optimizer with backend megatron, none with torch. Of the state each pod holds its"
        " share; with model.parameters its memory request is computed (8Gi a rank beside it) and a template that asks for less is"
        " refused.",
    )
    freeze_moe_router: bool = Field(default=True, description="Leave the routers of a mixture of experts as they are.")
    compile: bool = Field(
        default=False, description="torch.compile, region by region. Off: it raised the mismatch KL 30-fold elsewhere."
    )
    recompile_limit: int = Field(
        64, ge=1, le=65536, description="Recompilations of one compiled region before it runs eagerly."
    )
    megatron_args: FreeObject = Field(
        {},
        description="Megatron-Core arguments by name, passed through; what stands here wins over what the operator derives.",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    template: PodTemplate = Field(default_factory=PodTemplate, description="Overrides of the trainer's pods.")

    @property
    def offloaded(self) -> Literal["none", "optimizer", "full"]:
        """What lives in host memory, the backend's default filled in."""
        return self.offload or ("optimizer" if self.backend == "megatron" else "none")
