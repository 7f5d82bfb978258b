"""GLM-4.5 (MoE): attention with biases on q, k and v, the first layers dense, then experts beside shared ones.

Source: transformers `glm4_moe`, vLLM `glm4_moe.Glm4MoeForCausalLM`, which keeps the router and its correction bias in fp32.
Layers from `num_hidden_layers` on are for speculative decoding and never travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import (
    Dtype,
    ModelFamily,
    TensorSpec,
    attention,
    decoder,
    feed_forward,
    need,
    routed_experts,
)


def sparse(prefix: str, layer: int, config: Mapping[str, Any], *, router: Dtype) -> list[TensorSpec]:
    """Router, its correction bias (fp32), experts, and the shared experts as one feed-forward; DeepSeek V3's too."""
    hidden, inner = need(config, "hidden_size"), need(config, "moe_intermediate_size")
    count = need(config, "n_routed_experts" if "n_routed_experts" in config else "num_local_experts")
    found = routed_experts(prefix, layer, hidden, inner, count, router=router)
    found.insert(1, TensorSpec(f"{prefix}.gate.e_score_correction_bias", (count,), "bias", layer, dtype="float32"))
    shared = config.get("n_shared_experts") or 0
    if shared:
        found += feed_forward(f"{prefix}.shared_experts", layer, hidden, shared * inner, "shared_expert")
    return found


def feed_forward_of(prefix: str, layer: int, config: Mapping[str, Any], *, router: Dtype) -> list[TensorSpec]:
    """Dense in the first `first_k_dense_replace` layers, sparse behind them."""
    if layer < (config.get("first_k_dense_replace") or 0):
        return feed_forward(prefix, layer, need(config, "hidden_size"), need(config, "intermediate_size"), "dense_ffn")
    return sparse(prefix, layer, config, router=router)


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    head_dim = config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        mixer = attention(f"{prefix}.self_attn", layer, config, head_dim, output_bias=False)
        if config.get("use_qk_norm"):
            mixer += [
                TensorSpec(f"{prefix}.self_attn.{which}.weight", (head_dim,), "norm", layer)
                for which in ("q_norm", "k_norm")
            ]
        return [*mixer, *feed_forward_of(f"{prefix}.mlp", layer, config, router="float32")]

    return decoder(config, layer_tensors)


FAMILY = ModelFamily(
    "glm4_moe",
    frozenset({"Glm4MoeForCausalLM"}),
    frozenset({"glm4_moe"}),
    tensors,
    skipped=r"model\.layers\.(?P<nextn>{layers})\.",
)
