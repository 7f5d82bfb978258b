"""The estimate of a step's memory, and what is said when memory has run out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import make_config, make_folder, make_pod, make_samples, make_trainer

from fp8rl_workers.metrics import TRAINER_METRICS, WorkerMetrics
from fp8rl_workers.trainer import service as module
from fp8rl_workers.trainer.memory import MemoryEstimate, activation_bytes, estimate, is_out_of_memory, out_of_memory

MODEL = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}
LAYER = 2 * (6 * 8 + 2 * 8 + 2 * 4 + 4 * 16)


def test_the_estimate_is_the_sum_of_its_formulas() -> None:
    activations = 10 * (3 * LAYER + 18 * 100)
    assert activation_bytes(MODEL, 10) == activations
    small = estimate(1000, 900, MODEL, make_config(tokens_per_micro_batch=10))
    assert small == MemoryEstimate(2000, 4000, 0, 7200, 4 * 900 + 2 * 900, activations)
    optimizer = {"name": "signsgd", "learning_rate": 1.0}
    config = make_config(tokens_per_micro_batch=1, optimizer=optimizer, loss={"kl_to_reference": 0.1})
    large = estimate(1_000_000, 1_000_000, MODEL, config)
    assert large == MemoryEstimate(2_000_000, 4_000_000, 2_000_000, 4_000_000, 8_000_000, 0)
    assert large.total == 20_000_000


def test_a_mixture_of_experts_keeps_the_experts_that_a_token_goes_to() -> None:
    moe = MODEL | {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert activation_bytes(moe, 10) == activation_bytes(MODEL, 10)


def test_the_message_has_rank_step_peak_estimate_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr("fp8rl_workers.trainer.memory.peak_memory_bytes", lambda: 79.25 * gib)
    expected = MemoryEstimate(2 * gib, 4 * gib, 0, 8 * gib, 6 * gib, 50 * gib)
    config = make_config(tokens_per_micro_batch=8192)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nstack")
    assert str(out_of_memory("step 7", error, config, expected)) == (
        "rank 0, step 7: out of memory, peak 79.2 GiB, estimated before the start 70.0 GiB = parameters 2.0 + masters 4.0 + "
        "optimizer 8.0 + gradients 6.0 + activations 50.0 (CUDA out of memory. Tried to allocate 2.00 GiB.); "
        "lower trainer.tokensPerMicroBatch (8192), double trainer.parallelism.context (halves the tokens per rank), "
        "or set trainer.offload"
    )


def test_memory_that_runs_out_is_told_from_other_faults() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_each_step_shows_the_estimate_beside_the_measured_peak() -> None:
    trainer = make_trainer()
    metrics = trainer.train(1, make_samples(4))
    assert metrics["estimated_memory_bytes"] == float(trainer.expected.total)
    assert metrics["peak_memory_bytes"] > 0


async def test_a_model_that_does_not_fit_while_it_is_loaded_ends_in_the_same_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "load", exhaust)
    config = make_config(make_folder(tmp_path / "model"))
    service = module.TrainerService(config, make_pod(tmp_path), WorkerMetrics(TRAINER_METRICS))
    await asyncio.wait_for(service.start(), 60)
    state = service.state()
    assert (state.phase, state.reason) == ("failed", "TrainerOutOfMemory")
    assert state.message.startswith("rank 0, loading the model: out of memory, peak ")
    service.close()
