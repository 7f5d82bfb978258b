"""DeepSeek V3: multi-head latent attention, the first layers dense, then experts beside shared ones.

Source: transformers `deepseek_v3`, vLLM `deepseek_v2.DeepseekV3ForCausalLM`: q_a_proj and kv_a_proj_with_mqa are one module
(`fused_qkv_a_proj`), whole on every rank. The engine holds the router in BF16 and computes its logits in fp32; the correction
bias is fp32. It keeps products of kv_b_proj (W_UK, W_UV) in BF16 beside its codes, made when weights are loaded. Layers from
`num_hidden_layers` on are for speculative decoding and never travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, decoder, need
from fp8rl_workers.weights.specs.glm4_moe import feed_forward_of


def latent_attention(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    """Queries, keys and values through their latents (q directly where `q_lora_rank` is null), and o_proj."""
    hidden, heads, latent = (
        need(config, "hidden_size"),
        need(config, "num_attention_heads"),
        need(config, "kv_lora_rank"),
    )
    nope, rope = need(config, "qk_nope_head_dim"), need(config, "qk_rope_head_dim")
    value, query = need(config, "v_head_dim"), config.get("q_lora_rank")
    fused = f"{prefix}.fused_qkv_a_proj" if query else ""
    bias = bool(config.get("attention_bias"))

    def linear(which: str, shape: tuple[int, int], split: str, unit: int, alias: str = "") -> TensorSpec:
        return TensorSpec(f"{prefix}.{which}.weight", shape, "attention", layer, split, unit, fused=alias)  # type: ignore[arg-type]

    found = []
    if query:
        found += [
            linear("q_a_proj", (query, hidden), "none", 1, fused),
            TensorSpec(f"{prefix}.q_a_layernorm.weight", (query,), "norm", layer),
            linear("q_b_proj", (heads * (nope + rope), query), "rows", nope + rope),
        ]
    else:
        found.append(linear("q_proj", (heads * (nope + rope), hidden), "rows", nope + rope))
    found += [
        linear("kv_a_proj_with_mqa", (latent + rope, hidden), "none", 1, fused),
        TensorSpec(f"{prefix}.kv_a_layernorm.weight", (latent,), "norm", layer),
        linear("kv_b_proj", (heads * (nope + value), latent), "rows", nope + value),
        linear("o_proj", (hidden, heads * value), "columns", value),
    ]
    biased = [("q_a_proj", query), ("kv_a_proj_with_mqa", latent + rope), ("o_proj", hidden)] if bias else []
    return found + [TensorSpec(f"{prefix}.{which}.bias", (rows,), "bias", layer) for which, rows in biased if rows]


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        mixer = latent_attention(f"{prefix}.self_attn", layer, config)
        return [*mixer, *feed_forward_of(f"{prefix}.mlp", layer, config, router="bfloat16")]

    return decoder(config, layer_tensors)


FAMILY = ModelFamily(
    "deepseek_v3",
    frozenset({"DeepseekV3ForCausalLM"}),
    frozenset({"deepseek_v3"}),
    tensors,
    skipped=r"model\.layers\.(?P<nextn>{layers})\.",
)
