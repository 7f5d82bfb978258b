"""What the plan remembers from pass to pass, read from the job's status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.plan_types import Verdict


def to_time(text: str | None) -> float | None:
    """RFC 3339 to Unix seconds."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def from_time(seconds: float) -> str:
    """Unix seconds to RFC 3339 in UTC, whole seconds as metav1.Time has them."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """A condition of a status that is True."""
    found = next((item for item in status.get("conditions", []) if item["type"] == kind), None)
    return found if found is not None and found["status"] == "True" else None


@dataclass(frozen=True)
class Memory:
    """`uids`: pods of trainer and inference that were seen to run in this attempt, by role. Times in Unix seconds.

    `restarts_before`: container restarts of a pod, by uid, when the last step ended; none for a pod that is not named.

    `fleet_attempt`: the attempt in which engines and orchestrator were started; they outlive the attempts of a lost trainer.
    """

    attempt: int
    fleet_attempt: int
    restarts: int
    start_time: float
    attempt_time: float
    completion_time: float | None
    suspended: bool
    step: int
    verdict: Verdict | None
    last_failure_reason: str
    uids: Mapping[str, frozenset[str]]
    restarts_before: Mapping[str, int]

    @classmethod
    def read(cls, status: Mapping[str, Any], now: float) -> Memory:
        """Read a status; a job without one starts now."""
        start = to_time(status.get("startTime"))
        attempt_time = to_time(status.get("attemptTime"))
        begun = now if start is None else start
        return cls(
            attempt=int(status.get("attempt", 0)),
            fleet_attempt=int(status.get("fleetAttempt", status.get("attempt", 0))),
            restarts=int(status.get("restarts", 0)),
            start_time=begun,
            attempt_time=begun if attempt_time is None else attempt_time,
            completion_time=to_time(status.get("completionTime")),
            suspended=condition(status, names.SUSPENDED) is not None,
            step=int(status.get("step", 0)),
            verdict=read_verdict(status),
            last_failure_reason=status.get("lastFailure", {}).get("reason", ""),
            uids={role: frozenset(status.get(role, {}).get("uids", ())) for role in (names.TRAINER, names.INFERENCE)},
            restarts_before={
                uid: count
                for role in (names.TRAINER, names.INFERENCE, names.ORCHESTRATOR)
                for uid, count in status.get(role, {}).get("restartsBefore", {}).items()
            },
        )

    def attempt_of(self, role: str) -> int:
        """The attempt that the role's pods carry."""
        return self.attempt if role == names.TRAINER else self.fleet_attempt


def read_verdict(status: Mapping[str, Any]) -> Verdict | None:
    """The final condition, once there is one."""
    for kind in (names.COMPLETE, names.FAILED):
        if (final := condition(status, kind)) is not None:
            return Verdict(complete=kind == names.COMPLETE, reason=final["reason"], message=final["message"])
    return None
