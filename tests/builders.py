"""Builders for tests: state only what differs."""

from __future__ import annotations

import copy
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.spec import FP8RLJob, parse
from fp8rl_workers.protocol import OrchestratorStatus, TrainerState

UID = "6b1f0b6e-0000-4000-8000-000000000001"
SPEC: dict[str, Any] = {
    "model": {"source": {"builtin": {"name": "reverse-text-tiny"}}},
    "trainer": {
        "backend": "torch",
        "gpusPerReplica": 0,
        "offload": "none",
        "optimizer": {"learningRate": "5e-4"},
    },
    "inference": {"replicas": 2, "gpusPerReplica": 0},
    "rollout": {"environment": {"id": "reverse-text"}, "steps": 4, "batchSize": 8, "groupSize": 4, "maxTokens": 8},
}


def make_body(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """A manifest; `spec` is merged over a small valid one."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "job", "namespace": "team", "uid": UID, "generation": 1, **metadata},
        "spec": merge(copy.deepcopy(SPEC), spec or {}),
    }


def make_job(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **metadata: Any) -> FP8RLJob:
    """A parsed job with a status."""
    return parse({**make_body(spec, **metadata), "status": status or {}})


def make_pod(role: str, number: int = 0, **changes: Any) -> PodState:
    """A running, ready pod."""
    fields = {"name": f"job-{role}-{number}", "uid": f"{role}-{number}", "attempt": 0, "ip": f"127.0.1.{number + 1}"}
    return PodState(**{"role": role, "ready": True, **fields, **changes})


def make_pods(attempt: int = 0, engines: int = 2, fleet: int | None = None) -> list[PodState]:
    """All pods of a job; `fleet`: the attempt of engines and orchestrator where it is another one."""
    own = attempt if fleet is None else fleet
    roles = [(names.ORCHESTRATOR, 0), *((names.INFERENCE, number) for number in range(engines))]
    rest = [make_pod(role, number, attempt=own, uid=f"{role}-{number}-{own}") for role, number in roles]
    return [make_pod(names.TRAINER, attempt=attempt, uid=f"trainer-0-{attempt}"), *rest]


def make_orchestrator(**changes: Any) -> OrchestratorStatus:
    """A running orchestrator's status."""
    fields = {"job_uid": UID, "attempt": 0, "phase": "running", "step": 1, "steps": 4, "version": 2, "epoch": 1}
    return OrchestratorStatus.model_validate({**fields, "weights_in_sync": True, **changes})


def make_trainer(**changes: Any) -> TrainerState:
    """An idle trainer's state."""
    return TrainerState.model_validate({"job_uid": UID, "attempt": 0, "phase": "idle", "step": 1, **changes})


def make_observed(**changes: Any) -> Observed:
    """A healthy running job."""
    seen = {"pods": tuple(make_pods()), "orchestrator": make_orchestrator(), "trainer": make_trainer(), "token": "t"}
    return Observed(**{**seen, **changes})
