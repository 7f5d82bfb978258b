"""Llama: dense decoder. `head_dim` defaults to hidden_size / num_attention_heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, attention, decoder, feed_forward, need


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    hidden = need(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden // need(config, "num_attention_heads")

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        inner, bias = need(config, "intermediate_size"), bool(config.get("mlp_bias"))
        return [
            *attention(f"{prefix}.self_attn", layer, config, head_dim),
            *feed_forward(f"{prefix}.mlp", layer, hidden, inner, "dense_ffn", bias=bias),
        ]

    return decoder(config, layer_tensors)


FAMILY = ModelFamily("llama", frozenset({"LlamaForCausalLM"}), frozenset({"llama"}), tensors)
