"""Ignore patterns: which modules a line of `precision.ignoredLayers` means. Pure.

A pattern is a run of dotted components that must equal a run of the module's components, with `*` and `?` inside one
component: `mlp.gate` means `model.layers.3.mlp.gate`, never `mlp.gate_up_proj` or `mlp.gate_proj`; `layers.1` never means
layer 11; `self_attn` means all four projections. `re:<expression>` is a regular expression that must match the whole name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from fp8rl_workers.errors import InvalidInputError

Matcher = Callable[[str], bool]


def compile_pattern(pattern: str) -> Matcher:
    """A function that says whether a module's full name is meant.

    Raises:
        InvalidInputError: empty, an empty component, or no regular expression.
    """
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise InvalidInputError(
                f"precision.ignoredLayers: {pattern!r} is no regular expression: {error}"
            ) from error
        return lambda name: expression.fullmatch(name) is not None
    wanted = pattern.split(".")
    if not all(wanted):
        raise InvalidInputError(
            f"precision.ignoredLayers: {pattern!r} has an empty component; write a module's name or the last part of it, "
            "like 'mlp.gate' or 'model.layers.0.self_attn', or 're:<expression>'"
        )
    return lambda name: _contains_run(name.split("."), wanted)


def _contains_run(components: list[str], wanted: list[str]) -> bool:
    return any(
        all(fnmatchcase(have, want) for have, want in zip(components[at:], wanted, strict=False))
        for at in range(len(components) - len(wanted) + 1)
    )
