"""Where the base model and the prompts come from: volumes, mounts, init container."""

from __future__ import annotations

import hashlib
import json
import posixpath

from fp8rl_operator.manifests.meta import Object
from fp8rl_operator.spec import FP8RLJob

MODEL_FOLDER = "/models"
MODEL_CACHE = "/var/cache/fp8rl-models"
MODEL_CACHE_VOLUME = "model-cache"
DATA_FOLDER = "/data"
STATE_FOLDER = "/var/lib/fp8rl"


def model_path(job: FP8RLJob) -> str:
    """The base model's folder as the processes see it."""
    model = job.spec.model
    if model.source is None:
        return model.path or MODEL_FOLDER
    if model.source.hub is not None or model.source.builtin is not None:
        return f"{MODEL_FOLDER}/base"
    return posixpath.normpath(posixpath.join(MODEL_FOLDER, (model.path or "").lstrip("/")))


def model_volumes(job: FP8RLJob) -> list[Object]:
    """Volumes that hold the model."""
    source = job.spec.model.source
    if source is None:
        return []
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return [{"name": "model", "persistentVolumeClaim": claim}]
    if source.host_path is not None:
        return [{"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}]
    claim_name = source.hub.cache_claim_name if source.hub is not None else None
    cache: Object = {"emptyDir": {}} if claim_name is None else {"persistentVolumeClaim": {"claimName": claim_name}}
    return [{"name": "model", "emptyDir": {}}, {"name": MODEL_CACHE_VOLUME, **cache}]


def model_mounts(job: FP8RLJob) -> list[Object]:
    """Mounts of `model_volumes`: writable where the model is made, read-only where it was put."""
    source = job.spec.model.source
    if source is None:
        return []
    if source.pvc is not None or source.host_path is not None:
        return [{"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}]
    return [{"name": "model", "mountPath": MODEL_FOLDER}, {"name": MODEL_CACHE_VOLUME, "mountPath": MODEL_CACHE}]


def prepare_env(job: FP8RLJob, *, weights: bool) -> list[Object]:
    """Environment of `fp8rl_workers.models.prepare`. `weights`: the role loads them from the folder."""
    model = job.spec.model
    asked = model.model_dump(mode="json", by_alias=True, exclude_none=True, include={"path", "source", "revision"})
    env: list[Object] = [
        {"name": "FP8RL_MODEL_SOURCE", "value": json.dumps(asked)},
        {"name": "FP8RL_MODEL_PATH", "value": model_path(job)},
    ]
    if model.source is not None and (model.source.hub is not None or model.source.builtin is not None):
        env.append({"name": "FP8RL_CACHE_DIR", "value": MODEL_CACHE})
        env += [] if weights else [{"name": "FP8RL_MODEL_WEIGHTS", "value": "no"}]
    if model.source is not None and model.source.hub is not None and model.source.hub.secret_name is not None:
        key = {"name": model.source.hub.secret_name, "key": "token"}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return env


def dataset_path(job: FP8RLJob) -> str | None:
    """The file of prompts as the orchestrator sees it; None for generated prompts. A hub's is kept beside the state."""
    if job.spec.rollout.dataset.hub is not None:
        identity = hashlib.sha256(dataset_source(job).encode()).hexdigest()[:8]
        return f"{STATE_FOLDER}/prompts-{identity}.jsonl"
    volume = job.spec.rollout.dataset.volume
    if volume is None:
        return None
    if volume.claim_name is None and volume.host_path is None:
        return volume.path
    return posixpath.normpath(posixpath.join(DATA_FOLDER, volume.path.lstrip("/")))


def dataset_volumes(job: FP8RLJob) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of the prompts."""
    volume = job.spec.rollout.dataset.volume
    if volume is None or (volume.claim_name is None and volume.host_path is None):
        return [], []
    source: Object = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    if volume.claim_name is not None:
        source = {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": True}}
    return [{"name": "data", **source}], [{"name": "data", "mountPath": DATA_FOLDER, "readOnly": True}]


def dataset_source(job: FP8RLJob) -> str:
    """`FP8RL_DATASET_SOURCE` of `fp8rl_workers.models.prompts`."""
    data = job.spec.rollout.dataset
    assert data.hub is not None, "asked for a hub's data set only"
    asked = data.hub.model_dump(mode="json", exclude_none=True, include={"repository", "subset", "revision"})
    return json.dumps(asked | {"split": data.split}, sort_keys=True)


def dataset_env(job: FP8RLJob) -> list[Object]:
    """Environment of `fp8rl_workers.models.prompts`; empty where no hub is asked."""
    hub = job.spec.rollout.dataset.hub
    if hub is None:
        return []
    env: list[Object] = [
        {"name": "FP8RL_DATASET_SOURCE", "value": dataset_source(job)},
        {"name": "FP8RL_DATASET_PATH", "value": dataset_path(job)},
    ]
    if hub.secret_name is not None:
        key = {"name": hub.secret_name, "key": "token"}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return env
