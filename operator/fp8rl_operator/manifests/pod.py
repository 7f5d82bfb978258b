"""What all pods of a job share: environment, probes, security, volumes, the user's overrides."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8rl_operator import names
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.manifests.meta import CONTROL_SECRET, TOKEN_KEY, WORKERS, Object, labels, revised, selector
from fp8rl_operator.manifests.model import STATE_FOLDER, dataset_env, model_mounts, model_volumes, prepare_env
from fp8rl_operator.manifests.resources import completed, own_resources
from fp8rl_operator.manifests.scheduling import placed, scheduling
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.memory import MAIN, asked, main_resources
from fp8rl_operator.spec.pods import PodTemplate, Volume

USER = 10001
CONFIG_FOLDER = "/etc/fp8rl/config"
TOKEN_FOLDER = "/etc/fp8rl/control"  # noqa: S105 - a folder, no secret
CACHE_FOLDER = "/var/cache/fp8rl"
STATE_VOLUME = "state"
SHM_SIZE = "8Gi"
TMP_SIZE = "8Gi"
CACHE_SIZE = "64Gi"
THREADS = "OMP_NUM_THREADS"

Env = list[Object]


@dataclass(frozen=True)
class Role:
    """What differs between roles. `probes`: kind to probe. `state`: source of the state volume, None for a claim template."""

    component: str
    image: str
    command: list[str]
    port: int
    template: PodTemplate
    probes: dict[str, Object]
    state: Object | None
    grace_seconds: int = 30
    gpus: int = 0
    env: Env = field(default_factory=list)
    volumes: list[Object] = field(default_factory=list)
    mounts: list[Object] = field(default_factory=list)
    resources: Object = field(default_factory=dict)


def http_probe(path: str, period: int, failures: int, timeout: int = 5) -> Object:
    """An HTTP probe on the container's port `http`; seconds and counts."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def variable(name: str, value: str) -> Object:
    """A plain environment variable."""
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Object:
    """A variable of the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def worker_env() -> Env:
    """The contract of `fp8rl_workers.config`: no template can change these."""
    return [
        variable("FP8RL_CONFIG", f"{CONFIG_FOLDER}/config.json"),
        variable("FP8RL_TOKEN_FILE", f"{TOKEN_FOLDER}/{TOKEN_KEY}"),
        from_field("FP8RL_POD_NAME", "metadata.name"),
        from_field("FP8RL_POD_UID", "metadata.uid"),
        from_field("FP8RL_POD_IP", "status.podIP"),
        from_field("FP8RL_ATTEMPT", f"metadata.annotations['{names.ANNOTATION_ATTEMPT}']"),
        variable("FP8RL_STATE_DIR", STATE_FOLDER),
    ]


def threads(role: Role) -> Env:
    """OpenMP threads of a role that computes on CPUs: the whole CPUs that its template asks for, one where it asks for none.

    OpenMP itself would take all cores of the node in every pod.
    """
    if role.gpus:
        return []
    cpus = asked(main_resources(role.template)[1], "cpu", "limits", "requests")
    return [variable(THREADS, str(1 if cpus is None else max(1, int(cpus[1]))))]


def process_env(role: Role) -> Env:
    """Caches and habits of the processes; a template may change them.

    An engine makes its compile caches below FP8RL_CACHE_ROOT by user and release of vLLM, and moves them there when it is Ready.
    """
    compiled = [
        variable("TRITON_CACHE_DIR", f"{CACHE_FOLDER}/triton"),
        variable("TORCHINDUCTOR_CACHE_DIR", f"{CACHE_FOLDER}/inductor"),
    ]
    return [
        *threads(role),
        variable("HOME", CACHE_FOLDER),
        variable("USER", "fp8rl"),  # torch asks for a name, and the image may know none for the id
        variable("XDG_CACHE_HOME", f"{CACHE_FOLDER}/xdg"),
        variable("HF_HOME", f"{CACHE_FOLDER}/huggingface"),
        *([variable("FP8RL_CACHE_ROOT", CACHE_FOLDER)] if role.component == names.INFERENCE else compiled),
        variable("NCCL_CUMEM_ENABLE", "1"),
        variable("PYTHONUNBUFFERED", "1"),
        variable("PYTHONSAFEPATH", "1"),
    ]


def security_context() -> Object:
    """Of each container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def mounts(job: FP8RLJob, role: Role) -> list[Object]:
    """Mounts of the main container."""
    return [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "control", "mountPath": TOKEN_FOLDER, "readOnly": True},
        {"name": STATE_VOLUME if role.component != names.INFERENCE else "scratch", "mountPath": STATE_FOLDER},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a path of the container
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path of the container
        *model_mounts(job),
        *role.mounts,
    ]


def volumes(job: FP8RLJob, role: Role) -> list[Object]:
    """Volumes of the pod; a state volume of a claim template is added by the StatefulSet."""
    secret = {
        "secretName": names.child_name(job.name, CONTROL_SECRET),
        "defaultMode": 0o440,
        "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
    }
    state_name = STATE_VOLUME if role.component != names.INFERENCE else "scratch"
    state = [] if role.state is None else [{"name": state_name, **role.state}]
    return [
        {"name": "config", "configMap": {"name": names.child_name(job.name, role.component)}},
        {"name": "control", "secret": secret},
        *state,
        {"name": "cache", "emptyDir": {"sizeLimit": CACHE_SIZE}},
        {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}},
        *model_volumes(job),
        *role.volumes,
    ]


def main_container(job: FP8RLJob, role: Role) -> Object:
    """The container that does the work."""
    return {
        "name": MAIN,
        "image": role.image,
        "command": role.command,
        "ports": [{"name": "http", "containerPort": role.port, "protocol": "TCP"}],
        "env": worker_env() + process_env(role) + role.env,
        "volumeMounts": mounts(job, role),
        "resources": own_resources(role.gpus, role.resources),
        "securityContext": security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **{f"{kind}Probe": probe for kind, probe in role.probes.items()},
    }


def init_container(job: FP8RLJob, role: Role, name: str, module: str, env: Env) -> Object:
    """A container that runs to its end before the main one starts."""
    return {
        "name": name,
        "image": role.image,
        "command": ["python", "-m", module],
        "env": worker_env() + process_env(role) + env,
        "volumeMounts": mounts(job, role),
        "securityContext": security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def init_containers(job: FP8RLJob, role: Role) -> list[Object]:
    """What makes or checks the model's folder, and fetches a hub's prompts for the orchestrator."""
    model = init_container(
        job,
        role,
        "prepare-model",
        "fp8rl_workers.models.prepare",
        prepare_env(job, weights=role.component == names.TRAINER),
    )
    env = dataset_env(job) if role.component == names.ORCHESTRATOR else []
    prompts = [init_container(job, role, "prepare-prompts", "fp8rl_workers.models.prompts", env)] if env else []
    return [model, *prompts]


def pod_spec(job: FP8RLJob, role: Role) -> Object:
    """The pod as the operator builds it, before the user's overrides."""
    return {
        "serviceAccountName": names.child_name(job.name, WORKERS),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": role.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": init_containers(job, role),
        "containers": [main_container(job, role)],
        "volumes": volumes(job, role),
        **scheduling(job),
    }


def pod_template(job: FP8RLJob, role: Role, plan: Plan) -> Object:
    """The pod template: built, the user's overrides merged, the job's own ports, config and token put back."""
    own = pod_spec(job, role)
    inits = {container["name"] for container in own["initContainers"]}
    merged = completed(job, role.component, role.gpus, merge(own, role.template.spec), inits)
    merged = placed(job, role.component, role.gpus, merged, plan)
    meta = role.template.metadata
    return {
        "metadata": {
            "labels": dict(meta.labels) | labels(job, role.component),
            "annotations": dict(meta.annotations) | {names.ANNOTATION_ATTEMPT: str(plan.attempt_of(role.component))},
        },
        "spec": merge(merged, kept(own, merged)),
    }


def kept(own: Object, merged: Object) -> Object:
    """What no template changes: the job's ports, and the worker's variables, config and token in every container of ours."""
    folders = {CONFIG_FOLDER, TOKEN_FOLDER}
    left = {container["name"] for container in merged.get("initContainers", [])}

    def contract(container: Object) -> Object:
        ours = [mount for mount in container["volumeMounts"] if mount["mountPath"] in folders]
        return {"name": container["name"], "env": worker_env(), "volumeMounts": ours}

    return {
        "containers": [contract(own["containers"][0]) | {"ports": own["containers"][0]["ports"]}],
        "initContainers": [contract(container) for container in own["initContainers"] if container["name"] in left],
        "volumes": [volume for volume in own["volumes"] if volume["name"] in {"config", "control"}],
    }


def state_source(volume: Volume | None) -> Object | None:
    """Source of a state volume; None when a claim template makes it.

    A folder of the node must be there: the kubelet would make it for root, and no process of the job could write to it.
    """
    if volume is None:
        return {"emptyDir": {}}
    if volume.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim_name}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    return None


def stateful_set(job: FP8RLJob, role: Role, plan: Plan, replicas: int, claim: Object | None) -> Object:
    """A StatefulSet: pods start together, claims outlive a scale to zero, old attempts are ended by the plan."""
    spec: Object = {
        "serviceName": names.child_name(job.name, role.component),
        "replicas": plan.replicas(role.component, replicas),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": selector(job, role.component)},
        "template": pod_template(job, role, plan),
    }
    if claim is not None:
        spec["volumeClaimTemplates"] = [claim]
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": revised(job, role.component), "spec": spec}
