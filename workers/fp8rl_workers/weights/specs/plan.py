"""Which linears are FP8 on both sides, and why each other one is not. Pure.

A linear stays BF16 for the first of these reasons that holds: its kind (routers, shared-expert gates and lm_head are never
quantized), a pattern of `ignoredLayers`, `firstLastLayersBF16`, `scope`, a kernel floor. What the engine fuses (q, k and v;
gate and up; all experts of a layer) is quantized whole or not at all: a floor that one shard breaks keeps its siblings in
BF16, while patterns that hit only some shards are refused, since they say something that no engine can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.offer import Weight
from fp8rl_workers.weights.specs.family import TensorSpec
from fp8rl_workers.weights.specs.floors import FLOORS, KernelFloor, floor_fault
from fp8rl_workers.weights.specs.patterns import compile_pattern
from fp8rl_workers.weights.specs.registry import family_of

Scope = Literal["linear", "ffn"]

LINEAR_KINDS = frozenset({"attention", "dense_ffn", "routed_expert", "shared_expert", "router", "lm_head"})
NEVER = {"router": "a router is never quantized", "lm_head": "lm_head is never quantized"}
FFN_KINDS = frozenset({"dense_ffn", "routed_expert"})
LM_HEAD = "lm_head"


@dataclass(frozen=True)
class PrecisionPlan:
    """The decision. `fused`: the engine's module name to its shards; `engine_modules`: what the engine holds in FP8."""

    family: str
    wire: EngineWire
    specs: tuple[TensorSpec, ...]
    quantized: tuple[str, ...]
    ignored: dict[str, str]
    fused: dict[str, tuple[str, ...]]

    @property
    def engine_modules(self) -> list[str]:
        """Names of the engine's modules that must be in FP8 (fused names), sorted: what its audit compares."""
        quantized = set(self.quantized)
        return sorted({spec.fused or spec.module for spec in self.specs if spec.module in quantized})

    def weights(self) -> list[Weight]:
        """Every tensor that travels, in order, for `offer.plan_tensors`."""
        quantized = set(self.quantized)
        return [
            Weight(s.name, s.shape, quantized=s.module in quantized and s.name.endswith(".weight")) for s in self.specs
        ]


def plan_precision(
    config: Mapping[str, Any],
    wire: EngineWire,
    scope: Scope = "linear",
    *,
    ignored_patterns: Sequence[str] = (),
    first_last_layers_bf16: int = 0,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    floor: KernelFloor | None = None,
) -> PrecisionPlan:
    """Decide for each linear of the model.

    Args:
        config: the model's `config.json`.
        wire: resolved format; bf16 quantizes nothing and lists nothing.
        scope: `ffn` leaves attention and shared experts in BF16.
        ignored_patterns: see `patterns`.
        first_last_layers_bf16: decoder layers at each end that stay BF16.
        tensor_parallel: the engine's ranks per replica.
        expert_parallel: above 1, experts are whole on their rank.
        floor: what the kernels ask; None takes the wire's own.

    Raises:
        InvalidModelError: unknown family, a missing dimension, or a dimension that the ranks cannot share.
        InvalidInputError: a pattern means no layer, or only some shards of a fused one.
    """
    family = family_of(config)
    specs = tuple(family.tensors(config))
    linears = [spec for spec in specs if spec.kind in LINEAR_KINDS]
    fused = _fused(linears)
    named = _match_patterns(linears, fused, ignored_patterns)
    ignored: dict[str, str] = {}
    if wire != "bf16":
        layers = config.get("num_hidden_layers", 0)
        reasons = {spec.module: _reason(spec, named, scope, first_last_layers_bf16, layers) for spec in linears}
        ignored = {LM_HEAD: NEVER["lm_head"] + " (it is tied to the embedding)"}
        ignored |= {module: reason for module, reason in reasons.items() if reason}
        ranks = {"routed_expert": 1 if expert_parallel > 1 else tensor_parallel}
        for members in _products(linears):
            fault = floor_fault(members, ranks.get(members[0].kind, tensor_parallel), wire, floor or FLOORS[wire])
            for module in fused.get(members[0].fused, (members[0].module,)) if fault else ():
                ignored.setdefault(module, fault)
    quantized = sorted(s.module for s in linears if wire != "bf16" and s.module not in ignored)
    return PrecisionPlan(family.name, wire, specs, tuple(quantized), dict(sorted(ignored.items())), fused)


def _fused(linears: Sequence[TensorSpec]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for spec in linears:
        if spec.fused:
            found.setdefault(spec.fused, []).append(spec.module)
    return {alias: tuple(shards) for alias, shards in found.items()}


def _reason(spec: TensorSpec, named: Mapping[str, str], scope: Scope, ends: int, layers: int) -> str:
    """Why this linear stays BF16 whatever its shape; "" if it need not."""
    if spec.kind in NEVER:
        return NEVER[spec.kind]
    if spec.module in named:
        return f"ignoredLayers: {named[spec.module]!r}"
    if spec.layer is not None and not ends <= spec.layer < layers - ends:
        return f"firstLastLayersBF16: layer {spec.layer} is one of the first or last {ends} of {layers}"
    if scope == "ffn" and spec.kind not in FFN_KINDS:
        return f"scope ffn: {spec.kind.replace('_', ' ')} stays BF16"
    return ""


def _products(linears: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """What a kernel multiplies at once: fused shards together, others alone; of an expert, gate and up, then down."""
    found: dict[str, list[TensorSpec]] = {}
    for spec in linears:
        if spec.kind in NEVER:
            continue
        one_expert = f"{spec.module.rpartition('.')[0]}/{spec.split}"
        key = one_expert if spec.kind == "routed_expert" else spec.fused or spec.module
        found.setdefault(key, []).append(spec)
    return list(found.values())


def _match_patterns(
    linears: Sequence[TensorSpec], fused: Mapping[str, tuple[str, ...]], patterns: Sequence[str]
) -> dict[str, str]:
    """Module to the first pattern that means it, directly or through the name of the fused layer that holds it.

    The fused name counts only where no shard is meant directly: `*v_proj` means v_proj, though it matches `qkv_proj` too.
    """
    modules = [*dict.fromkeys([spec.module for spec in linears]), LM_HEAD]
    named: dict[str, str] = {}
    for pattern in patterns:
        matches = compile_pattern(pattern)
        hits = {name: None for name in modules if matches(name)}
        for alias, shards in fused.items():
            if matches(alias) and not any(shard in hits for shard in shards):
                hits |= dict.fromkeys(shards)
        if not hits:
            tails = sorted({".".join(name.split(".")[-2:]) for name in modules})
            near = get_close_matches(pattern, tails, n=1, cutoff=0.0)[0]
            raise InvalidInputError(
                f"precision.ignoredLayers: {pattern!r} means no layer of this model; did you mean {near!r}?"
            )
        for name in hits:
            named.setdefault(name, pattern)
    for alias, shards in fused.items():
        hit = [shard for shard in shards if shard in named]
        if hit and len(hit) < len(shards):
            raise InvalidInputError(_partial(alias, shards, hit, named))
    return named


def _partial(alias: str, shards: Sequence[str], hit: Sequence[str], named: Mapping[str, str]) -> str:
    def few(names: Sequence[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    missed = [shard for shard in shards if shard not in named]
    return (
        f"precision.ignoredLayers: {named[hit[0]]!r} means {few(hit)}, but not {few(missed)}; the engine holds them as one "
        f"layer {alias}, in one precision: ignore all {len(shards)} ({alias!r}) or none"
    )
