"""What a step needs of a device's memory: the estimate made before the start, the measured peak, and what is said when it runs out.

The estimate of the torch backend, P parameters of which T are trained, h hidden, a = heads · head size, k = key-value heads · head
size, i intermediate (of a mixture of experts: of the experts that a token goes to), L layers, V vocabulary, N tokens of a
micro-batch:

    parameters  2 P       masters  4 P       reference  2 P with rollout.loss.klToReference
    optimizer   8 T for adamw, 4 T for signsgd
    gradients   4 T accumulated, and beside them the larger of 4 T (a micro-batch's, or what adamw needs to step) and
                2 T with the activations of a backward pass:
    activations L · N · 2 (6 h + 2 a + 2 k + 4 i) + N · V · 18     BF16 layers; logits BF16, three fp32 copies and their gradient
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8rl_workers.config import TrainerConfig
from fp8rl_workers.errors import OutOfMemoryError

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by part; see this module's formulas."""

    parameters: int
    masters: int
    reference: int
    optimizer: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        """`12.3 GiB = parameters 1.0 + masters 2.0 + ...`, parts that are nothing left out."""
        parts = [f"{name} {gib(value)}" for name, value in vars(self).items() if value]
        return f"{gib(self.total)} GiB = {' + '.join(parts)}"


def estimate(num_parameters: int, num_trained: int, model: Mapping[str, Any], config: TrainerConfig) -> MemoryEstimate:
    """The estimate for one rank of the torch backend. `model`: its config.json."""
    activations = activation_bytes(model, config.tokens_per_micro_batch)
    in_backward = 2 * num_trained + activations > 4 * num_trained
    return MemoryEstimate(
        parameters=2 * num_parameters,
        masters=4 * num_parameters,
        reference=2 * num_parameters if config.loss.kl_to_reference > 0 else 0,
        optimizer=(8 if config.optimizer.name == "adamw" else 4) * num_trained,
        gradients=(6 if in_backward else 8) * num_trained,
        activations=activations if in_backward else 0,
    )


def activation_bytes(model: Mapping[str, Any], tokens: int) -> int:
    """What the forward pass of a micro-batch keeps for its backward pass."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_size = model.get("head_dim") or hidden // heads
    key_values = model.get("num_key_value_heads") or heads
    experts = model.get("num_experts_per_tok")
    intermediate = experts * model["moe_intermediate_size"] if experts else model["intermediate_size"]
    layer = 2 * (6 * hidden + 2 * heads * head_size + 2 * key_values * head_size + 4 * intermediate)
    return int(tokens * (model["num_hidden_layers"] * layer + 18 * model["vocab_size"]))


def gib(size: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{size / GIB:.1f}"


def peak_memory_bytes() -> float:
    """Peak of the device's memory, of the process's resident memory on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out; torch has a class for that on devices, a text only on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(
    when: str, error: BaseException, config: TrainerConfig, expected: MemoryEstimate | None
) -> OutOfMemoryError:
    """What to say when memory has run out. `when`: the step, or what was done instead; `expected`: None before the model is known."""
    estimated = "" if expected is None else f", estimated before the start {expected}"
    return OutOfMemoryError(
        f"rank 0, {when}: out of memory, peak {gib(peak_memory_bytes())} GiB{estimated} ({str(error).partition(chr(10))[0]}); "
        f"lower trainer.tokensPerMicroBatch ({config.tokens_per_micro_batch}), double trainer.parallelism.context (halves the "
        "tokens per rank), or set trainer.offload"
    )
