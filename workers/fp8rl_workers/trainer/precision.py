"""What `auto` becomes: decided by the trainer from the device that it runs on and the model's `config.json`. Pure.

recipe  auto: blockwise on compute capability 9.x, mxfp8 on 10.x, bf16 elsewhere and without a GPU. Transformer Engine
        refuses block scaling below 9.0 and MXFP8 from 12.0, so an explicit FP8 recipe is refused there (backend megatron).
wire    auto: the resolved recipe, never the card.
scale   auto: pow2, which both sides can hold everywhere; fp32 is refused on 10.x and later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fp8rl_workers.config import TrainerConfig
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.protocol import EngineWire, ResolvedPrecision
from fp8rl_workers.weights.specs import PrecisionPlan, plan_precision

ResolvedRecipe = Literal["blockwise", "mxfp8", "bf16"]


class Device(NamedTuple):
    """Where the trainer computes. `capability`: of a CUDA device, None on a CPU."""

    name: str
    capability: tuple[int, int] | None


def resolve_recipe(config: TrainerConfig, device: Device) -> ResolvedRecipe:
    """The trainer's compute.

    Raises:
        InvalidInputError: the card cannot compute the recipe.
    """
    asked = config.precision.recipe
    major = device.capability[0] if device.capability else 0
    if asked == "auto":
        return "blockwise" if major == 9 else "mxfp8" if major == 10 else "bf16"
    refused = (asked == "blockwise" and major < 9) or (asked != "bf16" and major not in {9, 10})
    if config.backend == "megatron" and refused:
        capability = ".".join(map(str, device.capability or ("none",)))
        message = f"precision.recipe: {asked} is refused by Transformer Engine on {device.name} (compute capability {capability}); use bf16, or train on Hopper or Blackwell"
        raise InvalidInputError(message)
    return asked


def resolve_wire(config: TrainerConfig, recipe: ResolvedRecipe) -> EngineWire:
    """The engine's format.

    Raises:
        InvalidInputError: it differs from the recipe without `allowMismatch`.
    """
    asked = config.precision.wire
    if asked == "auto":
        return recipe
    if asked != recipe and not config.precision.allow_mismatch:
        message = f"precision.wire: {asked} beside recipe {recipe}: trainer and engines would compute with different codes of the same weights; set wire: auto or allowMismatch: true"
        raise InvalidInputError(message)
    return asked


def resolve_scale_format(config: TrainerConfig, device: Device) -> Literal["fp32", "pow2"]:
    """The format of blockwise scales.

    Raises:
        InvalidInputError: fp32 on Blackwell.
    """
    asked = config.precision.scale_format
    if asked == "fp32" and device.capability is not None and device.capability[0] >= 10:
        raise InvalidInputError(f"precision.scaleFormat: fp32 is not built for {device.name}; use pow2")
    return "pow2" if asked == "auto" else asked


def plan_for(config: TrainerConfig, model: Mapping[str, Any], form: EngineWire) -> PrecisionPlan:
    """Which linears of the model are quantized with `form`; see `plan_precision` for its errors."""
    precision = config.precision
    return plan_precision(
        model,
        form,
        scope=precision.scope,
        ignored_patterns=precision.ignored_layers,
        first_last_layers_bf16=precision.first_last_layers_bf16,
        tensor_parallel=config.engine_tensor_parallel,
        expert_parallel=config.engine_expert_parallel,
    )


def resolve_precision(config: TrainerConfig, model: Mapping[str, Any], device: Device) -> ResolvedPrecision:
    """Everything that engines must know before they boot.

    Args:
        config: The trainer's config.
        model: The model's `config.json`.
        device: Where this rank computes.

    Raises:
        InvalidInputError: what was asked for cannot be.
        InvalidModelError: the family is unknown or a dimension is missing.
    """
    recipe = resolve_recipe(config, device)
    wire = resolve_wire(config, recipe)
    plan = plan_for(config, model, wire)
    return ResolvedPrecision(
        recipe=recipe,
        wire=wire,
        scale_format=resolve_scale_format(config, device),
        quantize_at=config.precision.quantize_at,
        scope=config.precision.scope,
        kv_cache=config.precision.kv_cache,
        quantized_layers=list(plan.quantized),
        ignored_layers=plan.ignored,
    )
