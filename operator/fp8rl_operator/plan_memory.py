"""What the plan remembers from pass to pass, read from the job's status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.plan_types import NodeRecord, Refusals, Verdict

ROLES = (names.TRAINER, names.INFERENCE, names.ORCHESTRATOR)
MAX_AHEAD_SECONDS = 3600  # no wait is longer: a later time is of a clock that was wrong


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
    """`uids`: pods of trainer and inference that were seen to run in this attempt, by role; `desired`: pods that were wanted.

    `restarts_before`: container restarts of a pod, by uid, when the last step ended; none for a pod that is not named.
    `fleet_attempt`: the attempt in which engines and orchestrator were started; they outlive the attempts of a lost trainer.
    `applied`: what the running attempt was made from (`plan_revisions`), None where that is not known. `started`: pods were
    made. `suspended_seconds`: of the job's life so far. Times in Unix seconds.
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
    desired: Mapping[str, int]
    applied: Mapping[str, str] | None
    started: bool
    suspended_seconds: float
    refusals: Refusals

    @classmethod
    def read(cls, status: Mapping[str, Any], now: float) -> Memory:
        """Read a status; a job without one starts now."""
        start = to_time(status.get("startTime"))
        attempt_time = to_time(status.get("attemptTime"))
        begun = now if start is None else start
        attempt = int(status.get("attempt", 0))
        return cls(
            attempt=attempt,
            fleet_attempt=int(status.get("fleetAttempt", attempt)),
            restarts=int(status.get("restarts", 0)),
            start_time=begun,
            attempt_time=begun if attempt_time is None else min(attempt_time, now + MAX_AHEAD_SECONDS),
            completion_time=to_time(status.get("completionTime")),
            suspended=condition(status, names.SUSPENDED) is not None,
            step=int(status.get("step", 0)),
            verdict=read_verdict(status),
            last_failure_reason=read_last_failure(status, attempt),
            uids={role: frozenset(status.get(role, {}).get("uids", ())) for role in (names.TRAINER, names.INFERENCE)},
            restarts_before={
                uid: count for role in ROLES for uid, count in status.get(role, {}).get("restartsBefore", {}).items()
            },
            desired={role: int(status.get(role, {}).get("desired", 0)) for role in ROLES},
            applied=status.get("applied"),
            started=start is not None,
            suspended_seconds=read_suspended(status, now),
            refusals=read_refusals(status, now),
        )

    def age(self, now: float) -> float:
        """How long the job has lived, suspended time not counted. Unit: seconds."""
        return now - self.start_time - self.suspended_seconds

    def attempt_of(self, role: str) -> int:
        """The attempt that the role's pods carry."""
        return self.attempt if role == names.TRAINER else self.fleet_attempt


def read_verdict(status: Mapping[str, Any]) -> Verdict | None:
    """The final condition, once there is one."""
    for kind in (names.COMPLETE, names.FAILED):
        if (final := condition(status, kind)) is not None:
            return Verdict(complete=kind == names.COMPLETE, reason=final["reason"], message=final["message"])
    return None


def read_last_failure(status: Mapping[str, Any], attempt: int) -> str:
    """Reason of the failure that the running attempt follows; empty when something else has begun it."""
    failure = status.get("lastFailure", {})
    return failure.get("reason", "") if failure.get("attempt", attempt - 1) == attempt - 1 else ""


def read_suspended(status: Mapping[str, Any], now: float) -> float:
    """Seconds of the job's life that it was suspended, the running suspension included."""
    since = to_time(status.get("suspendTime"))
    running = 0.0 if since is None else max(0.0, now - since)
    return float(status.get("suspendedSeconds", 0)) + running


def read_refusals(status: Mapping[str, Any], now: float) -> Refusals:
    """Refusals so far."""
    kept = status.get("refusals", {})
    return Refusals(
        rounds=int(kept.get("rounds", 0)),
        until=min(to_time(kept.get("until")) or 0.0, now + MAX_AHEAD_SECONDS),
        roles=tuple(kept.get("roles", ())),
        uids=tuple(kept.get("uids", ())),
        kept_engines=int(kept.get("keptEngines", 0)),
        nodes=tuple(
            NodeRecord(
                item["name"],
                int(item["refusals"]),
                bool(item["excluded"]),
                item["reason"],
                item["message"],
                to_time(item["lastTime"]) or 0.0,
            )
            for item in status.get("nodes", ())
        ),
        engines_avoid=tuple(kept.get("enginesAvoid", ())),
    )
