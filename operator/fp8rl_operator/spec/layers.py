"""Patterns of `precision.ignoredLayers`, and the shards that engines fuse into one layer. Pure.

The same patterns as `fp8rl_workers.weights.specs.patterns` (a test holds both together); here for the names that nearly all
decoders share, so that a manifest is refused before anything runs. The trainer checks again with the model's own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

# Module that the engine makes of the shards -> the shards, below model.layers.<n>.
FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
}


def pattern_error(pattern: str) -> str:
    """Why a pattern is none, empty for a good one."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            return f"is no regular expression: {error}"
        return ""
    return "" if all(pattern.split(".")) else "has an empty part between its dots"


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern means a module: its dotted parts equal a run of the module's, or its expression the whole name."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], module) is not None
    have, want = module.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(*pair) for pair in zip(have[at:], want, strict=False))
        for at in range(len(have) - len(want) + 1)
    )


def split_layers(patterns: tuple[str, ...]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(fused module, ignored shards, kept shards) of each fused layer that the patterns split, once for each kind of layer."""
    numbers = sorted({"0", *(number for pattern in patterns for number in re.findall(r"\d+", pattern))}, key=int)
    for fused, shards in FUSED.items():
        for number in numbers:
            prefix = f"model.layers.{int(number)}."
            hit = [shard for shard in shards if any(matches(pattern, prefix + shard) for pattern in patterns)]
            if hit and len(hit) < len(shards):
                yield prefix + fused, hit, [shard for shard in shards if shard not in hit]
                break
