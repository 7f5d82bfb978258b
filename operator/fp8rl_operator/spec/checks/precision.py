"""Formats that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.layers import pattern_error, split_layers


def known_recipe(job: FP8RLJob) -> str:
    """The recipe as far as the spec tells it: `auto` stays auto unless the trainer has no GPU, which makes it bf16."""
    recipe = job.spec.precision.recipe
    return "bf16" if recipe == "auto" and job.spec.trainer.gpus_per_replica == 0 else recipe


def wire_matches_recipe(job: FP8RLJob) -> Iterator[Fault]:
    """A wire set by hand equals the recipe, unless allowMismatch. An auto that the card decides is left to the trainer."""
    precision, recipe = job.spec.precision, known_recipe(job)
    if precision.allow_mismatch or "auto" in (recipe, precision.wire) or recipe == precision.wire:
        return
    became = (
        "recipe auto is bf16 with trainer.gpusPerReplica 0" if precision.recipe == "auto" else f"recipe is {recipe}"
    )
    way = "set wire: auto" if precision.wire == "channel" else f"set wire: auto, or recipe: {precision.wire}"
    yield Fault(
        "spec.precision.wire",
        precision.wire,
        f"{became}: trainer and engines would compute with different codes of the same weights",
        f"{way}, or allowMismatch: true",
    )


def fp8_param_fits(job: FP8RLJob) -> Iterator[Fault]:
    """FP8 primary weights exist for blockwise on Megatron only."""
    path, recipe = "spec.precision.fp8Param", known_recipe(job)
    if not job.spec.precision.fp8_param:
        return
    if recipe in ("mxfp8", "bf16"):
        why = {
            "mxfp8": "mxfp8 keeps two copies of a weight, scaled along rows and along columns, and none can be the parameter",
            "bf16": "recipe bf16 has no FP8 parameters",
        }
        yield Fault(path, value=True, reason=why[recipe], remedy="set fp8Param: false, or recipe: blockwise")
    if job.spec.trainer.backend == "torch":
        yield Fault(
            path,
            value=True,
            reason="backend torch holds BF16 parameters",
            remedy="set fp8Param: false, or backend: megatron",
        )


def stochastic_rounding_is_the_trainers(job: FP8RLJob) -> Iterator[Fault]:
    """Online quantization of vLLM rounds to nearest."""
    precision = job.spec.precision
    if precision.rounding == "stochastic" and precision.quantize_at == "engine":
        yield Fault(
            "spec.precision.rounding",
            precision.rounding,
            "quantizeAt is engine, and vLLM rounds to nearest: both sides would hold different codes",
            "set rounding: nearest, or quantizeAt: trainer",
        )


def fp32_scales_are_blockwise(job: FP8RLJob) -> Iterator[Fault]:
    """fp32 scales belong to blockwise; mxfp8's are bytes of exponents."""
    precision = job.spec.precision
    if precision.scale_format == "fp32" and precision.recipe == "mxfp8":
        yield Fault(
            "spec.precision.scaleFormat",
            "fp32",
            "recipe mxfp8 has scales of 8 bits of exponent, powers of two",
            "set scaleFormat: auto, or recipe: blockwise",
        )


def ignored_layers_are_whole(job: FP8RLJob) -> Iterator[Fault]:
    """Patterns can be read, and ignore all shards of a fused layer or none: the engine holds them in one format."""
    patterns, path = job.spec.precision.ignored_layers, "spec.precision.ignoredLayers"
    errors = {index: error for index, pattern in enumerate(patterns) if (error := pattern_error(pattern))}
    for index, error in errors.items():
        yield Fault(
            f"{path}[{index}]",
            patterns[index],
            error,
            "write a module's name or a run of its dotted parts, or re:EXPRESSION",
        )
    for fused, ignored, kept in split_layers(() if errors else patterns):
        yield Fault(
            path,
            ", ".join(patterns),
            f"ignores {', '.join(ignored)} and not {', '.join(kept)}, which engines hold as one layer, {fused}",
            f"add {', '.join(kept)}, or leave {', '.join(ignored)} out",
        )


AT = "spec.precision"
RECIPE = "(self.precision.recipe == 'auto' && self.trainer.gpusPerReplica == 0 ? 'bf16' : self.precision.recipe)"

CHECKS = (
    Check(
        wire_matches_recipe,
        reads=(
            "spec.precision.recipe",
            "spec.precision.wire",
            "spec.precision.allowMismatch",
            "spec.trainer.gpusPerReplica",
        ),
        cel=(
            Cel(
                "spec",
                "self.precision.allowMismatch || self.precision.wire == 'auto' ||"
                f" {RECIPE} in ['auto', self.precision.wire]",
                "precision.wire does not match precision.recipe; set wire: auto, or allowMismatch: true",
                filled="precision.wire %s does not match recipe %s: trainer and engines would compute with different codes of the"
                " same weights; set wire: auto, or allowMismatch: true",
                values=("self.precision.wire", RECIPE),
            ),
        ),
    ),
    Check(
        ignored_layers_are_whole,
        reads=("spec.precision.ignoredLayers",),
        beyond_cel="which modules a pattern means; the trainer compares again with the model's own names",
    ),
    Check(
        fp8_param_fits,
        reads=(
            "spec.precision.fp8Param",
            "spec.precision.recipe",
            "spec.trainer.backend",
            "spec.trainer.gpusPerReplica",
        ),
        cel=(
            Cel(
                "spec",
                f"!self.precision.fp8Param || !({RECIPE} in ['mxfp8', 'bf16'])",
                "precision.fp8Param: mxfp8 keeps two copies of a weight and bf16 none in FP8; set fp8Param: false, or recipe:"
                " blockwise",
            ),
            Cel(
                "spec",
                "!self.precision.fp8Param || self.trainer.backend != 'torch'",
                "precision.fp8Param: backend torch holds BF16 parameters; set fp8Param: false",
            ),
        ),
    ),
    Check(
        stochastic_rounding_is_the_trainers,
        reads=("spec.precision.rounding", "spec.precision.quantizeAt"),
        cel=(
            Cel(
                AT,
                "self.rounding != 'stochastic' || self.quantizeAt != 'engine'",
                "rounding: quantizeAt is engine, and vLLM rounds to nearest; set rounding: nearest, or quantizeAt: trainer",
            ),
        ),
    ),
    Check(
        fp32_scales_are_blockwise,
        reads=("spec.precision.scaleFormat", "spec.precision.recipe"),
        cel=(
            Cel(
                AT,
                "self.scaleFormat != 'fp32' || self.recipe != 'mxfp8'",
                "scaleFormat: mxfp8 has scales that are powers of two; set scaleFormat: auto, or recipe: blockwise",
            ),
        ),
    ),
)
