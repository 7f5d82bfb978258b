"""The models that are synced, and their seeded weights: each process can make any tensor of any version by itself, bit for bit."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8rl_workers.protocol import EngineWire, ResolvedPrecision
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.specs import PrecisionPlan, plan_precision

EXPERT = re.compile(r"\.experts\.(\d+|\*)\.")
DEVIATION = 0.02
SHARED = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
DENSE = SHARED | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MOE = SHARED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int
) -> dict[str, Any]:
    """The dimensions as a model's config names them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "dense_8b": DENSE | shape(4096, 12288, 36, 32, 8, 128, 151936),
    "moe_30b_a3b": MOE
    | shape(2048, 6144, 48, 32, 4, 128, 151936)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "tiny": DENSE | shape(256, 512, 2, 4, 2, 64, 512),
    "tiny_moe": MOE
    | shape(256, 512, 2, 4, 2, 64, 512)
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
CONTEXT_TOKENS = {"dense_8b": 2048, "moe_30b_a3b": 1536, "tiny": 1024, "tiny_moe": 1024}


@dataclass(frozen=True)
class Precision:
    """What travels and what the engine computes in."""

    wire: EngineWire = "blockwise"
    scale_format: str = "fp32"
    kv_cache: str = "bf16"
    ignored_layers: tuple[str, ...] = ()


def resolve(config: Mapping[str, Any], precision: Precision) -> tuple[ResolvedPrecision, PrecisionPlan]:
    """The precision as a trainer resolves it, and the plan behind it."""
    plan = plan_precision(config, precision.wire, ignored_patterns=precision.ignored_layers)
    fields = {
        "recipe": "bf16",
        "wire": precision.wire,
        "scale_format": precision.scale_format,
        "kv_cache": precision.kv_cache,
        "quantized_layers": list(plan.quantized),
        "ignored_layers": plan.ignored,
    }
    return ResolvedPrecision.model_validate(fields), plan


@dataclass
class Weights:
    """BF16 weights by HF name. The experts of a projection are one stack [E, N, K] under the name with `*` for the expert."""

    plan: PrecisionPlan
    device: torch.device
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    held: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes = {}
        for weight in self.plan.weights():
            found = EXPERT.search(weight.name)
            if found is None or found[1] == "*":
                self.shapes[weight.name] = tuple(weight.shape)
            else:
                rest = tuple(weight.shape)
                count = self.shapes.get(starred(weight.name), (0,))[0]
                self.shapes[starred(weight.name)] = (count + 1, *rest)

    def fill(self, version: int, style: str = "random") -> None:
        """Give every weight the values of `version`, in place."""
        for name in self.shapes:
            if name not in self.held:
                self.held[name] = torch.empty(self.shapes[name], dtype=torch.bfloat16, device=self.device)
            fill_one(self.held[name], name, version, style)

    def tensor(self, name: str) -> Tensor:
        """A weight, a stack or a stack's expert, as a view."""
        if name in self.held:
            return self.held[name]
        found = EXPERT.search(name)
        if found is None:
            raise KeyError(name)
        return self.held[starred(name)][int(found[1])]

    def bytes_held(self) -> int:
        """Bytes of all weights."""
        return sum(2 * numel(shape) for shape in self.shapes.values())


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return int(torch.Size(shape).numel())


def starred(name: str) -> str:
    """The name of the stack that an expert's weight belongs to."""
    return EXPERT.sub(".experts.*.", name)


def fill_one(weight: Tensor, name: str, version: int, style: str) -> None:
    """The values of one weight (or stack) of a version: norms near 1, others normal with a standard deviation of 0.02.

    `style` `token:<t>` makes token t, and only it, likely: see `only`.
    """
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()) + (version << 32))
    weight.normal_(0.0, DEVIATION, generator=generator)
    if "norm" in name:
        weight.add_(1.0)
    if style.startswith("token:"):
        only(weight, name, int(style.partition(":")[2]))


def only(weight: Tensor, name: str, token: int) -> None:
    """Make `token` the one likely token: hidden states are all ones, its logit is half their number, the others' 0."""
    if "o_proj" in name or "down_proj" in name:
        weight.zero_()
    if "embed_tokens" in name:
        weight.fill_(1.0)
    if "lm_head" in name:
        weight.zero_()
        weight[token] = 0.5


def checkpoint(
    plan: PrecisionPlan, precision: Precision, device: torch.device, version: int, style: str = "random"
) -> Iterator[tuple[str, Tensor]]:
    """The quantized checkpoint of a version by HF name, tensor by tensor, as the plain-torch reference makes it."""
    weights = Weights(plan, device)
    quantized = set(plan.quantized)
    for name, dimensions in weights.shapes.items():
        whole = torch.empty(dimensions, dtype=torch.bfloat16, device=device)
        fill_one(whole, name, version, style)
        members = [(name, whole)] if "*" not in name else [(name.replace("*", str(e)), w) for e, w in enumerate(whole)]
        for member, weight in members:
            wire: EngineWire = precision.wire if member.removesuffix(".weight") in quantized else "bf16"
            parts = quantize(member, weight, wire, scale_format=precision.scale_format)  # type: ignore[arg-type]
            yield from ((member + suffix, part) for suffix, part in parts.items())
