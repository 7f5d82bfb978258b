"""The trainer: StatefulSet, headless Service, config."""

from __future__ import annotations

from fp8rl_operator import names
from fp8rl_operator.manifests.configs import trainer_config
from fp8rl_operator.manifests.meta import Images, Object, config_map, service
from fp8rl_operator.manifests.pod import STATE_VOLUME, Role, http_probe, stateful_set
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.pods import VolumeClaimTemplate
from fp8rl_workers.config import TRAINER_PORT

PROBES = {
    "startup": http_probe("/healthz", period=5, failures=360),
    "readiness": http_probe("/readyz", period=5, failures=3),
    "liveness": http_probe("/healthz", period=10, failures=12, timeout=10),
}


def build(job: FP8RLJob, plan: Plan, images: Images) -> list[Object]:
    """The trainer's objects."""
    checkpoint = job.spec.trainer.checkpoint
    template = checkpoint.volume_claim_template
    state: Object | None = {"emptyDir": {}}
    if checkpoint.claim_name is not None:
        state = {"persistentVolumeClaim": {"claimName": checkpoint.claim_name}}
    elif template is not None:
        state = None
    role = Role(
        component=names.TRAINER,
        image=images.trainer,
        command=["python", "-m", "fp8rl_workers.trainer"],
        port=TRAINER_PORT,
        template=job.spec.trainer.template,
        probes=PROBES,
        state=state,
        grace_seconds=60,
        gpus=job.spec.trainer.gpus_per_replica,
    )
    claim = None if template is None else claim_template(template)
    return [
        config_map(job, names.TRAINER, trainer_config(job).model_dump_json(indent=2)),
        service(job, names.TRAINER, TRAINER_PORT, headless=True),
        stateful_set(job, role, plan, job.spec.trainer.replicas, claim),
    ]


def claim_template(template: VolumeClaimTemplate) -> Object:
    """The state volume as a claim of the StatefulSet."""
    spec: Object = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": template.storage}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    return {"metadata": {"name": STATE_VOLUME}, "spec": spec}
