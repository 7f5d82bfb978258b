"""What a plan says. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """A reason with its sentence. `person`: it goes on only when somebody puts something right."""

    reason: str
    message: str
    person: bool = False


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
class NodeRecord:
    """A node whose kubelet refused pods of the job. `refusals` counts at most one a back-off. `last_time` in Unix seconds."""

    name: str
    refusals: int
    excluded: bool
    reason: str
    message: str
    last_time: float


@dataclass(frozen=True)
class Refusals:
    """What kubelets refused, over the job's life. `rounds`: back-offs in a row without a success. `until` in Unix seconds.

    `roles`: those that wait until then. `uids`: pods that were counted, the newest last. `kept_engines`: engines that run
    meanwhile. `engines_avoid`: excluded nodes that the engines' template keeps away from.
    """

    rounds: int = 0
    until: float = 0.0
    roles: tuple[str, ...] = ()
    uids: tuple[str, ...] = ()
    kept_engines: int = 0
    nodes: tuple[NodeRecord, ...] = ()
    engines_avoid: tuple[str, ...] = ()

    @property
    def excluded(self) -> tuple[str, ...]:
        """Names of the nodes that the job keeps away from, sorted."""
        return tuple(sorted(node.name for node in self.nodes if node.excluded))


@dataclass(frozen=True)
class Plan:
    """One step of a job. Times in Unix seconds.

    `fleet_attempt`: the attempt in which engines and orchestrator were started. `running`: pods shall exist; `backing_off`:
    the trainer's not yet. `end_pods`: uids to end now; `force_pods`: uids to delete with a grace of 0, their node has not let
    them go. `group`: goes to the orchestrator. `waiting` becomes the reason of Ready and Reconciling, `stalled` that of
    Stalled, `verdict` that of Complete or Failed. `resumed`: the job was suspended until now. `loss`: why a new attempt
    begins; `changed`: fields of the spec for which one begins, which costs no restart. `refused`: refusals were counted in
    this pass. `refusals` is kept in status. `suspended_seconds`: of the job's life so far.
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
    force_pods: tuple[str, ...] = ()
    group: GroupDocument | None = None
    verdict: Verdict | None = None
    waiting: Waiting | None = None
    stalled: Waiting | None = None
    loss: Loss | None = None
    changed: tuple[str, ...] = ()
    refused: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    suspended_seconds: float = 0.0
    most: Mapping[str, int] = field(default_factory=dict)
    requeue_after: float = 15.0

    def attempt_of(self, role: str) -> int:
        """The attempt that the role's pods carry."""
        return self.attempt if role == names.TRAINER else self.fleet_attempt

    def replicas(self, role: str, asked: int) -> int:
        """Pods of a role that shall exist now; `most` holds back those whose nodes refused them."""
        waits = role == names.TRAINER and self.backing_off
        return min(asked, self.most.get(role, asked)) if self.running and not waits else 0

    def excluded_from(self, role: str) -> tuple[str, ...]:
        """Names of the nodes that the role's pod template keeps away from (kubernetes.io/hostname NotIn), sorted.

        The engines' template learns of a new one when no engine is up or a new fleet starts: a change would roll them.
        """
        return self.refusals.engines_avoid if role == names.INFERENCE else self.excluded_nodes

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that refused this job's pods too often, sorted."""
        return self.refusals.excluded
