"""Qwen3.5-MoE: Qwen3.5's layers with experts and one gated shared expert in each.

Source: transformers `qwen3_5_moe` (names as saved: each expert's own projections), vLLM
`qwen3_5.Qwen3_5MoeForConditionalGeneration`. Router and shared-expert gate stay BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, feed_forward, need
from fp8rl_workers.weights.specs.qwen3_5 import ENGINE_PREFIXES, family_tensors
from fp8rl_workers.weights.specs.qwen3_moe import experts


def _sparse(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    hidden, shared = need(config, "hidden_size"), need(config, "shared_expert_intermediate_size")
    return [
        *experts(prefix, layer, config),
        *feed_forward(f"{prefix}.shared_expert", layer, hidden, shared, "shared_expert"),
        TensorSpec(f"{prefix}.shared_expert_gate.weight", (1, hidden), "shared_gate", layer),
    ]


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    return family_tensors(config, _sparse)


FAMILY = ModelFamily(
    "qwen3_5_moe",
    frozenset({"Qwen3_5MoeForConditionalGeneration"}),
    frozenset({"qwen3_5_moe"}),
    tensors,
    engine_prefixes=ENGINE_PREFIXES,
    skipped=r"mtp\.",
)
