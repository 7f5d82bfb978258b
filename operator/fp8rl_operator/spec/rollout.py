"""`spec.rollout`, `evaluation`, `limits`, `releases` and `gate`: what is sampled, learned and watched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8rl_operator.spec.base import Decimal, FreeObject, Model, ObjectName, Text
from fp8rl_operator.spec.pods import Volume

EnvironmentId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")]
PositiveSteps = Annotated[int, Field(ge=1, le=10_000_000)]


class Environment(Model):
    """An environment by its id."""

    id: EnvironmentId = Field(
        description="Builtin environment: reverse-text, arithmetic or calculator; or one that an optional extra brings.",
        examples=["reverse-text"],
    )
    args: FreeObject = Field({}, description="Arguments of the environment, as it defines them.")


class DatasetVolume(Model):
    """A file of JSON lines, one example each."""

    claim_name: ObjectName | None = Field(None, description="PersistentVolumeClaim that holds the file.")
    host_path: Text | None = Field(None, description="Folder of the node, or of this machine, that holds the file.")
    path: Text = Field(
        description="The file: relative to the claim or the folder; without them a path that the process sees.",
        examples=["train.jsonl"],
    )


class DatasetHub(Model):
    """Files of JSON lines in a data set's repository of a Hugging Face hub, fetched once by an init container."""

    repository: Text = Field(description="Repository, `owner/name`.", examples=["owner/prompts"])
    subset: Text | None = Field(
        None, description="Folder of the repository that holds the split. Unset: the one that does."
    )
    revision: Text | None = Field(None, description="Branch, tag or commit. Unset: its default branch.")
    secret_name: ObjectName | None = Field(None, description="Secret whose key `token` holds the access token.")


class DatasetBuiltin(Model):
    """The prompts that a builtin environment generates from the seed."""

    name: EnvironmentId = Field(description="Environment whose generator makes the prompts.", examples=["reverse-text"])


class Dataset(Model):
    """Where prompts come from: at most one of volume, hub and builtin; none: the environment's own generator."""

    volume: DatasetVolume | None = Field(None, description="A file of JSON lines.")
    hub: DatasetHub | None = Field(None, description="A data set of a hub.")
    builtin: DatasetBuiltin | None = Field(None, description="A builtin generator.")
    split: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        "train", description="Split to train on. Of a hub: the file `<split>.jsonl`, or its shards `<split>-*.jsonl`."
    )
    shuffle: bool = Field(
        default=True, description="Shuffle each pass, seeded by spec.seed. The cursor is part of the checkpoint."
    )


class Loss(Model):
    """The policy's loss. r is the trainer's minus the engine's log-probability of a token, A the advantage."""

    name: Literal["ipo", "dppo", "grpo"] = Field(
        "ipo",
        description="ipo: tokens with |p_trainer - p_inference| over ipoThreshold are masked. dppo: masked by the sign of A"
        " (dppoMaskLow, dppoMaskHigh). grpo: clipped ratio to the engine that sampled (grpoClipLow,"
        " grpoClipHigh), truncated at tisCap where it is not clipped.",
    )
    ipo_threshold: Decimal = Field(0.1, gt=0, le=1, description="ipo: largest difference of probabilities.")
    dppo_mask_low: Decimal = Field(0.2, gt=0, le=1, description="dppo: largest fall of a probability where A <= 0.")
    dppo_mask_high: Decimal = Field(0.2, gt=0, le=1, description="dppo: largest rise of a probability where A > 0.")
    grpo_clip_low: Decimal = Field(0.2, gt=0, lt=1, description="grpo: the ratio is clipped below 1 - this.")
    grpo_clip_high: Decimal = Field(0.2, gt=0, le=10, description="grpo: the ratio is clipped above 1 + this.")
    tis_cap: Decimal = Field(2.0, ge=1, le=1000, description="Cap of the truncated importance weight min(e^r, cap).")
    adv_tau: Decimal = Field(1.0, ge=0, le=1000, description="Factor of the advantage term.")
    kl_tau: Decimal = Field(0.001, ge=0, le=1000, description="Factor of the squared log ratio.")
    kl_to_reference: Decimal = Field(
        0.0,
        ge=0,
        le=1000,
        description="Factor of the KL to the base model. Over 0 the trainer holds a second copy of it.",
    )


class Rollout(Model):
    """What is sampled and how much of it makes one step."""

    environment: Environment = Field(description="The task.")
    dataset: Dataset = Field(default_factory=Dataset, description="Where prompts come from.")
    steps: PositiveSteps = Field(description="Optimizer steps of the whole job.", examples=[100])
    batch_size: int = Field(
        ge=1, le=1_048_576, description="Samples of one step; a multiple of groupSize.", examples=[64]
    )
    group_size: int = Field(
        ge=2,
        le=4096,
        description="Samples of one prompt; advantages are relative to their mean, so at least 2.",
        examples=[8],
    )
    max_tokens: int = Field(ge=1, le=10_000_000, description="Longest completion. Unit: tokens.", examples=[512])
    temperature: Decimal = Field(
        1.0, gt=0, le=10, description="Sampling temperature; log-probabilities are taken at the same."
    )
    top_p: Decimal = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 samples from the whole distribution.")
    stop: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        (), max_length=16, description="Strings that end a completion."
    )
    max_off_policy_steps: int = Field(
        8,
        ge=0,
        le=10_000,
        description="Oldest sample that a step may use: (step - 1) - step of the oldest version that produced any of its"
        " tokens, counted when it is consumed. Unit: steps. 0: strictly on policy, engines wait for the trainer.",
    )
    advantage: Literal["mean", "std"] = Field(
        "std",
        description="Advantage of a sample in its group: reward minus the group's mean (mean), divided by the group's"
        " standard deviation (std).",
    )
    loss: Loss = Field(default_factory=Loss, description="The loss.")


class Evaluation(Model):
    """Held-out evaluation with greedy sampling."""

    every_steps: int = Field(
        0, ge=0, le=10_000_000, description="Steps between evaluations. 0: before the first and after the last only."
    )
    environment: Environment | None = Field(
        None, description="The task. Unset: the rollout's environment, held-out part."
    )
    samples: int = Field(64, ge=1, le=1_048_576, description="Prompts of one evaluation.")


class MismatchLimit(Model):
    """Limits of the mismatch KL, mean(e^r - r - 1) over a step's tokens."""

    warn: Decimal = Field(0.015, gt=0, le=100, description="Above it condition MismatchWithinLimit is False.")
    stop: Decimal | None = Field(
        None, gt=0, le=100, description="Above it the job ends as Failed, reason MismatchLimit. Unset: never."
    )


class Limits(Model):
    """Limits of a healthy run. All but mismatchKL.stop only warn."""

    mismatch_kl: MismatchLimit = Field(
        default_factory=MismatchLimit, alias="mismatchKL", description="Mismatch KL of a step."
    )
    logprob_diff_p99: Decimal = Field(0.5, gt=0, le=100, description="99th percentile of |r|. Unit: nat.")
    tis_truncated: Decimal = Field(
        0.02, ge=0, le=1, description="Share of tokens whose importance weight is truncated."
    )
    ratio_deviation: Decimal = Field(0.1, gt=0, le=100, description="|mean importance ratio - 1| of a step.")


class Releases(Model):
    """Whole FP8 checkpoints (per channel, compressed-tensors) that the trainer publishes for sampler pools."""

    every_steps: PositiveSteps = Field(description="Steps between releases.", examples=[10])
    keep: int = Field(2, ge=1, le=1000, description="How many releases are kept, the newest ones.")
    volume: Volume = Field(
        description="Where they are written; ReadWriteMany when samplers run on other nodes.",
        examples=[{"claimName": "releases"}],
    )


class GateCriteria(Model):
    """What the precision may cost against BF16 on the same prompts. Unset criteria do not judge."""

    logprob_diff_mean: Decimal | None = Field(None, gt=0, le=100, description="Mean of |r|. Unit: nat.")
    logprob_diff_p50: Decimal | None = Field(None, gt=0, le=100, description="Median of |r|. Unit: nat.")
    logprob_diff_p90: Decimal | None = Field(None, gt=0, le=100, description="90th percentile of |r|. Unit: nat.")
    logprob_diff_p99: Decimal = Field(0.5, gt=0, le=100, description="99th percentile of |r|. Unit: nat.")
    tis_truncated: Decimal = Field(
        0.02, ge=0, le=1, description="Share of tokens whose importance weight is truncated."
    )
    speedup: Decimal | None = Field(None, gt=0, le=100, description="Tokens per second against BF16, at least.")


class Gate(Model):
    """Measures the precision against BF16 on one prompt set before the run trusts it."""

    required: bool = Field(default=False, description="Measure before the first step, and act on the outcome.")
    prompts: int = Field(64, ge=1, le=65536, description="Prompts of the measurement, from the held-out part.")
    criteria: GateCriteria = Field(default_factory=GateCriteria, description="What is judged.")
    on_failure: Literal["stop", "bf16"] = Field(
        "stop",
        description="stop: the job ends as Failed, reason GateFailed. bf16: it goes on with recipe and wire bf16.",
    )
