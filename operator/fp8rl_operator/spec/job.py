"""The whole FP8RLJob: metadata, spec, status as it came."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from fp8rl_operator.names import API_VERSION, KIND, MANAGED_BY
from fp8rl_operator.spec.base import Label, Model, ObjectName
from fp8rl_operator.spec.model import ModelSpec
from fp8rl_operator.spec.pods import EnginePool, Orchestrator, Sampler
from fp8rl_operator.spec.precision import Precision
from fp8rl_operator.spec.rollout import Evaluation, Gate, Limits, Releases, Rollout
from fp8rl_operator.spec.running import FailurePolicy, Topology, WeightSync
from fp8rl_operator.spec.trainer import Trainer

Seconds = Annotated[int, Field(ge=1, le=31_536_000)]


class Metadata(Model):
    """What the operator reads of ObjectMeta; the rest of it is ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=253, description="Name of the job.", examples=["job"])
    namespace: str = Field("default", description="Namespace of the job and of all its children.")
    uid: str = Field("", description="UID; empty until the object is stored.")
    generation: int = Field(0, description="Generation of the spec.")
    labels: dict[str, str] = Field({}, description="Labels.")
    annotations: dict[str, str] = Field({}, description="Annotations.")
    creation_timestamp: str | None = Field(None, description="When it was created. RFC 3339.")
    deletion_timestamp: str | None = Field(None, description="Since when it is being deleted. RFC 3339.")


class JobSpec(Model):
    """What the user asks for. The operator never writes it."""

    suspend: bool = Field(
        default=False,
        description="The user's (or Kueue's) switch. true: the pods go, the state stays; false again: the job goes on.",
    )
    managed_by: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        MANAGED_BY,
        description="Controller of the job. Immutable. Any value but fp8rl.dev/operator: this operator keeps its hands off.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2_147_483_647,
        description="Drives sampling, order of the data, generated prompts and stochastic rounding.",
    )
    model: ModelSpec = Field(description="The base model.")
    precision: Precision = Field(
        default_factory=Precision, description="Number formats of trainer, wire, engines and KV cache."
    )
    trainer: Trainer = Field(description="The trainer.")
    orchestrator: Orchestrator = Field(default_factory=Orchestrator, description="The orchestrator.")
    inference: EnginePool = Field(default_factory=EnginePool, description="The engines that sample for training.")
    rollout: Rollout = Field(description="What is sampled and how much of it makes one step.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Held-out evaluation.")
    weight_sync: WeightSync = Field(default_factory=WeightSync, description="How weights get to the engines.")
    topology: Topology = Field(default_factory=Topology, description="Which nodes, and where on them.")
    limits: Limits = Field(default_factory=Limits, description="Limits of a healthy run.")
    releases: Releases | None = Field(None, description="Whole FP8 checkpoints for sampler pools. Unset: none.")
    samplers: tuple[Sampler, ...] = Field(
        (),
        max_length=8,
        description="Pools of engines that load releases. Need releases.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    gate: Gate = Field(default_factory=Gate, description="Measurement of the precision before the run trusts it.")
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy, description="What a failure costs.")
    active_deadline_seconds: Seconds | None = Field(
        None,
        description="Longest life of the job, suspended time not counted; then Failed, DeadlineExceeded. Unset: none.",
    )
    pre_running_deadline_seconds: Seconds | None = Field(
        None,
        description="Longest time until the first step starts; then Failed, PreRunningDeadlineExceeded. Unset: none.",
    )
    stall_deadline_seconds: Seconds = Field(
        900, description="Longest time without a new step before condition Stalled is True. Unit: seconds."
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = Field(
        None, description="How long a finished job is kept before it is deleted. Unit: seconds. Unset: for ever."
    )
    cleanup_policy: Literal["keepNothing", "keepPods"] = Field(
        "keepNothing", description="Pods of a finished job: removed, or kept for a look."
    )
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of all pods. Unset: the cluster's default."
    )
    queue_name: Label | None = Field(None, description="Queue of Kueue (label kueue.x-k8s.io/queue-name). Unset: none.")
    network_policy: Literal["enabled", "disabled"] = Field(
        "enabled", description="NetworkPolicy that lets only the job's own pods, the operator and Prometheus in."
    )
    pod_disruption_budget: Literal["enabled", "disabled"] = Field(
        "enabled",
        description="PodDisruptionBudgets: trainer and orchestrator are not evicted, inference keeps minReplicas.",
    )


class FP8RLJob(Model):
    """A parsed job. `status` is what the object carried, as it came: `status.py` reads and writes it."""

    api_version: Literal["fp8rl.dev/v1alpha1"] = Field(description="Version of the API.", examples=[API_VERSION])
    kind: Literal["FP8RLJob"] = Field(description="Kind of the object.", examples=[KIND])
    metadata: Metadata = Field(description="Name, namespace, labels.", examples=[{"name": "job"}])
    spec: JobSpec = Field(description="What the user asks for.")
    status: dict[str, Any] = Field({}, description="What the operator reports.")

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the job and of all its children."""
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        """UID of the job, empty for one that is not stored."""
        return self.metadata.uid
