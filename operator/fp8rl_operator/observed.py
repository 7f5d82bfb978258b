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
    containers. `gone_by`: when its grace period ends, in Unix seconds, of a pod that is being deleted
    (metadata.deletionTimestamp). `unreachable`: its node has lost touch (Ready is False although all containers are ready and
    no readiness gate says so: only the node controller writes that).
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
    node: str = ""
    gone_by: float | None = None
    unreachable: bool = False


@dataclass(frozen=True)
class Refusal:
    """A pod that a node's kubelet refused to admit: UnexpectedAdmissionError, TopologyAffinityError and their like."""

    uid: str
    role: str
    node: str
    reason: str
    message: str


@dataclass(frozen=True)
class Trouble:
    """What the cluster says of a workload or of a claim that keeps a role from its pods, in the cluster's own words."""

    role: str
    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """Pods, and what orchestrator and trainer answered (None: no answer). `token`: the job's control token, once made.

    `refusals`: pods that kubelets refused since the last pass that wrote a status, also those that are gone again.
    `troubles`: quotas, claims that do not bind, volumes that do not mount. `blocked`: what a person must put right before
    any pod is made (a claim that is missing or cannot serve all pods, a storage class that does not exist).
    """

    pods: tuple[PodState, ...] = ()
    orchestrator: OrchestratorStatus | None = None
    trainer: TrainerState | None = None
    token: str | None = None
    refusals: tuple[Refusal, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    blocked: Trouble | None = None

    def of_role(self, role: str, attempt: int) -> tuple[PodState, ...]:
        """Pods of a role in an attempt that are not being deleted, by name."""
        mine = [pod for pod in self.pods if pod.role == role and pod.attempt == attempt and not pod.terminating]
        return tuple(sorted(mine, key=lambda pod: pod.name))
