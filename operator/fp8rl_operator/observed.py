"""What one pass of the reconcile sees, the same for every world. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8rl_workers.protocol import OrchestratorStatus, TrainerState

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True)
class PodState:
    """One pod of the job. `exit_code`, `reason` and `message` are those of the container that ended or waits.

    `starting` is true until its init containers are done; until then `restarts` counts their restarts, then those of its
    containers.
    """

    name: str
    uid: str
    role: str
    attempt: int
    phase: PodPhase = "Running"
    ready: bool = False
    terminating: bool = False
    starting: bool = False
    ip: str = ""
    restarts: int = 0
    exit_code: int | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Observed:
    """Pods, and what orchestrator and trainer answered (None: no answer). `token`: the job's control token, once made."""

    pods: tuple[PodState, ...] = ()
    orchestrator: OrchestratorStatus | None = None
    trainer: TrainerState | None = None
    token: str | None = None

    def of_role(self, role: str, attempt: int) -> tuple[PodState, ...]:
        """Pods of a role in an attempt that are not being deleted, by name."""
        mine = [pod for pod in self.pods if pod.role == role and pod.attempt == attempt and not pod.terminating]
        return tuple(sorted(mine, key=lambda pod: pod.name))
