"""What operator, orchestrator, trainer and engines say to each other: JSON over HTTP, bearer token of the job.

Who calls whom (all calls are idempotent; every record that belongs to a sync carries job UID, epoch and sync id, and a
receiver refuses others with 409):

    operator -> orchestrator   PUT  /v1/group            GroupDocument -> OrchestratorStatus, or 409 (see below)
                               GET  /v1/status           OrchestratorStatus
    orchestrator -> trainer    GET  /v1/state            TrainerState
                               PUT  /v1/epoch            Epoch -> EpochReport     joins the group, as host of its store
                               POST /v1/syncs            SyncRequest -> SyncReport   offer and prepare on all members
                               POST /v1/syncs/decision   Decision
                               POST /v1/steps            StepRequest -> StepResult
    orchestrator -> engine     GET  /fp8rl/v1/state      EngineState        (also while it waits for the precision)
                               GET  /fp8rl/v1/layers     {"quantized_layers": [HF module name, ...]}
                               PUT  /fp8rl/v1/resolved   ResolvedPrecision  (then vLLM boots)
                               PUT  /fp8rl/v1/epoch      Epoch
                               POST /fp8rl/v1/commit     Decision -> CommitReport
                               POST /fp8rl/v1/abort      Decision
                               POST /inference/v1/generate   vLLM's own route, token ids in and out
    anybody                    GET  /healthz /readyz /metrics (engines: /health, /fp8rl/v1/ready, /metrics)

A refusal is `{"error": <one sentence>, "reason": <CamelCase>}` with status 400 (input), 401 (token), 409 (stale or out of
order), 500 (broken), 503 (not yet). The 409 to a group document older than the one at hand has also that one's `attempt` and
`generation`, so that an operator whose clock stepped back can go on from there.

Engines answer `/inference/v1/generate` with `kv_transfer_params: {"fp8rl": {"spans": [[version, num_tokens], ...]}}`: which
weight version sampled each run of the completion's tokens, counted inside the engine's own loop.

On the epoch's store (a TCPStore that the trainer's rank 0 hosts, prefix `store_prefix(token, job_uid, epoch)`) trainer and engine
ranks exchange, for n = 0, 1, 2, ...: `offer/<n>` (the offer, JSON), `report/<n>/<rank>` (MemberReport, JSON), `abort/<n>`.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Literal

from pydantic import ConfigDict, Field

from fp8rl_workers.config import Record

EngineWire = Literal["blockwise", "mxfp8", "channel", "bf16"]


class Reply(Record):
    """What somebody reports: fields that its reader does not know yet are ignored, so that a newer worker and an older
    operator understand each other. What somebody asks for refuses them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class ResolvedPrecision(Reply):
    """What `auto` became, decided by the trainer from the device that it runs on and from the model's files."""

    recipe: Literal["blockwise", "mxfp8", "bf16"]
    wire: EngineWire
    scale_format: Literal["fp32", "pow2"]
    quantize_at: Literal["trainer", "engine"] = "trainer"
    scope: Literal["linear", "ffn"] = "linear"
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    quantized_layers: list[str] = Field(default=[], description="HF module names that are quantized, sorted.")
    ignored_layers: dict[str, str] = Field(default={}, description="HF module name to the reason why it stays BF16.")
    max_model_len: int | None = Field(
        default=None, description="Longest context in tokens; the orchestrator sets it where the job leaves it open."
    )


class Member(Record):
    """One process group member of an epoch. `ranks` in the epoch's world; trainer first."""

    pod: str
    uid: str
    role: Literal["trainer", "inference"]
    address: str
    ranks: list[int]
    transport: Literal["gloo", "nccl", "ipc"] = "gloo"


class Epoch(Record):
    """One membership of the weight-sync group. The old one's communicator is destroyed before this one is made."""

    job_uid: str
    attempt: int
    epoch: int
    world_size: int
    store_host: str
    store_port: int
    timeout_seconds: float
    members: list[Member]


class EpochReport(Reply):
    """Who has joined."""

    epoch: int
    joined: list[str] = Field(description="Pods whose ranks all joined.")
    missing: list[str] = Field(default=[], description="Pods that did not join within timeout_seconds.")


class SyncRequest(Record):
    """Offer `version` to all engine members of `epoch` (or to `only`) and wait until each is prepared or has failed."""

    job_uid: str
    epoch: int
    sync_id: int
    version: int
    timeout_seconds: float


class MemberReport(Reply):
    """What one engine rank says about one offer."""

    sync_id: int
    epoch: int
    rank: int
    state: Literal["prepared", "failed"]
    version: int
    digest: str = ""
    error: str = ""
    receive_seconds: float = 0.0
    load_seconds: float = 0.0


class SyncReport(Reply):
    """The prepare phase as the trainer saw it. `stages`: seconds of offer, cast, wire, seal, load; disjoint."""

    sync_id: int
    epoch: int
    version: int
    step: int
    attempt: int
    digest: str
    wire_bytes: int
    stages: dict[str, float]
    members: list[MemberReport]


class Decision(Record):
    """The recorded decision of a sync, or its abort."""

    job_uid: str
    epoch: int
    sync_id: int
    version: int
    step: int = 0
    attempt: int = 0
    digest: str = ""
    committed: bool


class CommitReport(Reply):
    """An engine's answer to a commit. `running`: output tokens that each running request had at the turn of version."""

    version: int
    digest: str
    running: dict[str, int] = {}
    paused_seconds: float = 0.0


class EngineState(Reply):
    """`version: None` means nothing is committed yet: not Ready."""

    phase: Literal["waiting", "booting", "serving"]
    pod: str
    uid: str
    release: str = ""
    world_size: int = 1
    epoch: int | None = Field(default=None, description="The epoch whose group all its ranks are in now.")
    epoch_told: int | None = Field(default=None, description="The newest epoch that it was asked to join.")
    version: int | None = None
    step: int | None = None
    digest: str | None = None
    prepared_sync_id: int | None = None
    prepared_version: int | None = None
    place: str = Field(default="", description="Where its ranks keep their weights (`places`).")
    load_path: Literal["none", "plan", "reload"] = "none"
    load_fallback: dict[str, str] = Field(default={}, description="Tensor to the reason why it needs vLLM's reload.")
    num_quantized: int = Field(default=0, description="Layers that it holds quantized; their names: /fp8rl/v1/layers.")
    audit_passed: bool = Field(
        default=True, description="Whether the quantized layers are those of the precision plan."
    )
    error: str = ""


class Sample(Record):
    """One sequence for the trainer. All lists have the length of `tokens`.

    `loss_mask[t]` is 1 where the engine sampled `tokens[t]`; there `logprobs[t]` is the engine's processed
    log-probability of that token at the job's temperature; elsewhere it is 0. `advantage` holds for the whole sequence.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantage: float
    version_min: int
    version_max: int
    age: int = 0


class StepRequest(Record):
    """Batch for `step` (1-based). `orchestrator` goes into the checkpoint of this step and comes back on resume."""

    job_uid: str
    attempt: int
    step: int
    samples: list[Sample]
    orchestrator: dict[str, Any] = {}


class StepResult(Reply):
    """One optimizer step. Metrics: see `fp8rl_workers.metrics.STEP_METRICS`."""

    step: int
    metrics: dict[str, float]
    checkpoint_error: str = ""


class TrainerState(Reply):
    """The trainer as it is. `step`: last finished step. `orchestrator`: what came with that step's batch, given back."""

    job_uid: str
    attempt: int
    phase: Literal["loading", "idle", "training", "failed"]
    step: int = 0
    resumed_step: int = 0
    version: int = Field(default=0, description="Highest version ever published, over all attempts.")
    pod: str = ""
    uid: str = ""
    place: str = Field(default="", description="Where it keeps its weights (`places`).")
    resolved: ResolvedPrecision | None = None
    orchestrator: dict[str, Any] = {}
    tokenizer_digest: str = ""
    last_result: StepResult | None = None
    reason: str = ""
    message: str = ""


class GroupMember(Record):
    """A pod that may belong to the weight-sync group."""

    pod: str
    uid: str
    role: Literal["trainer", "inference"]
    address: str
    world_size: int = 1


class GroupDocument(Record):
    """Who may belong, said by the operator. (`attempt`, `generation`) grows with every change; older documents are refused."""

    job_uid: str
    attempt: int
    generation: int
    members: list[GroupMember]
    min_replicas: int = Field(default=1, description="inference.minReplicas as it is now.")


class MemberStatus(Reply):
    """One member as the orchestrator sees it."""

    pod: str
    uid: str = ""
    role: Literal["trainer", "inference"]
    ranks: list[int] = []
    transport: str = Field(default="", description="Of the epoch that it is in; empty outside one.")
    version: int | None = None
    state: Literal["waiting", "booting", "joining", "serving", "fenced", "lost"]
    message: str = Field(default="", description="Its last error, one line; empty when nothing is wrong.")


class OrchestratorStatus(Reply):
    """Progress, for the operator's status and the progress bar. Times are Unix seconds.

    `group_attempt`, `group_generation`: of the group document that it holds, whose pods are `members`; 0 before the first.
    """

    job_uid: str
    attempt: int
    phase: Literal["waiting", "booting", "running", "complete", "failed"]
    step: int = 0
    steps: int = 0
    version: int = 0
    epoch: int = 0
    world_size: int = 0
    group_attempt: int = 0
    group_generation: int = 0
    members: list[MemberStatus] = []
    resolved: ResolvedPrecision | None = None
    waiting_for: str = ""
    last_step_time: float = 0.0
    engines_ready_time: float | None = None
    weights_in_sync: bool = False
    mismatch: dict[str, float] = {}
    off_policy: dict[str, float] = {}
    progress: dict[str, float] = {}
    warnings: list[str] = []
    reason: str = ""
    message: str = ""


class StepRecord(Record):
    """One line of `metrics.jsonl`. `metrics` holds the trainer's and the orchestrator's figures of the step."""

    kind: Literal["step", "sync", "evaluation"]
    time: float
    attempt: int
    step: int
    version: int
    metrics: dict[str, float]
    stages: dict[str, float] = {}


def store_prefix(token: str, job_uid: str, epoch: int) -> str:
    """Key prefix on the epoch's store: a hash of job and epoch, keyed with the job's control token.

    Ranks of two jobs or two epochs never meet, whatever address they were told or have by mistake: without the token nobody
    can name an epoch's keys.
    """
    name = hmac.new(token.encode(), f"{job_uid}/{epoch}".encode(), hashlib.sha256).hexdigest()
    return f"fp8rl/{name[:32]}"
