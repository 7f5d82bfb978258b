"""Qwen3 dense: Llama's shape with a norm on each query and key head. `head_dim` defaults to 128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, attention, decoder, feed_forward, need

DEFAULT_HEAD_DIM = 128


def attention_with_norms(
    prefix: str, layer: int, config: Mapping[str, Any], default_head_dim: int = DEFAULT_HEAD_DIM
) -> list[TensorSpec]:
    """The projections and the norms of query and key heads."""
    head_dim = config.get("head_dim") or default_head_dim
    norms = [TensorSpec(f"{prefix}.{which}.weight", (head_dim,), "norm", layer) for which in ("q_norm", "k_norm")]
    return [*attention(prefix, layer, config, head_dim), *norms]


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        hidden, inner = need(config, "hidden_size"), need(config, "intermediate_size")
        return [
            *attention_with_norms(f"{prefix}.self_attn", layer, config),
            *feed_forward(f"{prefix}.mlp", layer, hidden, inner, "dense_ffn"),
        ]

    return decoder(config, layer_tensors)


FAMILY = ModelFamily("qwen3", frozenset({"Qwen3ForCausalLM"}), frozenset({"qwen3"}), tensors)
