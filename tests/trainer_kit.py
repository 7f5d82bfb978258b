"""Small models, configs and batches for the trainer's tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8rl_workers.config import PodEnvironment, TrainerConfig
from fp8rl_workers.protocol import ResolvedPrecision, Sample, StepResult
from fp8rl_workers.trainer.checkpoint import Meta, identity
from fp8rl_workers.trainer.loop import TorchTrainer
from fp8rl_workers.trainer.precision import Device, resolve_precision

VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def make_module(seed: int = 0, *, moe: bool = False, **shape: Any) -> nn.Module:
    """A random Qwen3 (or Qwen3-MoE), fp32."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SHAPE | MOE | shape) if moe else Qwen3Config(**SHAPE | shape)
    module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return module


def model_config(module: nn.Module) -> dict[str, Any]:
    """The module's `config.json`."""
    name = type(module).__name__
    return json.loads(module.config.to_json_string(use_diff=False)) | {"architectures": [name]}  # type: ignore[union-attr, operator]


def make_folder(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """A model's folder with weights and a tokenizer of single letters."""
    make_module(seed, **shape).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    vocabulary = {chr(33 + i): i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "!"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def make_config(model_path: Path | str = "/model", **changes: Any) -> TrainerConfig:
    """A trainer's config; nested records may be given as dictionaries."""
    fields: dict[str, Any] = {
        "name": "job",
        "namespace": "team",
        "uid": "job-uid",
        "model_path": str(model_path),
        "optimizer": {"learning_rate": 1e-3, "grad_clip": 1.0},
        "steps": 10,
        "tokens_per_micro_batch": 256,
        "precision": {"recipe": "blockwise"},
    }
    return TrainerConfig.model_validate(fields | changes)


def make_pod(state_dir: Path, attempt: int = 0, ip: str = "127.32.0.1") -> PodEnvironment:
    """The trainer's pod."""
    return PodEnvironment(
        config=state_dir / "config.json",
        token="token",
        pod_name="trainer-0",
        pod_uid="uid-0",
        pod_ip=ip,
        attempt=attempt,
        state_dir=state_dir,
    )


def make_sample(seed: int = 0, prompt: int = 4, completion: int = 6, advantage: float = 1.0) -> Sample:
    """A sample of one turn whose engine log-probabilities are near those of a random model."""
    rng = random.Random(seed)
    length = prompt + completion
    mask = [0] * prompt + [1] * completion
    return Sample(
        tokens=[rng.randrange(VOCABULARY) for _ in range(length)],
        loss_mask=mask,
        logprobs=[-4.0 - rng.random() / 2 if flag else 0.0 for flag in mask],
        advantage=advantage,
        version_min=1,
        version_max=1,
    )


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Samples of different lengths, advantages of both signs."""
    rng = random.Random(seed)
    return [
        make_sample(seed * 1000 + i, rng.randint(2, 8), rng.randint(1, 12), rng.choice([-1.0, 0.5, 1.0]))
        for i in range(count)
    ]


def resolve_for(config: TrainerConfig, module: nn.Module) -> ResolvedPrecision:
    """What the precision becomes on a CPU."""
    return resolve_precision(config, model_config(module), Device("cpu", None))


def make_trainer(
    config: TrainerConfig | None = None, seed: int = 0, *, moe: bool = False, **shape: Any
) -> TorchTrainer:
    """A trainer of a random model."""
    module = make_module(seed, moe=moe, **shape)
    config = config or make_config()
    return TorchTrainer(module, None, model_config(module), config, resolve_for(config, module))


def make_meta(step: int, attempt: int = 0) -> Meta:
    """What stands beside a checkpoint of `step`."""
    return Meta(
        step=step,
        attempt=attempt,
        version=step + 1,
        identity=identity(make_config()),
        orchestrator={"cursor": step},
        result=StepResult(step=step, metrics={"loss": 0.5}),
    )
