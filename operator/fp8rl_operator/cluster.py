"""The seam between decisions and a world: what the reconcile asks of a cluster. Adapters: one machine (`local`), the API of Kubernetes (`kube`).

An adapter raises `ClusterError` when the world cannot be read; what single objects failed with stands in `Outcome`.
"""

from __future__ import annotations

from typing import Any, Protocol

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import Plan
from fp8rl_operator.plan_types import Outcome
from fp8rl_operator.spec import FP8RLJob

__all__ = ["Cluster", "ClusterError", "Object", "Outcome"]

Object = dict[str, Any]


class ClusterError(Exception):
    """Raised when a cluster cannot be read or written at all; the pass is tried again later."""


class Cluster(Protocol):
    """A world that holds the children of jobs."""

    async def observe(self, job: FP8RLJob) -> Observed:
        """Read the job's children and ask its orchestrator and trainer.

        Raises:
            ClusterError: the cluster cannot be read.
        """
        ...

    async def apply(self, job: FP8RLJob, objects: list[Object], plan: Plan) -> Outcome:
        """Make the job's children equal to `objects`, end the pods and hand over the group that the plan names."""
        ...

    async def write_status(self, job: FP8RLJob, status: dict[str, Any]) -> None:
        """Replace the job's status.

        Raises:
            ClusterError: the status cannot be written.
        """
        ...

    async def record(self, job: FP8RLJob, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an event of the job."""
        ...
