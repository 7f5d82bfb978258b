"""The failure cases of the job: what is broken, and what the plan and the status then are, in every world.

A world (pure observations, processes of one machine, Kubernetes) brings a running job of two engines to the state that
`strike` names and compares `Expected` with the job's status once it has settled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Strike = Literal["kill", "delete", "says", "edit", "none"]


@dataclass(frozen=True)
class Expected:
    """Essence of the status afterwards. `conditions`: type to (status, reason). `new_pods`: roles whose pods are new ones."""

    attempt: int = 0
    restarts: int = 0
    last_failure: str | None = None
    conditions: dict[str, tuple[str, str]] = field(default_factory=dict)
    new_pods: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    """`kill`: SIGKILL of the role's process; `delete`: its pod goes; `says`: it reports phase failed with `word`.

    `edit`: somebody edits the spec of the running job, `change` is merged over it. `engines`: how many there are afterwards.
    """

    name: str
    strike: Strike
    role: str = ""
    word: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    engines: int = 2
    expected: Expected = Expected()


ALL = frozenset({"trainer", "inference", "orchestrator"})
TRAINER = frozenset({"trainer"})


def policy(**changes: Any) -> dict[str, Any]:
    """A failure policy without waiting."""
    return {"failurePolicy": {"backoffSeconds": 0, **changes}}


def failed(reason: str, **changes: Any) -> Expected:
    """The job has ended as Failed."""
    conditions = {"Failed": ("True", reason), "Complete": ("False", reason), "Ready": ("False", reason)}
    return Expected(conditions=conditions, **changes)


RUNNING = {"Ready": ("True", "Running"), "Failed": ("False", "Running"), "Complete": ("False", "Running")}

CASES = (
    Case(
        "a killed trainer costs an attempt, and the engines go on",
        "kill",
        "trainer",
        spec=policy(),
        expected=Expected(1, 1, "TrainerLost", RUNNING, TRAINER),
    ),
    Case(
        "a deleted trainer pod costs an attempt, and the engines go on",
        "delete",
        "trainer",
        spec=policy(),
        expected=Expected(1, 1, "TrainerLost", RUNNING, TRAINER),
    ),
    Case(
        "a killed trainer without a budget ends the job",
        "kill",
        "trainer",
        spec=policy(maxRestarts=0),
        expected=failed("RestartsExhausted", last_failure="TrainerLost"),
    ),
    Case(
        "a killed engine is started again in place under shrink",
        "kill",
        "inference",
        spec=policy(),
        expected=Expected(conditions=RUNNING),
    ),
    Case(
        "a deleted engine pod is replaced under shrink",
        "delete",
        "inference",
        spec=policy(),
        expected=Expected(conditions=RUNNING, new_pods=frozenset({"inference"})),
    ),
    Case(
        "a killed engine costs an attempt of the whole job under restart",
        "kill",
        "inference",
        spec=policy(replicaLoss="restart"),
        expected=Expected(1, 1, "EngineLost", RUNNING, ALL),
    ),
    Case(
        "a killed orchestrator is started again in place",
        "kill",
        "orchestrator",
        spec=policy(),
        expected=Expected(conditions=RUNNING),
    ),
    Case(
        "a trainer that says its model is wrong ends the job at once",
        "says",
        "trainer",
        "InvalidModel",
        spec=policy(),
        expected=failed("InvalidModel"),
    ),
    Case(
        "an orchestrator that says NaN ends the job at once",
        "says",
        "orchestrator",
        "NaN",
        spec=policy(),
        expected=failed("NaN"),
    ),
    Case(
        "a trainer out of memory gets one more attempt",
        "says",
        "trainer",
        "TrainerOutOfMemory",
        spec=policy(),
        expected=Expected(1, 1, "TrainerOutOfMemory", RUNNING, TRAINER),
    ),
    Case(
        "a deleted orchestrator pod is replaced and costs nothing",
        "delete",
        "orchestrator",
        spec=policy(),
        expected=Expected(conditions=RUNNING, new_pods=frozenset({"orchestrator"})),
    ),
    Case(
        "an edit of the trainer restarts the trainer and costs nothing",
        "edit",
        spec=policy(),
        change={"trainer": {"optimizer": {"learningRate": "6e-4"}}},
        expected=Expected(1, 0, None, RUNNING, TRAINER),
    ),
    Case(
        "an edit of the rollouts restarts the whole job and costs nothing",
        "edit",
        spec=policy(),
        change={"rollout": {"maxTokens": 9}},
        expected=Expected(1, 0, None, RUNNING, ALL),
    ),
    Case(
        "an edit of what changes in place restarts nobody",
        "edit",
        spec=policy(),
        change=policy(maxRestarts=9) | {"stallDeadlineSeconds": 901},
        expected=Expected(conditions=RUNNING),
    ),
    Case(
        "one engine more joins",
        "edit",
        spec=policy(replicaLoss="restart"),
        change={"inference": {"replicas": 3}},
        engines=3,
        expected=Expected(conditions=RUNNING, new_pods=frozenset({"inference"})),
    ),
    Case(
        "one engine fewer is no loss",
        "edit",
        spec=policy(replicaLoss="restart"),
        change={"inference": {"replicas": 1}},
        engines=1,
        expected=Expected(conditions=RUNNING),
    ),
    Case("nothing broken, nothing changes", "none", spec=policy(), expected=Expected(conditions=RUNNING)),
)


def essence(status: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """What of a status `expected` speaks about."""
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    return {
        "attempt": status["attempt"],
        "restarts": status["restarts"],
        "last_failure": status.get("lastFailure", {}).get("reason"),
        "conditions": {kind: conditions.get(kind) for kind in expected.conditions},
    }


def wanted(expected: Expected) -> dict[str, Any]:
    """`Expected` in the shape of `essence`."""
    return {
        "attempt": expected.attempt,
        "restarts": expected.restarts,
        "last_failure": expected.last_failure,
        "conditions": expected.conditions,
    }
