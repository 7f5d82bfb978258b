"""The engines: Deployment, Service, config."""

from __future__ import annotations

from fp8rl_operator import names
from fp8rl_operator.manifests.configs import engine_config
from fp8rl_operator.manifests.meta import Images, Object, config_map, revised, selector, service
from fp8rl_operator.manifests.pod import Role, http_probe, pod_template
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.config import ENGINE_PORT

# An engine is ready with its first committed weights: it waits for the trainer, and a cold start takes 465 s.
PROBES = {
    "startup": http_probe("/fp8rl/v1/ready", period=5, failures=720),
    "readiness": http_probe("/fp8rl/v1/ready", period=5, failures=3, timeout=10),
    "liveness": http_probe("/health", period=10, failures=12, timeout=10),
}


def build(job: FP8RLJob, plan: Plan, images: Images) -> list[Object]:
    """The engines' objects."""
    role = Role(
        component=names.INFERENCE,
        image=images.inference,
        command=["python", "-m", "fp8rl_workers.inference"],
        port=ENGINE_PORT,
        template=job.spec.inference.template,
        probes=PROBES,
        state={"emptyDir": {}},
        gpus=job.spec.inference.gpus_per_replica,
    )
    return [
        config_map(job, names.INFERENCE, engine_config(job).model_dump_json(indent=2)),
        service(job, names.INFERENCE, ENGINE_PORT, headless=False),
        deployment(job, role, plan),
    ]


def deployment(job: FP8RLJob, role: Role, plan: Plan) -> Object:
    """All replicas of an old attempt go at once; GPUs are never wanted twice (maxSurge 0)."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": revised(job, names.INFERENCE),
        "spec": {
            "replicas": plan.replicas(names.INFERENCE, job.spec.inference.replicas),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
            "selector": {"matchLabels": selector(job, names.INFERENCE)},
            "template": pod_template(job, role, plan),
        },
    }
