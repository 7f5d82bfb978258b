"""Names, labels and owner of the objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.plan_revisions import revision
from fp8rl_operator.spec import FP8RLJob

Object = dict[str, Any]
APP = "fp8rl"
WORKERS = "workers"
CONTROL_SECRET = "control"  # noqa: S105 - a name, no secret
TOKEN_KEY = "token"  # noqa: S105 - a key, no secret
TAG = "0.1.0"


@dataclass(frozen=True)
class Images:
    """Container image of each role."""

    trainer: str = f"fp8rl-trainer:{TAG}"
    inference: str = f"fp8rl-inference:{TAG}"
    orchestrator: str = f"fp8rl-orchestrator:{TAG}"


def selector(job: FP8RLJob, component: str | None = None) -> dict[str, str]:
    """Labels that select the job's pods, or those of one component. Never changes for a job."""
    own = {
        names.LABEL_NAME: APP,
        names.LABEL_INSTANCE: job.name,
        names.LABEL_JOB_UID: job.uid,
    }
    return own if component is None else own | {names.LABEL_COMPONENT: component}


def labels(job: FP8RLJob, component: str) -> dict[str, str]:
    """All labels of a child."""
    queue = {} if job.spec.queue_name is None else {names.LABEL_QUEUE: job.spec.queue_name}
    return selector(job, component) | {
        names.LABEL_PART_OF: APP,
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
        names.LABEL_ROLE: component,
        **queue,
    }


def metadata(job: FP8RLJob, component: str) -> Object:
    """Metadata of a child: owned by the job, in its namespace."""
    return {
        "name": names.child_name(job.name, component),
        "namespace": job.namespace,
        "labels": labels(job, component),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def revised(job: FP8RLJob, role: str) -> Object:
    """Metadata of an object that is frozen: with the revision of the spec that it was made from."""
    return {**metadata(job, role), "annotations": {names.ANNOTATION_REVISION: revision(job, role)}}


def service(job: FP8RLJob, component: str, port: int, *, headless: bool) -> Object:
    """A Service for one component; a headless one also publishes pods that are not ready."""
    spec: Object = {
        "selector": selector(job, component),
        "ports": [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(job, component), "spec": spec}


def config_map(job: FP8RLJob, component: str, config_json: str) -> Object:
    """The role's config as `config.json`."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": revised(job, component),
        "data": {"config.json": config_json},
    }
