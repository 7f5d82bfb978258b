"""What a family of models is: which tensors a checkpoint holds, and what each of them is. Pure, no torch.

A family is one file beside this one: how to recognise `config.json`, and the list of its tensors. The pieces that decoders
share (attention, feed-forward) are built here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl_workers.errors import InvalidModelError

Kind = Literal[
    "attention", "dense_ffn", "routed_expert", "shared_expert", "router", "norm", "embedding", "lm_head", "bias"
]
Split = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    `split`: the dimension that tensor parallelism cuts. `unit`: rows that stay together (a head). `replicable`: whole units
    are repeated when there are more ranks than units (key and value heads). `fused`: the engine's module that holds this
    one ("" if it stands alone). `layer`: index of its decoder layer.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    split: Split = "none"
    unit: int = 1
    replicable: bool = False
    fused: str = ""

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ModelFamily:
    """How to recognise a family and list its tensors, in the order in which they travel."""

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    tensors: Callable[[Mapping[str, Any]], list[TensorSpec]]

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether `config.json` describes this family: by architecture, by model_type where that is missing."""
        architectures = config.get("architectures") or []
        if architectures:
            return bool(self.architectures & set(architectures))
        return config.get("model_type") in self.model_types


def need(config: Mapping[str, Any], field: str) -> int:
    """A positive integer of `config.json`.

    Raises:
        InvalidModelError: it is missing or no positive integer.
    """
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidModelError(f"config.json: {field} is {value!r}, expected a positive integer")
    return value


def attention(prefix: str, layer: int, config: Mapping[str, Any], head_dim: int) -> list[TensorSpec]:
    """q, k, v and o projections with their biases; q, k and v are one module in the engine."""
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    fused = f"{prefix}.qkv_proj"
    found = []
    for which, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        rows = count * head_dim
        found.append(
            TensorSpec(
                f"{prefix}.{which}.weight",
                (rows, hidden),
                "attention",
                layer,
                "rows",
                unit=head_dim,
                replicable=which != "q_proj",
                fused=fused,
            )
        )
        if config.get("attention_bias"):
            found.append(TensorSpec(f"{prefix}.{which}.bias", (rows,), "bias", layer))
    found.append(
        TensorSpec(f"{prefix}.o_proj.weight", (hidden, heads * head_dim), "attention", layer, "columns", head_dim)
    )
    if config.get("attention_bias"):
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


def decoder(config: Mapping[str, Any], layer_tensors: Callable[[str, int], list[TensorSpec]]) -> list[TensorSpec]:
    """Embedding, the layers with their two norms, the last norm, and lm_head unless it is tied to the embedding."""
    hidden, vocabulary = need(config, "hidden_size"), need(config, "vocab_size")
    found = [TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), "embedding")]
    for layer in range(need(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        found.append(TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), "norm", layer))
        found.extend(layer_tensors(prefix, layer))
        found.append(TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), "norm", layer))
    found.append(TensorSpec("model.norm.weight", (hidden,), "norm"))
    if not config.get("tie_word_embeddings", False):
        found.append(TensorSpec("lm_head.weight", (vocabulary, hidden), "lm_head"))
    return found
