"""Qwen3-MoE: Qwen3's attention; a layer is sparse when `(layer + 1) % decoder_sparse_step == 0` and not in `mlp_only_layers`.

A checkpoint holds `mlp.gate` (the router) and `mlp.experts.<e>.{gate,up,down}_proj`; the engine holds all experts of a layer
in one module `mlp.experts`. `head_dim` defaults to hidden_size / num_attention_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, decoder, feed_forward, need, routed_experts
from fp8rl_workers.weights.specs.qwen3 import attention_with_norms


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a sparse layer; transformers 5 writes `num_local_experts`."""
    return need(config, "num_experts" if "num_experts" in config else "num_local_experts")


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer has experts."""
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def experts(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    """The router and every expert's three projections."""
    hidden, inner = need(config, "hidden_size"), need(config, "moe_intermediate_size")
    return routed_experts(prefix, layer, hidden, inner, num_experts(config))


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    hidden = need(config, "hidden_size")
    head_dim = hidden // need(config, "num_attention_heads")

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        mlp = f"{prefix}.mlp"
        attention = attention_with_norms(f"{prefix}.self_attn", layer, config, head_dim)
        if is_sparse(config, layer):
            return [*attention, *experts(mlp, layer, config)]
        inner = need(config, "intermediate_size")
        return [*attention, *feed_forward(mlp, layer, hidden, inner, "dense_ffn")]

    return decoder(config, layer_tensors)


FAMILY = ModelFamily("qwen3_moe", frozenset({"Qwen3MoeForCausalLM"}), frozenset({"qwen3_moe"}), tensors)
