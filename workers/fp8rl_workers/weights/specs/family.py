"""What a family of models is: which tensors a checkpoint holds, and what each of them is. Pure, no torch.

A family is one file beside this one: how to recognise `config.json`, and the list of its tensors. The pieces that decoders
share (attention, feed-forward) are built here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl_workers.errors import InvalidModelError

Kind = Literal[
    "attention",
    "dense_ffn",
    "routed_expert",
    "shared_expert",
    "router",
    "shared_gate",
    "gdn_gate",
    "indexer",
    "vision",
    "norm",
    "embedding",
    "lm_head",
    "bias",
    "state",
]
Split = Literal["rows", "columns", "none"]
Dtype = Literal["bfloat16", "float32", "int32"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    `split`: the dimension that tensor parallelism cuts. `unit`: rows that stay together (a head). `replicable`: whole units
    are repeated when there are more ranks than units (key and value heads). `fused`: the engine's module that holds this
    one ("" if it stands alone). `layer`: index of its decoder layer. `dtype`: how it travels when it is not quantized, which
    is how the engine holds it. `trainer_fused`: the trainer's module that computes it together with others.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    split: Split = "none"
    unit: int = 1
    replicable: bool = False
    fused: str = ""
    dtype: Dtype = "bfloat16"
    trainer_fused: str = ""

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ModelFamily:
    """How to recognise a family and list its tensors, in the order in which they travel.

    `engine_prefixes`: (prefix of a checkpoint's module, prefix of the engine's), the first that fits counts. `skipped`: a
    regular expression for names that a checkpoint may hold and that never travel (layers for speculative decoding).
    `engine_overrides`: fields of `config.json` that the engine must see otherwise when it holds FP8.
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    tensors: Callable[[Mapping[str, Any]], list[TensorSpec]]
    engine_prefixes: tuple[tuple[str, str], ...] = ()
    skipped: str = ""
    engine_overrides: tuple[tuple[str, str], ...] = ()

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether `config.json` describes this family: by architecture, by model_type where that is missing."""
        architectures = config.get("architectures") or []
        if architectures:
            return bool(self.architectures & set(architectures))
        return config.get("model_type") in self.model_types

    def engine_name(self, module: str) -> str:
        """The engine's name of a module of the checkpoint, or of a fused one."""
        return _swap(module, self.engine_prefixes)

    def checkpoint_name(self, module: str) -> str:
        """The checkpoint's spelling of the engine's name of a module (a fused one keeps its last part)."""
        return _swap(module, [(engine, ours) for ours, engine in self.engine_prefixes])


def _swap(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of `config.json` that describes the decoder: `text_config` where there are towers beside it."""
    return config.get("text_config") or config


def need(config: Mapping[str, Any], field: str) -> int:
    """A positive integer of `config.json`.

    Raises:
        InvalidModelError: it is missing or no positive integer.
    """
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidModelError(f"config.json: {field} is {value!r}, expected a positive integer")
    return value


def attention(
    prefix: str, layer: int, config: Mapping[str, Any], head_dim: int, *, gated: bool = False, output_bias: bool = True
) -> list[TensorSpec]:
    """q, k, v and o projections with their biases; q, k and v are one module in the engine.

    `gated`: each query head has a gate of its own size beside it. `output_bias`: `attention_bias` means o_proj too.
    """
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    fused = f"{prefix}.qkv_proj"
    found = []
    for which, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        unit = head_dim * (2 if gated and which == "q_proj" else 1)
        rows = count * unit
        found.append(
            TensorSpec(
                f"{prefix}.{which}.weight",
                (rows, hidden),
                "attention",
                layer,
                "rows",
                unit=unit,
                replicable=which != "q_proj",
                fused=fused,
            )
        )
        if config.get("attention_bias"):
            found.append(TensorSpec(f"{prefix}.{which}.bias", (rows,), "bias", layer))
    found.append(
        TensorSpec(f"{prefix}.o_proj.weight", (hidden, heads * head_dim), "attention", layer, "columns", head_dim)
    )
    if config.get("attention_bias") and output_bias:
        found.append(TensorSpec(f"{prefix}.o_proj.bias", (hidden,), "bias", layer))
    return found


def feed_forward(
    prefix: str, layer: int, hidden: int, inner: int, kind: Kind, *, fused: str = "", bias: bool = False
) -> list[TensorSpec]:
    """gate, up and down projections; gate and up are one module in the engine, or all three belong to `fused`."""
    found = []
    for which in ("gate_proj", "up_proj"):
        alias = fused or f"{prefix}.gate_up_proj"
        found.append(TensorSpec(f"{prefix}.{which}.weight", (inner, hidden), kind, layer, "rows", fused=alias))
        if bias:
            found.append(TensorSpec(f"{prefix}.{which}.bias", (inner,), "bias", layer))
    found.append(TensorSpec(f"{prefix}.down_proj.weight", (hidden, inner), kind, layer, "columns", fused=fused))
    if bias:
        found.append(TensorSpec(f"{prefix}.down_proj.bias", (hidden,), "bias", layer))
    return found


def routed_experts(
    prefix: str, layer: int, hidden: int, inner: int, count: int, *, router: Dtype = "bfloat16"
) -> list[TensorSpec]:
    """The router and every expert's three projections; the engine holds all experts in one module."""
    found = [TensorSpec(f"{prefix}.gate.weight", (count, hidden), "router", layer, dtype=router)]
    for expert in range(count):
        one = f"{prefix}.experts.{expert}"
        found += feed_forward(one, layer, hidden, inner, "routed_expert", fused=f"{prefix}.experts")
    return found


def decoder(
    config: Mapping[str, Any], layer_tensors: Callable[[str, int], list[TensorSpec]], root: str = "model"
) -> list[TensorSpec]:
    """Embedding, the layers with their two norms, the last norm, and lm_head unless it is tied to the embedding."""
    hidden, vocabulary = need(config, "hidden_size"), need(config, "vocab_size")
    found = [TensorSpec(f"{root}.embed_tokens.weight", (vocabulary, hidden), "embedding")]
    for layer in range(need(config, "num_hidden_layers")):
        prefix = f"{root}.layers.{layer}"
        found.append(TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), "norm", layer))
        found.extend(layer_tensors(prefix, layer))
        found.append(TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), "norm", layer))
    found.append(TensorSpec(f"{root}.norm.weight", (hidden,), "norm"))
    if not config.get("tie_word_embeddings", False):
        found.append(TensorSpec("lm_head.weight", (vocabulary, hidden), "lm_head"))
    return found
