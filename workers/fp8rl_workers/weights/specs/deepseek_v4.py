"""DeepSeek V4: latent attention over a sliding window and compressed keys, a grouped output projection, hyper-connections.

Source: the release's names (vLLM `deepseek_v4.nvidia.model`; transformers `deepseek_v4` maps to them when it saves, below
`model.`). Names in transformers: wq_a q_a_proj, wkv kv_proj, wo_a o_a_proj, w1 gate_proj, w3 up_proj, w2 down_proj.
In the engine wq_a and wkv are one module, w1 and w3 too. FP8: attention with the grouped projection wo_a, the indexer's wq_b,
experts, shared experts. BF16: the compressors and the indexer's weights_proj, which the engine never quantizes, and the router,
whose logits are fp32. fp32: hyper-connections, sinks, position biases, the router's bias. int32: the hash layers' table.
`mtp.*` never travels. The engine takes FP8 experts only with `expert_dtype: fp8` in its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl_workers.weights.specs.family import Dtype, Kind, ModelFamily, Split, TensorSpec, need, routed_experts

RATIO = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
HASH_LAYERS = 3
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
SPARSE_RATIO = 4
CONNECTIONS = 3


def _plain(
    name: str, shape: tuple[int, ...], layer: int | None, kind: Kind = "state", dtype: Dtype = "float32"
) -> TensorSpec:
    return TensorSpec(name, shape, kind, layer, dtype=dtype)


def _norm(name: str, size: int, layer: int | None = None) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (size,), "norm", layer)


def ratios(config: Mapping[str, Any]) -> list[int]:
    """Keys per compressed key of each layer; 0: the window only."""
    if config.get("compress_ratios"):
        return list(config["compress_ratios"])
    return [RATIO[kind] for kind in config["layer_types"]]


def is_hash(config: Mapping[str, Any], layer: int) -> bool:
    """Whether tokens choose this layer's experts by a table of their ids."""
    if config.get("mlp_layer_types"):
        return bool(config["mlp_layer_types"][layer] == "hash_moe")
    return layer < int(config.get("num_hash_layers", HASH_LAYERS))


def compressor(prefix: str, layer: int, hidden: int, head_dim: int, ratio: int) -> list[TensorSpec]:
    """Projections wkv and wgate, one BF16 module; overlapping windows (ratio 4) have twice the width."""
    width, fused = head_dim * (2 if ratio == SPARSE_RATIO else 1), f"{prefix}.fused_wkv_wgate"
    linears = [
        TensorSpec(f"{prefix}.{which}.weight", (width, hidden), "indexer", layer, fused=fused)
        for which in ("wkv", "wgate")
    ]
    return [_plain(f"{prefix}.ape", (ratio, width), layer), *linears, _norm(f"{prefix}.norm", head_dim, layer)]


def indexer(prefix: str, layer: int, config: Mapping[str, Any], ratio: int) -> list[TensorSpec]:
    """Chooses the compressed keys: wq_b in FP8, the rest BF16; whole on every rank."""
    hidden, heads, head_dim = need(config, "hidden_size"), need(config, "index_n_heads"), need(config, "index_head_dim")
    return [
        TensorSpec(f"{prefix}.wq_b.weight", (heads * head_dim, need(config, "q_lora_rank")), "attention", layer),
        TensorSpec(f"{prefix}.weights_proj.weight", (heads, hidden), "indexer", layer),
        *compressor(f"{prefix}.compressor", layer, hidden, head_dim, ratio),
    ]


def attention(prefix: str, layer: int, config: Mapping[str, Any], ratio: int) -> list[TensorSpec]:
    """Queries through a latent, one key-value head, the grouped output projection (wo_a by groups, then wo_b)."""
    hidden, heads, head_dim = need(config, "hidden_size"), need(config, "num_attention_heads"), need(config, "head_dim")
    latent, groups, rank = need(config, "q_lora_rank"), need(config, "o_groups"), need(config, "o_lora_rank")
    fused = f"{prefix}.fused_wqa_wkv"

    def linear(which: str, rows: int, columns: int, split: Split, unit: int = 1, *, alias: str = "") -> TensorSpec:
        return TensorSpec(f"{prefix}.{which}.weight", (rows, columns), "attention", layer, split, unit, fused=alias)

    found = [
        _plain(f"{prefix}.attn_sink", (heads,), layer),
        linear("wq_a", latent, hidden, "none", alias=fused),
        linear("wkv", head_dim, hidden, "none", alias=fused),
        _norm(f"{prefix}.q_norm", latent, layer),
        linear("wq_b", heads * head_dim, latent, "rows", head_dim),
        _norm(f"{prefix}.kv_norm", head_dim, layer),
        linear("wo_a", groups * rank, heads * head_dim // groups, "rows", rank),
        linear("wo_b", hidden, groups * rank, "columns", rank),
    ]
    if ratio:
        found += compressor(f"{prefix}.compressor", layer, hidden, head_dim, ratio)
    return found + (indexer(f"{prefix}.indexer", layer, config, ratio) if ratio == SPARSE_RATIO else [])


def _shared(prefix: str, layer: int, hidden: int, inner: int) -> list[TensorSpec]:
    """w1 and w3 are gate_up_proj in the engine, w2 alone is down_proj."""
    up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    return [
        TensorSpec(f"{prefix}.w1.weight", (inner, hidden), "shared_expert", layer, "rows", fused=up),
        TensorSpec(f"{prefix}.w3.weight", (inner, hidden), "shared_expert", layer, "rows", fused=up),
        TensorSpec(f"{prefix}.w2.weight", (hidden, inner), "shared_expert", layer, "columns", fused=down),
    ]


def feed_forward(prefix: str, layer: int, config: Mapping[str, Any]) -> list[TensorSpec]:
    """Router with its table or bias, experts, shared experts."""
    hidden, inner, count = (need(config, n) for n in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    found = []
    for spec in routed_experts(prefix, layer, hidden, inner, count):
        head, _, which = spec.module.rpartition(".")
        name = f"{head}.{EXPERT_NAMES[which]}.weight" if which in EXPERT_NAMES else spec.name
        found.append(TensorSpec(name, spec.shape, spec.kind, layer, spec.split, fused=spec.fused))
    if is_hash(config, layer):
        table = (need(config, "vocab_size"), need(config, "num_experts_per_tok"))
        found.insert(1, _plain(f"{prefix}.gate.tid2eid", table, layer, dtype="int32"))
    else:
        found.insert(1, _plain(f"{prefix}.gate.bias", (count,), layer, "bias"))
    shared = config.get("n_shared_experts", 1) or 0
    return found + (_shared(f"{prefix}.shared_experts", layer, hidden, shared * inner) if shared else [])


def tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of a checkpoint, in order."""
    hidden, vocabulary, streams = need(config, "hidden_size"), need(config, "vocab_size"), need(config, "hc_mult")
    mixes = (2 + streams) * streams
    found = [TensorSpec("embed.weight", (vocabulary, hidden), "embedding")]
    for layer, ratio in zip(range(need(config, "num_hidden_layers")), ratios(config), strict=False):
        prefix = f"layers.{layer}"
        for which in ("attn", "ffn"):
            found.append(_plain(f"{prefix}.hc_{which}_fn", (mixes, streams * hidden), layer))
            found.append(_plain(f"{prefix}.hc_{which}_base", (mixes,), layer))
            found.append(_plain(f"{prefix}.hc_{which}_scale", (CONNECTIONS,), layer))
        found += [_norm(f"{prefix}.attn_norm", hidden, layer), *attention(f"{prefix}.attn", layer, config, ratio)]
        found += [_norm(f"{prefix}.ffn_norm", hidden, layer), *feed_forward(f"{prefix}.ffn", layer, config)]
    found += [_plain("hc_head_fn", (streams, streams * hidden), None), _plain("hc_head_base", (streams,), None)]
    found += [_plain("hc_head_scale", (1,), None), _norm("norm", hidden)]
    return [*found, TensorSpec("head.weight", (vocabulary, hidden), "lm_head")]


FAMILY = ModelFamily(
    "deepseek_v4",
    frozenset({"DeepseekV4ForCausalLM"}),
    frozenset({"deepseek_v4"}),
    tensors,
    engine_prefixes=(("layers", "model.layers"), ("head", "lm_head"), ("embed", "model.embed_tokens")),
    skipped=r"mtp\.",
    engine_overrides=(("expert_dtype", "fp8"),),
)
