"""Whether the environments of a job exist and take their arguments: asked of themselves, as this machine has them installed.

The API server cannot know; the orchestrator refuses the same with exit code 65.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.rollout import Environment

VERIFIERS = "verifiers:"


def validate_environments(job: FP8RLJob) -> list[Fault]:
    """Faults of `rollout.environment` and `evaluation.environment`; those of optional extras are left to the orchestrator."""
    faults = list(_faults("spec.rollout.environment", job.spec.rollout.environment))
    if job.spec.evaluation.environment is not None:
        faults += _faults("spec.evaluation.environment", job.spec.evaluation.environment)
    return faults


def _faults(path: str, asked: Environment) -> Iterator[Fault]:
    from fp8rl_workers.orchestrator.environments import REGISTRY, make_environment

    if asked.id.startswith(VERIFIERS):
        return
    if asked.id not in REGISTRY:
        known = ", ".join([*sorted(REGISTRY), f"{VERIFIERS}NAME"])
        yield Fault(f"{path}.id", asked.id, "is no environment", f"known are {known}")
        return
    try:
        make_environment(asked.id, dict(asked.args))
    except ValueError as error:
        if not isinstance(error.__cause__, ValidationError):
            yield Fault(f"{path}.args", None, str(error), "correct the arguments")
            return
        for fault in error.__cause__.errors(include_url=False):
            place = ".".join([f"{path}.args", *(str(part) for part in fault["loc"])])
            value = None if fault["type"] == "missing" else fault["input"]
            yield Fault(place, value, f"environment {asked.id}: {fault['msg']}", "correct it or leave it out")
