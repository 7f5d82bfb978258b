"""Which family a model belongs to, what its checkpoint must hold, and what is wrong with one. Pure, no torch.

A new family is one file with a `FAMILY` and one line here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.specs import (
    deepseek_v3,
    deepseek_v4,
    glm4_moe,
    llama,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
)
from fp8rl_workers.weights.specs.family import ModelFamily, TensorSpec, text_config

FAMILIES: tuple[ModelFamily, ...] = (
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    llama.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5_moe.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v4.FAMILY,
    glm4_moe.FAMILY,
)


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a `config.json`.

    Raises:
        InvalidModelError: none matches.
    """
    for family in FAMILIES:
        if family.matches(config):
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise InvalidModelError(
        f"config.json: architectures {config.get('architectures')!r}, model_type {config.get('model_type')!r} "
        f"is no known family; known are {known}; a family is one file in fp8rl_workers/weights/specs"
    )


def tensor_specs(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of the model's checkpoint, in the order in which they travel.

    Raises:
        InvalidModelError: unknown family, or a dimension is missing.
    """
    return family_of(config).tensors(config)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF name to shape of every tensor that a checkpoint must hold; a tied lm_head is not among them.

    Raises:
        InvalidModelError: unknown family, or a dimension is missing.
    """
    return {spec.name: spec.shape for spec in tensor_specs(config)}


def checkpoint_faults(config: Mapping[str, Any], found: Mapping[str, Sequence[int]]) -> list[str]:
    """One sentence for each tensor that is missing, of another shape, or unknown; empty for a sound checkpoint.

    A tied lm_head, rotary buffers (`inv_freq`) and layers for speculative decoding may be there. A missing expert is named
    with both places that a module may keep it in: flat, and under `routed_experts`.
    """
    family = family_of(config)
    expected = expected_tensors(config)
    faults = [
        f"{both_candidates(name)}: missing, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in found
    ]
    skipped = re.compile(skipped_names(config, family))
    for name, shape in found.items():
        if name not in expected:
            if name != "lm_head.weight" and not name.endswith(".inv_freq") and not skipped.match(name):
                faults.append(f"{name}: not a tensor of {family.name}")
        elif tuple(shape) != expected[name]:
            faults.append(f"{name}: shape {list(shape)}, but config.json says {list(expected[name])}")
    return faults


def skipped_names(config: Mapping[str, Any], family: ModelFamily) -> str:
    """A regular expression for names that never travel; `{layers}` in it is the number of decoder layers."""
    layers = text_config(config).get("num_hidden_layers", 0)
    return family.skipped.replace("{layers}", str(layers)) if family.skipped else r"(?!)"


def both_candidates(name: str) -> str:
    """An expert's name in both spellings; another name as it is."""
    head, mark, tail = name.partition(".experts.")
    return f"{name} (or {head}.experts.routed_experts.{tail})" if mark else name
