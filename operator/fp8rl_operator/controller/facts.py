"""What the metrics tell of a job, read from its object as it came. Small, for there is one of each job in memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl_operator import names

ROLES = (names.TRAINER, names.INFERENCE, names.ORCHESTRATOR)
LIMITS = {
    "mismatch_kl_warn": ("limits", "mismatchKL", "warn"),
    "mismatch_kl_stop": ("limits", "mismatchKL", "stop"),
    "logprob_diff_p99": ("limits", "logprobDiffP99"),
    "tis_truncated": ("limits", "tisTruncated"),
    "ratio_deviation": ("limits", "ratioDeviation"),
    "max_off_policy_steps": ("rollout", "maxOffPolicySteps"),
    "max_restarts": ("failurePolicy", "maxRestarts"),
    "stall_deadline_seconds": ("stallDeadlineSeconds",),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """One job. `conditions`: type and status. `pods`: role, desired and ready. `limits`: values by `LIMITS`' order."""

    namespace: str
    name: str
    generation: int
    recipe: str
    wire: str
    step: int
    steps: int
    version: int
    epoch: int
    attempt: int
    restarts: int
    conditions: tuple[tuple[str, str], ...]
    pods: tuple[tuple[str, int, int], ...]
    limits: tuple[float | None, ...]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Facts:
        """Facts of an object of the API server, whatever is missing in it."""
        metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        precision = status.get("precision") or {}
        return cls(
            namespace=sys.intern(metadata.get("namespace", "default")),
            name=metadata["name"],
            generation=number(metadata.get("generation")),
            recipe=sys.intern(str(precision.get("recipe") or at(spec, "precision", "recipe") or "")),
            wire=sys.intern(str(precision.get("wire") or at(spec, "precision", "wire") or "")),
            step=number(status.get("step")),
            steps=number(at(spec, "rollout", "steps")),
            version=number(status.get("version")),
            epoch=number(at(status, "weightSyncGroup", "epoch")),
            attempt=number(status.get("attempt")),
            restarts=number(status.get("restarts")),
            conditions=tuple(conditions(status)),
            pods=tuple(pods(status)),
            limits=tuple(decimal(at(spec, *path)) for path in LIMITS.values()),
        )


def at(value: Any, *path: str) -> Any:
    """The value below a path, None where there is none."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def number(value: Any) -> int:
    """A counter of the status; 0 where it is none."""
    return value if isinstance(value, int) else 0


def decimal(value: Any) -> float | None:
    """A decimal of the spec, which may be a string; None where it is none."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None


def conditions(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Type and status of each condition."""
    for item in status.get("conditions") or ():
        yield sys.intern(str(item.get("type"))), sys.intern(str(item.get("status")))


def pods(status: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Role, desired and ready pods."""
    for role in ROLES:
        if isinstance(state := status.get(role), Mapping):
            yield role, number(state.get("desired")), number(state.get("ready"))
