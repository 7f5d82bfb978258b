"""Defaults of the job, field by field."""

from typing import Any

import pytest
from builders import make_job

from fp8rl_operator.spec import FP8RLJob

DEFAULTS: dict[str, Any] = {
    "suspend": False,
    "managedBy": "fp8rl.dev/operator",
    "seed": 0,
    "model.trustRemoteCode": False,
    "model.maxModelLen": None,
    "precision.recipe": "auto",
    "precision.wire": "auto",
    "precision.quantizeAt": "trainer",
    "precision.scaleFormat": "auto",
    "precision.rounding": "nearest",
    "precision.scope": "linear",
    "precision.ignoredLayers": (),
    "precision.allowMismatch": False,
    "precision.fp8Param": False,
    "precision.kvCache": "bf16",
    "precision.firstLastLayersBF16": 0,
    "trainer.backend": "megatron",
    "trainer.replicas": 1,
    "trainer.gpusPerReplica": 8,
    "trainer.parallelism.tensor": 1,
    "trainer.parallelism.pipeline": 1,
    "trainer.parallelism.context": 1,
    "trainer.parallelism.expert": 1,
    "trainer.optimizer.name": "adamw",
    "trainer.optimizer.gradClip": None,
    "trainer.offload": None,
    "trainer.freezeMoeRouter": True,
    "trainer.compile": False,
    "trainer.recompileLimit": 64,
    "inference.replicas": 1,
    "inference.minReplicas": 1,
    "inference.gpusPerReplica": 1,
    "inference.parallelism.tensor": 1,
    "inference.parallelism.expert": 1,
    "inference.maxInFlight": 64,
    "rollout.maxOffPolicySteps": 8,
    "rollout.loss.name": "ipo",
    "weightSync.transport": "auto",
    "weightSync.mode": "auto",
    "weightSync.kvOnCommit": "keep",
    "weightSync.castBackend": "auto",
    "limits.ratioDeviation": 0.1,
    "limits.mismatchKL.warn": 0.015,
    "limits.mismatchKL.stop": None,
    "limits.logprobDiffP99": 0.5,
    "limits.tisTruncated": 0.02,
    "releases": None,
    "samplers": (),
    "gate.required": False,
    "gate.onFailure": "stop",
    "failurePolicy.replicaLoss": "shrink",
    "stallDeadlineSeconds": 900,
    "activeDeadlineSeconds": None,
    "preRunningDeadlineSeconds": None,
    "ttlSecondsAfterFinished": None,
    "cleanupPolicy": "keepNothing",
    "networkPolicy": "enabled",
    "podDisruptionBudget": "enabled",
}


def smallest_job() -> FP8RLJob:
    return make_job({"trainer": {"backend": None, "gpusPerReplica": None, "offload": None}, "inference": None})


def value_at(job: FP8RLJob, path: str) -> Any:
    value: Any = job.spec
    for part in path.split("."):
        names = {info.alias or name: name for name, info in type(value).model_fields.items()}
        value = getattr(value, names[part])
    return value


@pytest.mark.parametrize(("path", "default"), DEFAULTS.items())
def test_a_field_that_is_not_given_has_its_default(path: str, default: Any):
    assert value_at(smallest_job(), path) == default
