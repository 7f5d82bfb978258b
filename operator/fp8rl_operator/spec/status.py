"""Schema of the status subresource: what `kubectl explain fp8rljob.status` shows. `fp8rl_operator.status` fills it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fp8rl_operator.names import CONDITIONS
from fp8rl_operator.spec.base import Decimal, Model

Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(max_length=253)]
Message = Annotated[str, Field(max_length=32768)]
Layers = Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=4096)]
Uid = Annotated[str, Field(max_length=64)]
MAX_COUNTED = 128
MAX_UIDS = 4096


def listed_by(*keys: str) -> dict[str, Any]:
    """Schema of a list whose items are told apart by these fields, so that two appliers can own different items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Condition(Model):
    """One condition, as in metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)] = Field(
        description="Type of the condition. " + " ".join(f"{name}: {text}" for name, text in CONDITIONS.items())
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds. Unknown: not observed yet.")
    observed_generation: Count = Field(0, description="metadata.generation that it was computed from.")
    last_transition_time: Time = Field(description="When status last changed; not when reason or message did.")
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9_])?$")] = (
        Field(description="One CamelCase word for programs.")
    )
    message: Message = Field("", description="One sentence for people: what, why, and what to do.")


class MemberState(Model):
    """One member of the weight-sync group."""

    pod: Name = Field(description="Name of the pod.")
    role: Literal["trainer", "inference"] = Field(description="trainer sends, inference receives.")
    ranks: Annotated[tuple[Count, ...], Field(max_length=1024)] = Field((), description="Its ranks in the group.")
    transport: Annotated[str, Field(max_length=16)] | None = Field(
        None, description="How it gets the weights: nccl, ipc or gloo."
    )
    version: Count | None = Field(None, description="Version that it serves. Absent: none committed yet.")
    state: Literal["waiting", "booting", "joining", "serving", "fenced", "lost"] = Field(
        description="serving: takes requests. fenced: gets none until the current version has been sent to it again."
    )


class WeightSyncGroup(Model):
    """Who takes part in weight syncs, as the orchestrator reports it."""

    epoch: Count = Field(0, description="Number of the membership; a change makes a new one.")
    wire: Annotated[str, Field(max_length=16)] | None = Field(None, description="Format on the wire.")
    world_size: Count = Field(0, description="Ranks of the group, trainer included.")
    members: tuple[MemberState, ...] = Field(
        (), max_length=2048, description="Its members.", json_schema_extra=listed_by("pod")
    )


class RoleState(Model):
    """Pods of one role."""

    desired: Count = Field(0, description="Pods that should be.")
    ready: Count = Field(0, description="Pods that are Ready; an engine is with a committed version.")
    updated: Count = Field(0, description="Pods of the current attempt and revision.")
    restarts: Count = Field(0, description="Container restarts of these pods.")
    uids: Annotated[tuple[Uid, ...], Field(max_length=MAX_UIDS)] = Field(
        (), description="UIDs of the pods that run in this attempt; one that is missing later was lost."
    )
    restarts_before: Annotated[dict[str, Count], Field(max_length=MAX_COUNTED)] = Field(
        {},
        description="Container restarts by the pod's UID when the last step ended, of those that had any (the 128 highest);"
        " failurePolicy.maxRestarts counts from here.",
    )


class SamplerState(RoleState):
    """Pods of one sampler pool."""

    name: Name = Field(description="Name of the pool.")
    version: Count | None = Field(None, description="Release that it serves.")


class PrecisionState(Model):
    """What auto became, decided by the trainer on its own cards and from the model's files."""

    recipe: Annotated[str, Field(max_length=16)] = Field(description="Format that the trainer computes in.")
    wire: Annotated[str, Field(max_length=16)] = Field(description="Format of wire and engines.")
    scale_format: Annotated[str, Field(max_length=16)] | None = Field(None, description="Scales of blockwise FP8.")
    quantize_at: Annotated[str, Field(max_length=16)] | None = Field(None, description="Who quantizes.")
    quantized_layers: Count = Field(0, description="How many layers are quantized, equal on both sides.")
    ignored_layers: Layers = Field((), description="Layers that stay BF16, each with its reason and arithmetic.")


class MismatchState(Model):
    """Mismatch of trainer and engines at the newest step. r is the difference of log-probabilities of a token."""

    kl: Decimal | None = Field(None, description="mean(e^r - r - 1).")
    logprob_diff_p99: Decimal | None = Field(None, description="99th percentile of |r|. Unit: nat.")
    masked_ratio: Decimal | None = Field(None, description="Share of tokens that the loss masks.")


class OffPolicyState(Model):
    """Ages of the samples that steps used."""

    max: Count = Field(0, description="Oldest sample of the newest step. Unit: steps.")
    mean: Decimal | None = Field(None, description="Mean age at the newest step. Unit: steps.")
    dropped: Count = Field(0, description="Samples dropped so far, for any reason.")


class RewardState(Model):
    """Rewards."""

    mean: Decimal | None = Field(None, description="Mean reward of the samples of the newest step.")
    held_out: Decimal | None = Field(None, description="Mean reward of the last held-out greedy evaluation.")


class NodeState(Model):
    """A node whose kubelet refused pods of the job."""

    name: Name = Field(description="Name of the node.")
    refusals: Count = Field(0, description="How often it did, those of one back-off counted once.")
    excluded: bool = Field(
        default=False,
        description="Whether the job keeps away from it: after three refusals, until the job is suspended and resumed.",
    )
    reason: Annotated[str, Field(max_length=1024)] = Field(
        description="The kubelet's reason, such as TopologyAffinityError."
    )
    message: Annotated[str, Field(max_length=1024)] = Field("", description="The kubelet's words.")
    last_time: Time = Field(description="When it was last seen.")


class RefusalState(Model):
    """What kubelets refused, as far as the operator must remember it."""

    rounds: Count = Field(0, description="Back-offs in a row without a success; each doubles the wait, up to 300 s.")
    until: Time | None = Field(None, description="When pods are tried again.")
    roles: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=16)] = Field(
        (), description="Roles that get no new pods until then."
    )
    uids: Annotated[tuple[Uid, ...], Field(max_length=256)] = Field(
        (), description="Refused pods that were counted, the newest last."
    )
    kept_engines: Count = Field(0, description="Engines that run meanwhile.")
    engines_avoid: Annotated[tuple[Name, ...], Field(max_length=64)] = Field(
        (), description="Excluded nodes that the engines' pod template names; the others follow when no engine runs."
    )


class Failure(Model):
    """Why a new attempt began, or why none did."""

    reason: Annotated[str, Field(min_length=1, max_length=1024)] = Field(description="One CamelCase word for programs.")
    message: Message = Field("", description="The pod and its last words.")
    time: Time = Field(description="When it was seen.")
    attempt: Count | None = Field(None, description="The attempt that it ended.")


class JobStatus(Model):
    """What the operator reports. Progress at most every 15 s, conditions at once; what changes every step is a metric."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    attempt: Count = Field(
        0, description="Number of the trainer's current start; a lost trainer, a restarted job and a resume begin one."
    )
    fleet_attempt: Count = Field(
        0, description="Attempt in which engines and orchestrator were started; they outlive a lost trainer."
    )
    restarts: Count = Field(0, description="Attempts that failures have cost; failurePolicy.maxRestarts limits them.")
    attempt_time: Time | None = Field(None, description="When the current attempt's pods may start, backoff included.")
    last_failure: Failure | None = Field(None, description="The failure that cost the last attempt.")
    progress_time: Time | None = Field(
        None, description="When this status was last written; progress alone is written 15 s later at the earliest."
    )
    step: Count = Field(0, description="Last finished optimizer step.")
    version: Count = Field(0, description="Newest committed version of the weights; only grows, also over restarts.")
    start_time: Time | None = Field(None, description="When the first pods were made.")
    suspend_time: Time | None = Field(None, description="Since when the job is suspended.")
    suspended_seconds: Count = Field(
        0, description="How long it was suspended before, which no deadline counts. Unit: seconds."
    )
    completion_time: Time | None = Field(None, description="When the job became Complete or Failed.")
    last_step_time: Time | None = Field(
        None, description="When the last step ended; stallDeadlineSeconds counts from here."
    )
    weight_sync_group: WeightSyncGroup | None = Field(None, description="Who takes part in weight syncs.")
    trainer: RoleState | None = Field(None, description="Pods of the trainer.")
    inference: RoleState | None = Field(None, description="Pods of the engines.")
    orchestrator: RoleState | None = Field(None, description="The orchestrator's pod.")
    engines: Annotated[str, Field(max_length=16)] | None = Field(None, description="Ready and desired engines: 3/4.")
    applied: Annotated[dict[str, Annotated[str, Field(max_length=80)]], Field(max_length=256)] | None = Field(
        None,
        description="Fields of the spec that the running attempt was made from, other than those at their default, as JSON or, where"
        " that is long, as digest. A change begins a new attempt of the trainer (trainer.*) or of the whole job.",
    )
    nodes: tuple[NodeState, ...] = Field(
        (), max_length=64, description="Nodes that refused pods.", json_schema_extra=listed_by("name")
    )
    refusals: RefusalState | None = Field(None, description="Back-off after refusals of nodes.")
    samplers: tuple[SamplerState, ...] = Field(
        (), max_length=8, description="Pods of the sampler pools.", json_schema_extra=listed_by("name")
    )
    precision: PrecisionState | None = Field(None, description="What auto became.")
    mismatch: MismatchState | None = Field(None, description="Mismatch of trainer and engines.")
    off_policy: OffPolicyState | None = Field(None, description="Ages of samples.")
    reward: RewardState | None = Field(None, description="Rewards of the samples.")
    conditions: tuple[Condition, ...] = Field(
        (),
        max_length=32,
        description="Ready, Reconciling and Stalled as kstatus reads them, and the job's own.",
        json_schema_extra=listed_by("type"),
    )
