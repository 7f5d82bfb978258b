"""What the operator hands to each worker: one JSON file per role, written by `fp8rl_operator.manifests`, read once at start.

Nothing that changes while a job runs stands here (epoch, ranks, versions, addresses of others): a change would restart
pods. Those travel over the control APIs (`protocol`). Imports no torch: the operator imports this module.

Environment of every worker process (downward API in a cluster, set by the local cluster on one machine):
`FP8RL_CONFIG` path of the role's JSON, `FP8RL_TOKEN_FILE` path of the control token, `FP8RL_POD_NAME`, `FP8RL_POD_UID`,
`FP8RL_POD_IP` (the address to bind to), `FP8RL_ATTEMPT` (restarts of the job so far), `FP8RL_STATE_DIR` (the role's volume).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from fp8rl_workers.errors import InvalidInputError

TRAINER_PORT = 8100
ORCHESTRATOR_PORT = 8200
ENGINE_PORT = 8000
STORE_PORT = 29500

Recipe = Literal["auto", "blockwise", "mxfp8", "bf16"]
Wire = Literal["auto", "blockwise", "mxfp8", "channel", "bf16"]
ScaleFormat = Literal["auto", "fp32", "pow2"]


class Record(BaseModel):
    """Base of every JSON record: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PrecisionConfig(Record):
    """The precision as asked for; `auto` is resolved by the trainer (`protocol.ResolvedPrecision`)."""

    recipe: Recipe = "auto"
    wire: Wire = "auto"
    quantize_at: Literal["trainer", "engine"] = "trainer"
    scale_format: ScaleFormat = "auto"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scope: Literal["linear", "ffn"] = "linear"
    ignored_layers: list[str] = []
    allow_mismatch: bool = False
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    first_last_layers_bf16: int = 0


class WeightSyncConfig(Record):
    """How weights travel. Sizes in bytes, times in seconds."""

    transport: Literal["auto", "nccl", "ipc", "gloo"] = "auto"
    mode: Literal["auto", "shadow", "inPlace", "reload"] = "auto"
    kv_on_commit: Literal["keep", "recompute"] = "keep"
    cast_backend: Literal["auto", "triton", "te", "torch"] = "auto"
    bucket_bytes: int = 256 << 20
    timeout_seconds: float = 60.0
    port: int = STORE_PORT


class LossConfig(Record):
    """Loss of the policy; formulas in `fp8rl_workers.trainer.loss`."""

    name: Literal["ipo", "dppo", "grpo"] = "ipo"
    ipo_threshold: float = 0.1
    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    grpo_clip_low: float = 0.2
    grpo_clip_high: float = 0.2
    tis_cap: float = 2.0
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
    kl_to_reference: float = 0.0


class OptimizerConfig(Record):
    """`grad_clip: None` clips nothing."""

    name: Literal["adamw", "signsgd"] = "adamw"
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float | None = None


class CheckpointConfig(Record):
    """A checkpoint every `every_steps` steps (0: none) in `<state dir>/checkpoints`, the newest `keep` of them kept."""

    every_steps: int = 0
    keep: int = 2


class LimitsConfig(Record):
    """Limits of a healthy run; `stop` ends the job with its reason."""

    mismatch_kl_warn: float = 0.015
    mismatch_kl_stop: float | None = None
    logprob_diff_p99: float = 0.5
    tis_truncated: float = 0.02
    ratio_deviation: float = 0.1


class JobConfig(Record):
    """What every role knows about its job."""

    name: str
    namespace: str
    uid: str
    seed: int = 0
    model_path: str = Field(description="Folder with the Hugging Face files of the base model, as the process sees it.")
    trust_remote_code: bool = False
    chat_template: str | None = None
    precision: PrecisionConfig = PrecisionConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    temperature: float = 1.0
    top_p: float = 1.0

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the role's JSON file.

        Raises:
            pydantic.ValidationError: a field is unknown, missing or out of range.
        """
        return cls.model_validate_json(path.read_bytes())


class TrainerConfig(JobConfig):
    """Config of the trainer's ranks."""

    backend: Literal["torch", "megatron"] = "torch"
    replicas: int = 1
    gpus_per_replica: int = 0
    parallelism: dict[str, int] = {}
    engine_tensor_parallel: int = Field(default=1, description="Kernel floors hold for the engines' local shards.")
    engine_expert_parallel: int = 1
    optimizer: OptimizerConfig
    steps: int
    tokens_per_micro_batch: int = 8192
    offload: Literal["none", "optimizer", "full"] = "none"
    freeze_moe_router: bool = True
    compile: bool = False
    recompile_limit: int = 64
    megatron_args: dict[str, Any] = {}
    fp8_param: bool = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    loss: LossConfig = LossConfig()


class EngineConfig(JobConfig):
    """Config of one pool of engines."""

    gpus_per_replica: int = 0
    tensor_parallel: int = 1
    expert_parallel: int = 1
    max_model_len: int | None = None
    max_in_flight: int = 64
    engine_args: dict[str, Any] = {}
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Arithmetic beside FP8 kernels; float32 is for exact comparisons on a CPU."
    )


class EnvironmentConfig(Record):
    """An environment by its id, with its own arguments."""

    id: str
    args: dict[str, Any] = {}


class DatasetConfig(Record):
    """Where prompts come from: the environment's own generator (`builtin`), or a file of JSON lines."""

    builtin: str | None = None
    path: str | None = None
    split: str = "train"
    shuffle: bool = True


class EvaluationConfig(Record):
    """Held-out greedy evaluation every `every_steps` steps (0: only before and after), over `samples` prompts."""

    every_steps: int = 0
    samples: int = 64
    environment: EnvironmentConfig | None = None


class OrchestratorConfig(JobConfig):
    """Config of the orchestrator. How many engines there are, and how many it needs, says the group document: both may change while the job runs."""

    environment: EnvironmentConfig
    dataset: DatasetConfig = DatasetConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    steps: int
    batch_size: int = Field(description="Samples per step; a multiple of group_size.")
    group_size: int
    max_tokens: int
    max_model_len: int | None = None
    stop: list[str] = []
    max_off_policy_steps: int = 8
    advantage: Literal["mean", "std"] = Field(
        default="std", description="Reward minus the group's mean, or that divided by its standard deviation."
    )
    max_in_flight: int = 64
    limits: LimitsConfig = LimitsConfig()


@dataclass(frozen=True)
class PodEnvironment:
    """What a worker's process learns from its environment."""

    config: Path
    token: str
    pod_name: str
    pod_uid: str
    pod_ip: str
    attempt: int
    state_dir: Path

    @classmethod
    def read(cls, environ: dict[str, str] | None = None) -> PodEnvironment:
        """Read the variables named in this module's docstring.

        Raises:
            KeyError: a variable is missing.
            InvalidInputError: the token's file is empty; every caller would have the right token.
        """
        env = dict(os.environ) if environ is None else environ
        token = Path(env["FP8RL_TOKEN_FILE"]).read_text().strip()
        if not token:
            raise InvalidInputError(
                f"FP8RL_TOKEN_FILE: {env['FP8RL_TOKEN_FILE']} is empty; write the job's control token to it"
            )
        return cls(
            config=Path(env["FP8RL_CONFIG"]),
            token=token,
            pod_name=env["FP8RL_POD_NAME"],
            pod_uid=env["FP8RL_POD_UID"],
            pod_ip=env["FP8RL_POD_IP"],
            attempt=int(env.get("FP8RL_ATTEMPT", "0")),
            state_dir=Path(env["FP8RL_STATE_DIR"]),
        )
