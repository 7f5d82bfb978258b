"""`spec.weightSync`, `topology` and `failurePolicy`: how the job runs on its machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8rl_operator.spec.base import LABEL_KEY, LabelValue, Model, StringMap

GpuProduct = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]


class WeightSync(Model):
    """How weights get from the trainer to the engines, on every step."""

    transport: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        "auto",
        description="How bytes travel. ipc: engines read the trainer's own memory, on one machine and in one network namespace. auto: ipc where trainer and engines share a card, else gloo.",
    )
    mode: Literal["auto", "shadow", "inPlace", "reload"] = Field(
        "auto",
        description="shadow: engines generate while they receive into a second copy of the weights. inPlace: no second copy,"
        " generation stops meanwhile. reload: vLLM's own loader. auto: shadow where it fits.",
    )
    kv_on_commit: Literal["keep", "recompute"] = Field(
        "keep", description="KV cache of running requests at a new version: keep it, or preempt and recompute them."
    )
    cast_backend: Literal["auto", "triton", "te", "torch"] = Field(
        "auto", description="What casts to FP8. All give the same bits; torch is the reference and runs anywhere."
    )
    bucket_bytes: int = Field(
        268_435_456, ge=1_048_576, le=8_589_934_592, description="Size of one packed bucket on the wire. Unit: bytes."
    )
    timeout_seconds: int = Field(
        60,
        ge=1,
        le=3600,
        description="Longest wait of any phase of a sync; a member that misses it is fenced. Unit: seconds.",
    )
    port: int = Field(29500, ge=1024, le=65535, description="Port of the epoch's store, on the trainer's first pod.")


class Toleration(Model):
    """One toleration, as in a PodSpec."""

    key: Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY)] | None = Field(
        None, description="Key of the taint. Unset: any, with operator Exists."
    )
    operator: Literal["Exists", "Equal"] | None = Field(
        None, description="Exists: any value. Equal: this value. Unset: Equal."
    )
    value: LabelValue | None = Field(None, description="Value of the taint. Not with operator Exists.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint. Unset: any."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=31_536_000)] | None = Field(
        None, description="How long a NoExecute taint is tolerated. Unit: seconds. Unset: for ever."
    )


class Topology(Model):
    """Which nodes, and where on them."""

    numa: Literal["required", "preferred", "none"] = Field(
        "preferred",
        description="Placing of GPUs, CPUs and memory on one NUMA node. required: pods with GPUs are Guaranteed (requests equal"
        " to limits, whole CPUs, 8 CPUs and 32Gi a GPU where the template says nothing), so that a kubelet with"
        " topologyManagerPolicy restricted or single-numa-node aligns them or refuses them; a node that refuses three times is"
        " left out for this job. preferred: a rank binds itself where it can. none: only what offload full asks for.",
    )
    gpu_product: tuple[GpuProduct, ...] = Field(
        (),
        max_length=16,
        description="Allowed values of the node label nvidia.com/gpu.product, such as NVIDIA-H200. Empty: any. The"
        " nodeSelector of a role's template may pick one of them for that role.",
    )
    node_selector: StringMap = Field({}, description="Labels that the nodes of all roles must have.")
    tolerations: tuple[Toleration, ...] = Field((), max_length=32, description="Tolerations of all roles.")


class FailurePolicy(Model):
    """What a failure costs."""

    max_restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="New attempts, of the trainer or of the whole job, over the job's whole life, before it is Failed; and starts"
        " of one container again and again without a finished step in between. Engines that the job can spare (shrink, with"
        " minReplicas others ready) are started again for ever.",
    )
    backoff_seconds: int = Field(
        10,
        ge=0,
        le=3600,
        description="Wait before the first restart, doubled by each further one up to 3600. Unit: seconds.",
    )
    replica_loss: Literal["shrink", "restart"] = Field(
        "shrink",
        description="An engine is lost. shrink: go on without it while minReplicas remain. restart: a new attempt of the whole job.",
    )
