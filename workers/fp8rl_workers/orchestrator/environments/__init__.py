"""Environments by id. Imports no torch and no optional library before an environment is asked for.

Reading order: `base` (the protocol), `reverse_text` (one turn), `arithmetic` (one turn, partial credit), `calculator`
(several turns and a tool), `verifiers` (environments of the library of that name, extra `verifiers`).
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
    if environment_id not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise ValueError(f"environment.id: {environment_id!r} is unknown; known are {known}")
    module_name, class_name = REGISTRY[environment_id]
    factory = getattr(import_module(f"{__name__}.{module_name}"), class_name)
    try:
        return cast("Environment", factory(**args))
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors())
        raise ValueError(f"environment {environment_id!r}: {faults}") from error


def _fault(location: tuple[int | str, ...], message: str, value: object) -> str:
    path = ".".join(["environment.args", *(str(part) for part in location)])
    return f"{path}: {message}, got {value!r}"
