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

from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.offer import Weight
from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, text_config
from fp8rl_workers.weights.specs.floors import FLOORS, KernelFloor, floor_fault, trainer_fault
from fp8rl_workers.weights.specs.patterns import compile_pattern
from fp8rl_workers.weights.specs.registry import family_of

Scope = Literal["linear", "ffn"]

NEVER = {
    "router": "a router is never quantized",
    "shared_gate": "a shared expert's gate is never quantized",
    "gdn_gate": "the gates of a delta net are never quantized",
    "indexer": "the engine computes it in BF16",
    "vision": "a vision tower stays BF16 whole",
    "lm_head": "lm_head is never quantized",
}
LINEAR_KINDS = frozenset({"attention", "dense_ffn", "routed_expert", "shared_expert", *NEVER})
FFN_KINDS = frozenset({"dense_ffn", "routed_expert"})
LM_HEAD = "lm_head"


@dataclass(frozen=True)
class PrecisionPlan:
    """The decision. `fused`: the engine's module name to its shards; `engine_modules`: what the engine holds in FP8."""

    model: ModelFamily
    wire: EngineWire
    specs: tuple[TensorSpec, ...]
    quantized: tuple[str, ...]
    ignored: dict[str, str]
    fused: dict[str, tuple[str, ...]]

    @property
    def family(self) -> str:
        """The family's name."""
        return self.model.name

    @property
    def engine_modules(self) -> list[str]:
        """The engine's names of its modules that must be in FP8 (fused ones once), sorted: what its audit compares."""
        quantized = set(self.quantized)
        held = {s.fused or s.module for s in self.specs if s.module in quantized and s.kind in LINEAR_KINDS}
        return sorted(self.model.engine_name(name) for name in held)

    @property
    def engine_shards(self) -> dict[str, tuple[str, ...]]:
        """The engine's name of each module that is a linear, to the modules of the checkpoint that it holds."""
        alone = {s.module: (s.module,) for s in self.specs if s.kind in LINEAR_KINDS and not s.fused}
        return {self.model.engine_name(name): shards for name, shards in (alone | self.fused).items()}

    def weights(self) -> list[Weight]:
        """Every tensor that travels, in order, for `offer.plan_layout`."""
        quantized = set(self.quantized)
        return [
            Weight(s.name, s.shape, quantized=s.module in quantized and s.name.endswith(".weight"), dtype=s.dtype)
            for s in self.specs
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
    trainer_tensor_parallel: int | None = None,
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
        trainer_tensor_parallel: ranks of a trainer that fuses linears of its own (Megatron); None: it fuses none.
        floor: what the kernels ask; None takes the wire's own.

    Raises:
        InvalidModelError: unknown family, a missing dimension, a dimension that the ranks cannot share, or a linear that the
            trainer computes in one product with others and that no FP8 kernel takes (`trainer_fault`).
        InvalidInputError: a pattern means no layer, or only some shards of a fused one.
    """
    family = family_of(config)
    specs = tuple(family.tensors(config))
    linears = [spec for spec in specs if spec.kind in LINEAR_KINDS and spec.name.endswith(".weight")]
    fused = _fused(linears)
    named = _match_patterns(linears, fused, ignored_patterns)
    ignored: dict[str, str] = {}
    if wire != "bf16":
        layers = text_config(config).get("num_hidden_layers", 0)
        reasons = {spec.module: _reason(spec, named, scope, first_last_layers_bf16, layers) for spec in linears}
        ignored = {LM_HEAD: NEVER["lm_head"] + " (it is tied to the embedding)"}
        ignored |= {module: reason for module, reason in reasons.items() if reason}
        ranks = {"routed_expert": 1 if expert_parallel > 1 else tensor_parallel}
        for members in _products(linears):
            fault = floor_fault(members, ranks.get(members[0].kind, tensor_parallel), wire, floor or FLOORS[wire])
            for module in fused.get(members[0].fused, (members[0].module,)) if fault else ():
                ignored.setdefault(module, fault)
    quantized = sorted(s.module for s in linears if wire != "bf16" and s.module not in ignored)
    if trainer_tensor_parallel is not None:
        _refuse_trainer_faults(linears, quantized, trainer_tensor_parallel, wire)
    return PrecisionPlan(family, wire, specs, tuple(quantized), dict(sorted(ignored.items())), fused)


def _refuse_trainer_faults(
    linears: Sequence[TensorSpec], quantized: Sequence[str], ranks: int, wire: EngineWire
) -> None:
    groups: dict[str, list[TensorSpec]] = {}
    for spec in linears:
        if spec.trainer_fused:
            groups.setdefault(spec.trainer_fused, []).append(spec)
    names = set(quantized)
    for module, members in groups.items():
        fault = trainer_fault(module, members, ranks, wire) if any(s.module in names for s in members) else ""
        if fault:
            raise InvalidModelError(fault)


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
