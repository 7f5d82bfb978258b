"""Qwen3.5 dense: three layers of gated delta net to one of gated attention, under a vision tower.

Source: transformers `qwen3_5` (names as saved), vLLM `qwen3_5.Qwen3_5ForConditionalGeneration`, the only class that it serves
the family with. The delta net's in_proj_qkv and in_proj_z are one module in the engine, in FP8; in_proj_b and in_proj_a, the
gates, another, always BF16. Megatron computes all four in one product (`in_proj`). The tower travels in BF16; `mtp.*` never.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import (
    ModelFamily,
    TensorSpec,
    attention,
    decoder,
    feed_forward,
    need,
    text_config,
)

ROOT = "model.language_model"
ENGINE_PREFIXES = (
    ("model.visual", "visual"),
    (ROOT, "language_model.model"),
    ("lm_head", "language_model.lm_head"),
)
PATCH_CHANNELS = 3
Mlp = Callable[[str, int, Mapping[str, Any]], list[TensorSpec]]


def is_linear(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer is a delta net; every `full_attention_interval`-th is not, where `layer_types` is missing."""
    types = config.get("layer_types")
    if types:
        return bool(types[layer] == "linear_attention")
    return (layer + 1) % (config.get("full_attention_interval") or 4) != 0


def delta_net(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    """A gated delta net. Rows of in_proj_qkv are q, k, v; the engine keeps A_log in fp32."""
    hidden = need(config, "hidden_size")
    key_heads, value_heads = need(config, "linear_num_key_heads"), need(config, "linear_num_value_heads")
    key_dim, value_dim = need(config, "linear_key_head_dim"), need(config, "linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels, taps = 2 * keys + values, need(config, "linear_conv_kernel_dim")
    qkvz, gates, whole = f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba", f"{prefix}.in_proj"

    def rows(which: str, size: int, unit: int, fused: str) -> TensorSpec:
        kind = "gdn_gate" if fused == gates else "attention"
        name = f"{prefix}.{which}.weight"
        return TensorSpec(name, (size, hidden), kind, layer, "rows", unit, fused=fused, trainer_fused=whole)  # type: ignore[arg-type]

    return [
        rows("in_proj_qkv", channels, channels // key_heads, qkvz),
        rows("in_proj_z", values, value_dim, qkvz),
        rows("in_proj_b", value_heads, 1, gates),
        rows("in_proj_a", value_heads, 1, gates),
        TensorSpec(f"{prefix}.conv1d.weight", (channels, 1, taps), "state", layer),
        TensorSpec(f"{prefix}.dt_bias", (value_heads,), "state", layer),
        TensorSpec(f"{prefix}.A_log", (value_heads,), "state", layer, dtype="float32"),
        TensorSpec(f"{prefix}.norm.weight", (value_dim,), "norm", layer),
        TensorSpec(f"{prefix}.out_proj.weight", (hidden, values), "attention", layer, "columns", value_dim),
    ]


def gated_attention(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    """Attention whose q_proj holds a gate beside each query head."""
    head_dim = config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")
    gated = config.get("attn_output_gate", True)
    norms = [TensorSpec(f"{prefix}.{which}.weight", (head_dim,), "norm", layer) for which in ("q_norm", "k_norm")]
    return [*attention(prefix, layer, config, head_dim, gated=gated), *norms]


def _linear(name: str, rows: int, columns: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (rows, columns), "vision"), TensorSpec(f"{name}.bias", (rows,), "bias")]


def _norm(name: str, size: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.{part}", (size,), "norm") for part in ("weight", "bias")]


def vision_tower(config: Mapping[str, Any]) -> list[TensorSpec]:
    """The tower of `vision_config`: patches, blocks, merger; nothing of it is ever quantized."""
    root, size, inner = "model.visual", need(config, "hidden_size"), need(config, "intermediate_size")
    patch, merged = need(config, "patch_size"), size * need(config, "spatial_merge_size") ** 2
    channels = config.get("in_channels") or PATCH_CHANNELS
    kernel = (size, channels, need(config, "temporal_patch_size"), patch, patch)
    found = [
        TensorSpec(f"{root}.patch_embed.proj.weight", kernel, "state"),
        TensorSpec(f"{root}.patch_embed.proj.bias", (size,), "bias"),
        TensorSpec(f"{root}.pos_embed.weight", (need(config, "num_position_embeddings"), size), "embedding"),
    ]
    for block in range(need(config, "depth")):
        prefix = f"{root}.blocks.{block}"
        found += [*_norm(f"{prefix}.norm1", size), *_norm(f"{prefix}.norm2", size)]
        found += [*_linear(f"{prefix}.attn.qkv", 3 * size, size), *_linear(f"{prefix}.attn.proj", size, size)]
        found += _linear(f"{prefix}.mlp.linear_fc1", inner, size)
        found += _linear(f"{prefix}.mlp.linear_fc2", size, inner)
    found += [*_norm(f"{root}.merger.norm", size), *_linear(f"{root}.merger.linear_fc1", merged, merged)]
    return [*found, *_linear(f"{root}.merger.linear_fc2", need(config, "out_hidden_size"), merged)]


def family_tensors(config: Mapping[str, Any], mlp: Mlp) -> list[TensorSpec]:
    """All tensors of a checkpoint whose layers have this feed-forward."""
    text = text_config(config)

    def layer_tensors(prefix: str, layer: int) -> list[TensorSpec]:
        if is_linear(text, layer):
            mixer = delta_net(f"{prefix}.linear_attn", layer, text)
        else:
            mixer = gated_attention(f"{prefix}.self_attn", layer, text)
        return [*mixer, *mlp(f"{prefix}.mlp", layer, text)]

    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    tower = vision_tower(config["vision_config"]) if config.get("vision_config") else []
    return [*tower, *decoder({**text, "tie_word_embeddings": tied}, layer_tensors, ROOT)]


def _dense(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    return feed_forward(prefix, layer, need(config, "hidden_size"), need(config, "intermediate_size"), "dense_ffn")


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    return family_tensors(config, _dense)


FAMILY = ModelFamily(
    "qwen3_5",
    frozenset({"Qwen3_5ForConditionalGeneration"}),
    frozenset({"qwen3_5"}),
    tensors,
    engine_prefixes=ENGINE_PREFIXES,
    skipped=r"mtp\.",
)
