"""Formats that the cards named in the spec cannot compute."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.names import GPU_PRODUCT_LABEL
from fp8rl_operator.spec.cards import Capability, capability, cards_pattern
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.checks.precision import RECIPE, known_recipe
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.pods import PodTemplate

FP8_SERVING: Capability = (8, 9)
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)
CONSUMER_BLACKWELL: Capability = (12, 0)
SERVING_CARDS = "L4, L40S, RTX 6000 Ada, RTX PRO 6000, H100, H200, B200, GB200"


def products(job: FP8RLJob, template: PodTemplate, path: str) -> list[tuple[str, str]]:
    """(field path, product label) of each card that a role may get: its template's nodeSelector over topology.gpuProduct."""
    selector = template.spec.get("nodeSelector")
    if isinstance(selector, dict) and isinstance(selector.get(GPU_PRODUCT_LABEL), str):
        return [(f"{path}.template.spec.nodeSelector", selector[GPU_PRODUCT_LABEL])]
    return [(f"spec.topology.gpuProduct[{i}]", product) for i, product in enumerate(job.spec.topology.gpu_product)]


def trainer_computes_recipe(job: FP8RLJob) -> Iterator[Fault]:
    """Transformer Engine refuses block scaling below 9.0 and MXFP8 outside 10.x; explicit blockwise on 10.x is emulated."""
    trainer, recipe = job.spec.trainer, known_recipe(job)
    if trainer.backend != "megatron" or trainer.gpus_per_replica == 0 or recipe == "bf16":
        return
    for path, product in products(job, trainer.template, "spec.trainer"):
        found = capability(product)
        if found is not None:
            yield from _recipe_on_card(path, product, found, recipe)


def _recipe_on_card(path: str, product: str, found: Capability, recipe: str) -> Iterator[Fault]:
    on = f"has compute capability {found[0]}.{found[1]}"
    if found < HOPPER or found >= CONSUMER_BLACKWELL:
        why = "block scaling needs 9.0 or more" if found < HOPPER else "MXFP8 is not supported from 12.0 on"
        yield Fault(
            path,
            product,
            f"{on}, where Transformer Engine refuses FP8 training ({why}), and precision.recipe is {recipe}",
            "set precision.recipe: bf16, or train on H100, H200, B200 or GB200 (such a card may serve)",
        )
    elif recipe == "mxfp8" and found < BLACKWELL:
        yield Fault(
            path, product, f"{on}, and recipe mxfp8 needs 10.0 or more", "set precision.recipe: blockwise, or auto"
        )
    elif recipe == "blockwise" and found >= BLACKWELL:
        yield Fault(
            path,
            product,
            f"{on}, where Transformer Engine emulates recipe blockwise",
            "set precision.recipe: auto (mxfp8 here) unless blockwise is wanted",
            level="warning",
        )


def engines_serve_fp8(job: FP8RLJob) -> Iterator[Fault]:
    """FP8 serving needs 8.9 or more."""
    wire = job.spec.precision.wire
    if (known_recipe(job) if wire == "auto" else wire) != "bf16":
        yield from _serving("spec.inference", job, job.spec.inference.template, job.spec.inference.gpus_per_replica)
    for index, sampler in enumerate(job.spec.samplers):
        yield from _serving(f"spec.samplers[{index}]", job, sampler.template, sampler.gpus_per_replica)


def _serving(pool: str, job: FP8RLJob, template: PodTemplate, gpus: int) -> Iterator[Fault]:
    if gpus == 0:
        return
    for path, product in products(job, template, pool):
        found = capability(product)
        if found is not None and found < FP8_SERVING:
            yield Fault(
                path,
                product,
                f"has compute capability {found[0]}.{found[1]}, and FP8 serving needs 8.9 or more ({pool})",
                f"set precision.wire: bf16 with recipe: bf16, or use one of {SERVING_CARDS}",
            )


def blackwell_scales_are_pow2(job: FP8RLJob) -> Iterator[Fault]:
    """Blackwell's FP8 kernels take scales that are powers of two; DeepGEMM would round fp32 ones a second time."""
    if job.spec.precision.scale_format != "fp32":
        return
    roles = [("spec.trainer", job.spec.trainer.template), ("spec.inference", job.spec.inference.template)]
    for path, product in dict.fromkeys(found for role, template in roles for found in products(job, template, role)):
        found = capability(product)
        if found is not None and found >= BLACKWELL:
            yield Fault(
                "spec.precision.scaleFormat",
                "fp32",
                f"{path} {product} is Blackwell ({found[0]}.{found[1]}), whose kernels take scales that are powers of two",
                "set scaleFormat: auto, or pow2",
            )


def templates_pick_listed_cards(job: FP8RLJob) -> Iterator[Fault]:
    """A template's card is one of topology.gpuProduct, or no node fits both."""
    listed, spec = job.spec.topology.gpu_product, job.spec
    roles = [("spec.trainer", spec.trainer.template), ("spec.inference", spec.inference.template)]
    roles += [(f"spec.samplers[{i}]", sampler.template) for i, sampler in enumerate(spec.samplers)]
    for role, template in roles:
        for path, product in products(job, template, role):
            if listed and product not in listed:
                yield Fault(
                    path,
                    product,
                    f"is not in spec.topology.gpuProduct ({', '.join(listed)}), so no node fits both",
                    "add it to spec.topology.gpuProduct",
                )


ALL_LISTED = "has(self.topology.gpuProduct) && size(self.topology.gpuProduct) > 0 && self.topology.gpuProduct.all(p, p.matches('{pattern}'))"
NO_TRAINING = f"(?:{cards_pattern((0, 0), HOPPER)}|{cards_pattern(CONSUMER_BLACKWELL, (99, 0))})"
NO_SERVING = cards_pattern((0, 0), FP8_SERVING)
HOPPER_CARDS = cards_pattern(HOPPER, BLACKWELL)
BLACKWELL_CARDS = cards_pattern(BLACKWELL, (99, 0))
WIRE = f"(self.precision.wire == 'auto' ? {RECIPE} : self.precision.wire)"
PRODUCTS = ("spec.topology.gpuProduct", "spec.trainer.template", "spec.inference.template", "spec.samplers")
BEYOND = "the card that a template's nodeSelector picks from the list: free JSON has no CEL type"

CHECKS = (
    Check(
        trainer_computes_recipe,
        reads=(*PRODUCTS, "spec.precision.recipe", "spec.trainer.backend", "spec.trainer.gpusPerReplica"),
        cel=(
            Cel(
                "spec",
                f"self.trainer.backend != 'megatron' || self.trainer.gpusPerReplica == 0 || {RECIPE} == 'bf16' ||"
                f" !({ALL_LISTED.format(pattern=NO_TRAINING)})",
                "topology.gpuProduct: Transformer Engine refuses FP8 training below compute capability 9.0 and from 12.0 on;"
                " set precision.recipe: bf16, or train on H100, H200, B200 or GB200",
            ),
            Cel(
                "spec",
                "self.trainer.backend != 'megatron' || self.precision.recipe != 'mxfp8' ||"
                f" !({ALL_LISTED.format(pattern=HOPPER_CARDS)})",
                "precision.recipe: mxfp8 needs compute capability 10.0 or more; set recipe: blockwise, or auto",
            ),
        ),
        beyond_cel=BEYOND,
    ),
    Check(
        engines_serve_fp8,
        reads=(*PRODUCTS, "spec.precision.recipe", "spec.precision.wire", "spec.inference.gpusPerReplica"),
        cel=(
            Cel(
                "spec",
                f"self.inference.gpusPerReplica == 0 || {WIRE} == 'bf16' || !({ALL_LISTED.format(pattern=NO_SERVING)})",
                "topology.gpuProduct: FP8 serving needs compute capability 8.9 or more; set precision.wire: bf16 with recipe:"
                f" bf16, or use one of {SERVING_CARDS}",
            ),
        ),
        beyond_cel=BEYOND,
    ),
    Check(
        blackwell_scales_are_pow2,
        reads=(*PRODUCTS, "spec.precision.scaleFormat"),
        cel=(
            Cel(
                "spec",
                f"self.precision.scaleFormat != 'fp32' || !({ALL_LISTED.format(pattern=BLACKWELL_CARDS)})",
                "precision.scaleFormat: Blackwell's FP8 kernels take scales that are powers of two; set scaleFormat: auto",
            ),
        ),
        beyond_cel=BEYOND,
    ),
    Check(templates_pick_listed_cards, reads=PRODUCTS, beyond_cel=BEYOND),
)
