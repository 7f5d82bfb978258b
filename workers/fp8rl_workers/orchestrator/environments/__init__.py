"""Environments by id. Imports no torch and no optional library before an environment is asked for.

Reading order: `base` (the protocol), `reverse_text` (one turn), `arithmetic` (one turn, partial credit), `calculator`
(several turns and a tool), `verifiers_adapter` (`verifiers:NAME`, tasksets of that library, extra `verifiers`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from pydantic import ValidationError

from fp8rl_workers.orchestrator.environments.base import (
    Client,
    Completion,
    Environment,
    Example,
    Segment,
    Split,
    Trajectory,
    given,
    sampled,
)

__all__ = [
    "REGISTRY",
    "Client",
    "Completion",
    "Environment",
    "Example",
    "Segment",
    "Split",
    "Trajectory",
    "given",
    "make_environment",
    "sampled",
]

VERIFIERS = "verifiers:"

REGISTRY: dict[str, tuple[str, str]] = {
    "reverse-text": ("reverse_text", "ReverseText"),
    "arithmetic": ("arithmetic", "Arithmetic"),
    "calculator": ("calculator", "Calculator"),
}


def make_environment(environment_id: str, args: dict[str, Any]) -> Environment:
    """Make the environment `environment_id` with its own arguments.

    Raises:
        ValueError: the id is unknown (the message lists the known ones), or args do not fit (every fault is named).
        ImportError: the environment needs an extra that is not installed; the message names it.
    """
    if environment_id not in REGISTRY and not environment_id.startswith(VERIFIERS):
        known = ", ".join([*sorted(REGISTRY), f"{VERIFIERS}NAME"])
        raise ValueError(f"environment.id: {environment_id!r} is unknown; known are {known}")
    try:
        return _make(environment_id, args)
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors())
        raise ValueError(f"environment {environment_id!r}: {faults}") from error


def _make(environment_id: str, args: dict[str, Any]) -> Environment:
    if environment_id.startswith(VERIFIERS):
        from fp8rl_workers.orchestrator.environments.verifiers_adapter import VerifiersArgs, VerifiersEnvironment

        return VerifiersEnvironment(environment_id, VerifiersArgs(**args))
    module_name, class_name = REGISTRY[environment_id]
    factory = getattr(import_module(f"{__name__}.{module_name}"), class_name)
    return cast("Environment", factory(**args))


def _fault(location: tuple[int | str, ...], message: str, value: object) -> str:
    path = ".".join(["environment.args", *(str(part) for part in location)])
    return f"{path}: {message}, got {value!r}"
