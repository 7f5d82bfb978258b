"""What a running attempt was made from, and whom a change of the spec restarts. Pure.

In place, nothing restarts: `IN_PLACE`. A change below `trainer` is a new attempt of the trainer, any other one of the whole
job; neither costs a restart of the budget. Compared are the fields that are not at their default, so that a release that adds a
field changes no running job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.job import JobSpec

IN_PLACE = frozenset(
    {
        "suspend",
        "managedBy",
        "inference.replicas",
        "inference.minReplicas",
        "failurePolicy",
        "activeDeadlineSeconds",
        "preRunningDeadlineSeconds",
        "stallDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "cleanupPolicy",
        "podDisruptionBudget",
        "networkPolicy",
    }
)
REMEMBERED = 32  # specs: twice the passes that run at once
MAX_VERBATIM = 64
MAX_TOLD = 8
DIGEST = "sha256:"
OF_TRAINER = "trainer."


@dataclass(frozen=True, eq=False)
class Same:
    """A spec, equal to itself only: so a pass, which asks a few times, works it out once."""

    spec: JobSpec

    def __hash__(self) -> int:
        """By identity."""
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        """By identity."""
        return isinstance(other, Same) and other.spec is self.spec


def applied(job: FP8RLJob) -> dict[str, str]:
    """Fields whose change restarts somebody, as `section.field` to the value, or to its digest where that is long."""
    return dict(found(Same(job.spec)))


@lru_cache(maxsize=REMEMBERED)
def found(same: Same) -> Mapping[str, str]:
    """`applied` of a spec."""
    spec = same.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    flat: dict[str, Any] = {}
    for section, value in spec.items():
        flat |= (
            {f"{section}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {section: value}
        )
    kept = {path: value for path, value in sorted(flat.items()) if not {path, path.split(".")[0]} & IN_PLACE}
    return {path: written(value) for path, value in kept.items() if value not in ({}, [])}


def written(value: Any) -> str:
    """A value as short JSON, or its digest."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= MAX_VERBATIM else f"{DIGEST}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def revision(job: FP8RLJob, role: str) -> str:
    """Ten hex digits that stand for all that the role's pods and config are made from."""
    fields = {path: text for path, text in applied(job).items() if role == names.TRAINER or not of_trainer(path)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:10]


def of_trainer(path: str) -> bool:
    """Whether a change of the field restarts the trainer alone."""
    return path.startswith(OF_TRAINER)


def changed(before: Mapping[str, str] | None, job: FP8RLJob) -> tuple[str, ...]:
    """Fields that differ from those of the running attempt; none where that was not written down."""
    if before is None:
        return ()
    now = applied(job)
    return tuple(sorted(path for path in {*before, *now} if before.get(path) != now.get(path)))


def change_text(before: Mapping[str, str], job: FP8RLJob, fields: tuple[str, ...]) -> str:
    """One sentence: which fields have changed from what to what, and who starts again."""
    now = applied(job)
    parts = [f"spec.{path} is {shown(now.get(path))}, was {shown(before.get(path))}" for path in fields[:MAX_TOLD]]
    more = [f"{len(fields) - MAX_TOLD} more fields have changed"] if len(fields) > MAX_TOLD else []
    who = "the trainer" if all(map(of_trainer, fields)) else "the whole job"
    return f"{'; '.join([*parts, *more])}: a new attempt of {who}, which costs no restart"


def shown(text: str | None) -> str:
    """A value for people."""
    if text is None:
        return "the default"
    return "another one" if text.startswith(DIGEST) else text
