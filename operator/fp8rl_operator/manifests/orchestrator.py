"""The orchestrator: StatefulSet of one, headless Service, config."""

from __future__ import annotations

from fp8rl_operator import names
from fp8rl_operator.manifests.configs import orchestrator_config
from fp8rl_operator.manifests.meta import Images, Object, config_map, service
from fp8rl_operator.manifests.model import dataset_volumes
from fp8rl_operator.manifests.pod import Role, http_probe, state_source, stateful_set
from fp8rl_operator.manifests.trainer import claim_template
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.config import ORCHESTRATOR_PORT

PROBES = {
    "startup": http_probe("/healthz", period=2, failures=150),
    "readiness": http_probe("/readyz", period=5, failures=3),
    "liveness": http_probe("/healthz", period=10, failures=12, timeout=10),
}


def build(job: FP8RLJob, plan: Plan, images: Images) -> list[Object]:
    """The orchestrator's objects."""
    spec = job.spec.orchestrator
    data_volumes, data_mounts = dataset_volumes(job)
    role = Role(
        component=names.ORCHESTRATOR,
        image=images.orchestrator,
        command=["python", "-m", "fp8rl_workers.orchestrator"],
        port=ORCHESTRATOR_PORT,
        template=spec.template,
        probes=PROBES,
        state=state_source(spec.volume),
        volumes=data_volumes,
        mounts=data_mounts,
        resources=spec.resources.model_dump(),
    )
    template = spec.volume.volume_claim_template if spec.volume is not None else None
    claim = None if template is None else claim_template(template)
    return [
        config_map(job, names.ORCHESTRATOR, orchestrator_config(job).model_dump_json(indent=2)),
        service(job, names.ORCHESTRATOR, ORCHESTRATOR_PORT, headless=True),
        stateful_set(job, role, plan, 1, claim),
    ]
