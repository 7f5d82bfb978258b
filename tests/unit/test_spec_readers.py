"""No field is ignored in silence: each changes the job's objects, is read by the plan, or is in the table of what is not built."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args, get_origin

import pytest
from builders import make_body

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.not_built import not_built
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob, inspect
from fp8rl_operator.spec.fields import fields_of, inner, model_of
from fp8rl_operator.spec.job import JobSpec

PLAN = Plan(attempt=0, fleet_attempt=0, restarts=0, attempt_time=0.0, running=True)
OF_THE_PLAN = {  # tests/unit/test_plan.py
    "suspend",
    "managedBy",
    "failurePolicy.maxRestarts",
    "failurePolicy.backoffSeconds",
    "failurePolicy.replicaLoss",
    "activeDeadlineSeconds",
    "preRunningDeadlineSeconds",
    "stallDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "cleanupPolicy",
}
GPUS = {"trainer": {"backend": "megatron", "gpusPerReplica": 2}, "inference": {"gpusPerReplica": 1}}
CLAIM = {"trainer": {"checkpoint": {"volumeClaimTemplate": {"storage": "2Gi"}}}}
BESIDE: dict[str, dict[str, Any]] = {  # what must be so for a field to mean anything
    "precision.wire": {"precision": {"allowMismatch": True}},
    "precision.fp8Param": {**GPUS, "precision": {"recipe": "blockwise"}},
    "trainer.replicas": GPUS,
    "trainer.megatronArgs": GPUS,
    "trainer.parallelism.tensor": GPUS,
    "trainer.parallelism.pipeline": GPUS,
    "trainer.parallelism.context": GPUS,
    "trainer.parallelism.expert": GPUS,
    "topology.gpuProduct": GPUS,
    "weightSync.transport": GPUS,
    "weightSync.castBackend": GPUS,
    "inference.parallelism.tensor": {"inference": {"gpusPerReplica": 2}},
    "inference.parallelism.expert": {"inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}}},
    "trainer.backend": {"trainer": {"gpusPerReplica": 1}},
    "trainer.checkpoint.volumeClaimTemplate.storageClassName": CLAIM,
    "trainer.checkpoint.volumeClaimTemplate.accessModes": CLAIM,
    "evaluation.environment.args": {"evaluation": {"environment": {"id": "arithmetic"}}},
    "inference.minReplicas": {"inference": {"replicas": 3}},
    "model.parameters": GPUS,
    "topology.numa": GPUS,
    "model.revision": {"model": {"source": {"builtin": None, "hub": {"repository": "a/b"}}}},
    "model.path": {"model": {"source": None, "path": "/a"}},
    "rollout.dataset.split": {"rollout": {"dataset": {"hub": {"repository": "a/b"}}}},
    "rollout.loss.grpoClipLow": {"rollout": {"loss": {"name": "grpo"}}},
}
WHOLE = {
    "model.source",
    "topology.tolerations",
    "rollout.dataset",
    "rollout.environment",
    "orchestrator.volume",
    "releases",
    "gate.criteria",
}
GIVEN: dict[str, list[Any]] = {
    "model.source": [{"hub": {"repository": "a/b"}}],
    "rollout.dataset": [{"volume": {"path": "a.jsonl"}}],
    "rollout.environment": [{"id": "arithmetic"}],
    "orchestrator.volume": [{"claimName": "c"}],
    "releases": [{"everySteps": 2, "volume": {"claimName": "c"}}],
    "evaluation.environment.args": [{"max_operand": 3}],
    "evaluation.environment.id": ["arithmetic"],
    "trainer.checkpoint.volumeClaimTemplate.storage": ["1Gi"],
    "trainer.optimizer.betas": [["0.8", "0.9"]],
    "trainer.gpusPerReplica": [1],
    "inference.gpusPerReplica": [1],
    "trainer.checkpoint.volumeClaimTemplate.accessModes": [["ReadWriteMany"]],
    "topology.tolerations": [[{"key": "a", "operator": "Exists"}]],
    "precision.ignoredLayers": [["lm_head"]],
    "orchestrator.resources.requests": [{"memory": "1Gi"}],
    "orchestrator.resources.limits": [{"memory": "1Gi"}],
}
AFTER = {"gate.prompts", "gate.onFailure", "gate.criteria", "samplers"}  # mean something only beside what is refused


def leaves(model: Any = JobSpec, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, info in fields_of(model).items():
        path = f"{prefix}{name}"
        below = model_of(info.annotation)
        if path in AFTER:
            continue
        if below is None or path in WHOLE:
            found.append((path, info.annotation))
        else:
            found += leaves(below, f"{path}.")
    return found


def candidates(path: str, annotation: Any) -> list[Any]:
    if path in GIVEN:
        return GIVEN[path]
    kind = inner(annotation)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is dict:
        return [{"k": "v"}, {"metadata": {"name": "x"}}, {"k": "1"}]
    plain: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [2, 3, 16, 4096, 30000, 2_000_000],
        float: ["0.3", "0.7", "1.5", "3.0"],
        str: ["ab", "1"],
    }
    return [*plain.get(kind, ["ab"]), ["ab"]]


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    *parents, last = path.split(".")
    place = changed["spec"]
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return changed


def seen_in(job: FP8RLJob) -> Any:
    return build_objects(job, PLAN, "t"), not_built(job, "cluster"), not_built(job, "machine")


@pytest.mark.parametrize(("path", "annotation"), leaves(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_is_read_or_refused(path: str, annotation: Any) -> None:
    body = make_body(BESIDE.get(path))
    base, tried = inspect(body)[0], 0
    assert base is not None
    for value in candidates(path, annotation):
        job, faults = inspect(put(body, path, value))
        if job is None or any(fault.level == "error" for fault in faults) or job == base:
            continue
        tried += 1
        if path in OF_THE_PLAN or seen_in(job) != seen_in(base):
            return
    assert tried, f"{path}: no valid value to try, add one to GIVEN"
    raise AssertionError(f"{path}: changes nothing, and nothing says so")
