"""Records that several roles share: pod template overrides, volumes, resources, a pool of engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8rl_operator.spec.base import (
    AnnotationMap,
    FreeObject,
    Label,
    Model,
    ObjectName,
    Quantity,
    QuantityMap,
    StringMap,
    Text,
)


class TemplateMetadata(Model):
    """Labels and annotations that are added to the role's pods."""

    labels: StringMap = Field(
        {}, description="Labels to add. Those under fp8rl.dev/ and app.kubernetes.io/ are the operator's."
    )
    annotations: AnnotationMap = Field({}, description="Annotations to add.")


class PodTemplate(Model):
    """Overrides of the role's pods, merged over what the operator builds (strategic merge: containers by name)."""

    metadata: TemplateMetadata = Field(
        default_factory=TemplateMetadata, description="Labels and annotations of the pods."
    )
    spec: FreeObject = Field(
        {},
        description="Any part of a PodSpec: image and resources of container `main`, nodeSelector, tolerations, volumes, env."
        " The template wins over the operator, the job's own ports, config and token excepted.",
    )


class VolumeClaimTemplate(Model):
    """A PersistentVolumeClaim that is made for the job and removed with it."""

    storage: Quantity = Field(
        description="Size of the volume. Unit: bytes, as a quantity such as 100Gi.", examples=["100Gi"]
    )
    storage_class_name: ObjectName | None = Field(None, description="StorageClass. Unset: the cluster's default.")
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"], ...] = Field(
        ("ReadWriteOnce",), min_length=1, max_length=3, description="Access modes of the claim."
    )


class Volume(Model):
    """A place for files: exactly one of the fields."""

    claim_name: ObjectName | None = Field(None, description="An existing PersistentVolumeClaim of the job's namespace.")
    host_path: Text | None = Field(
        None,
        description="A folder of the node, or of this machine. In a cluster only in namespaces that the operator's settings"
        " allow.",
    )
    volume_claim_template: VolumeClaimTemplate | None = Field(None, description="A claim that is made for this job.")


class Resources(Model):
    """Resources of a container."""

    requests: QuantityMap = Field({}, description="What the scheduler reserves, by resource name.")
    limits: QuantityMap = Field({}, description="What the container may use at most, by resource name.")


class Orchestrator(Model):
    """The orchestrator: one pod without a GPU that samples, scores, builds batches and conducts every weight sync."""

    resources: Resources = Field(default_factory=Resources, description="Resources of its container.")
    volume: Volume | None = Field(
        None,
        description="Volume for its state (recorded decisions of syncs, rollout dumps). Unset: an emptyDir in a cluster, the"
        " run folder on one machine. Resuming needs only the trainer's checkpoint. A hostPath must be there and be writable"
        " for user 10001 (`install -d -o 10001 -g 10001 FOLDER` on each node): Kubernetes would make it for root.",
    )
    template: PodTemplate = Field(default_factory=PodTemplate, description="Overrides of its pod.")


class PoolParallelism(Model):
    """How one engine is spread over its GPUs. Data parallelism is replicas."""

    tensor: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Tensor-parallel ranks of one engine.")
    expert: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Expert-parallel ranks: 1, or the same as tensor (each rank then holds its experts only)."
    )


class EnginePool(Model):
    """A pool of equal vLLM engines."""

    replicas: int = Field(1, ge=1, le=1024, description="Engines in the pool, each a pod. Also the data parallelism.")
    min_replicas: int = Field(
        1,
        ge=1,
        le=1024,
        description="Engines that must have started before the first step, and below which the job waits. With"
        " failurePolicy.replicaLoss: restart the loss of any engine is a new attempt.",
    )
    gpus_per_replica: int = Field(
        1, ge=0, le=64, description="GPUs of one engine. 0: the engine runs on the CPU, which needs vLLM's CPU build."
    )
    parallelism: PoolParallelism = Field(
        default_factory=PoolParallelism, description="How one engine is spread over its GPUs."
    )
    max_in_flight: int = Field(64, ge=1, le=65536, description="Most requests at a time in one engine. Unit: requests.")
    engine_args: FreeObject = Field(
        {},
        description="vLLM engine arguments by name (max-num-seqs: 256). Those that the job owns are refused:"
        " quantization, kv-cache-dtype, hf-overrides, load-format, logprobs-mode, tensor-parallel-size, middleware,"
        " weight-transfer-config and their like.",
    )
    template: PodTemplate = Field(default_factory=PodTemplate, description="Overrides of the engines' pods.")


class Sampler(EnginePool):
    """A pool of engines that loads whole FP8 releases from a volume instead of taking part in weight syncs."""

    name: Label = Field(
        max_length=32, description="Name of the pool, unique in the job; part of its pods' names.", examples=["a"]
    )
    follow: Annotated[str, Field(max_length=20, pattern=r"^(current|[1-9][0-9]*)$")] = Field(
        "current", description="Which release it serves: current (the newest complete one), or one version's number."
    )
    feed_training: bool = Field(
        default=False,
        description="Let its samples enter training, aged by their release's version. They are dropped like any other when"
        " older than rollout.maxOffPolicySteps.",
    )
