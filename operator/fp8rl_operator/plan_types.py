"""What a plan says. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl_operator import names
from fp8rl_workers.protocol import GroupDocument


@dataclass(frozen=True)
class Verdict:
    """The end of a job; final once it stands in status."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Waiting:
    """A reason with its sentence."""

    reason: str
    message: str


@dataclass(frozen=True)
class Loss:
    """A pod that the group cannot do without was lost. `permanent`: a new attempt would end the same way."""

    reason: str
    message: str
    permanent: bool = False


@dataclass(frozen=True)
class Outcome:
    """What an apply did. `failed`: `Kind/name` to the cluster's own words.

    `clashes`: `Kind/name` of objects that have a child's name and are not the job's: they were not touched.
    """

    changed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    clashes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One step of a job. Times in Unix seconds.

    `fleet_attempt`: the attempt in which engines and orchestrator were started. `running`: pods shall exist; `backing_off`:
    the trainer's not yet. `end_pods`: uids to end now. `group`: goes to the orchestrator.
    `waiting` becomes the reason of Ready and Reconciling, `stalled` that of Stalled, `verdict` that of Complete or
    Failed. `resumed`: the job was suspended until now. `loss`: why a new attempt begins.
    """

    attempt: int
    fleet_attempt: int
    restarts: int
    attempt_time: float
    running: bool = False
    backing_off: bool = False
    suspended: bool = False
    resumed: bool = False
    hands_off: bool = False
    delete_job: bool = False
    end_pods: tuple[str, ...] = ()
    group: GroupDocument | None = None
    verdict: Verdict | None = None
    waiting: Waiting | None = None
    stalled: Waiting | None = None
    loss: Loss | None = None
    requeue_after: float = 15.0

    def attempt_of(self, role: str) -> int:
        """The attempt that the role's pods carry."""
        return self.attempt if role == names.TRAINER else self.fleet_attempt

    def replicas(self, role: str, asked: int) -> int:
        """Pods of a role that shall exist now."""
        waits = role == names.TRAINER and self.backing_off
        return asked if self.running and not waits else 0
