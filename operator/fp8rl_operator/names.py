"""Every name that the operator writes into a cluster: API group, labels, conditions, reasons, names of children.

One place, so that a label, a reason or a name is spelled once. Pure; imports nothing of the operator.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "fp8rl.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "FP8RLJob"
PLURAL: Final = "fp8rljobs"
SINGULAR: Final = "fp8rljob"
SHORT_NAME: Final = "f8j"
CRD_NAME: Final = f"{PLURAL}.{GROUP}"
FIELD_MANAGER: Final = "fp8rl-operator"
MANAGED_BY: Final = "fp8rl.dev/operator"

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_JOB_UID: Final = "fp8rl.dev/job-uid"
LABEL_ROLE: Final = "fp8rl.dev/role"
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
ANNOTATION_ATTEMPT: Final = "fp8rl.dev/attempt"
ANNOTATION_REVISION: Final = "fp8rl.dev/revision"
ANNOTATION_BUILT: Final = "fp8rl.dev/built"
LABEL_HOSTNAME: Final = "kubernetes.io/hostname"
LABEL_NAMESPACE: Final = "kubernetes.io/metadata.name"
RESERVED_LABEL_PREFIXES: Final = ("fp8rl.dev/", "app.kubernetes.io/")
GPU_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
GPU_RESOURCE: Final = "nvidia.com/gpu"

TRAINER: Final = "trainer"
INFERENCE: Final = "inference"
ORCHESTRATOR: Final = "orchestrator"
SAMPLER: Final = "sampler"

# Condition types. Reconciling and Stalled are the abnormal-true pair of kstatus.
READY: Final = "Ready"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"
SUSPENDED: Final = "Suspended"
COMPLETE: Final = "Complete"
FAILED: Final = "Failed"
WEIGHTS_IN_SYNC: Final = "WeightsInSync"
OFF_POLICY_WITHIN_LIMIT: Final = "OffPolicyWithinLimit"
MISMATCH_WITHIN_LIMIT: Final = "MismatchWithinLimit"
GATE_PASSED: Final = "GatePassed"

CONDITIONS: Final = {
    READY: "True when every role runs and the weight-sync group serves a committed version.",
    RECONCILING: "True while the operator is moving the cluster towards the spec.",
    STALLED: "True when no step has ended within stallDeadlineSeconds, or the job waits for what only a person can give.",
    SUSPENDED: "True while spec.suspend keeps the pods away.",
    COMPLETE: "True once all steps are done. Final.",
    FAILED: "True once the job has ended without success; the reason says why. Final.",
    WEIGHTS_IN_SYNC: "True when every serving engine serves the newest committed version.",
    OFF_POLICY_WITHIN_LIMIT: "True while no consumed sample is older than rollout.maxOffPolicySteps.",
    MISMATCH_WITHIN_LIMIT: "True while the mismatch of trainer and engines stays under limits.",
    GATE_PASSED: "True once the precision passed the gate, where one is asked for.",
}

# Reasons of conditions and events.
INVALID_INPUT: Final = "InvalidInput"
INVALID_SPEC: Final = "InvalidSpec"
CREATING: Final = "Creating"
WAITING_FOR_PODS: Final = "WaitingForPods"
WAITING_FOR_WEIGHTS: Final = "WaitingForWeights"
WAITING_FOR_REPLICAS: Final = "WaitingForReplicas"
RUNNING: Final = "Running"
RESTARTING: Final = "Restarting"
SUSPENDED_BY_USER: Final = "SuspendedByUser"
STEPS_DONE: Final = "StepsDone"
STEPS_LOST: Final = "StepsLost"
RESTARTS_EXHAUSTED: Final = "RestartsExhausted"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
PRE_RUNNING_DEADLINE_EXCEEDED: Final = "PreRunningDeadlineExceeded"
STALL_DEADLINE_EXCEEDED: Final = "StallDeadlineExceeded"
MISMATCH_LIMIT: Final = "MismatchLimit"
OFF_POLICY_LIMIT: Final = "OffPolicyLimit"
TRAINER_LOST: Final = "TrainerLost"
TRAINER_OUT_OF_MEMORY: Final = "TrainerOutOfMemory"
HOST_OUT_OF_MEMORY: Final = "HostOutOfMemory"
ENGINE_LOST: Final = "EngineLost"
NODE_LOST: Final = "NodeLost"
SPEC_CHANGED: Final = "SpecChanged"
STARTED: Final = "Started"
RESUMED: Final = "Resumed"
SCALED: Final = "Scaled"
PODS_FORCED: Final = "PodsForced"
# What keeps pods from running. Ready and Reconciling carry them, Stalled too where only a person can help.
NODE_REFUSED: Final = "NodeRefused"
NODE_EXCLUDED: Final = "NodeExcluded"
NAME_CLASH: Final = "NameClash"
APPLY_FAILED: Final = "ApplyFailed"
INVALID_OBJECT: Final = "InvalidObject"
QUOTA_EXCEEDED: Final = "QuotaExceeded"
ADMISSION_REFUSED: Final = "AdmissionRefused"
IMAGE_PULL: Final = "ImagePull"
UNSCHEDULABLE: Final = "Unschedulable"
VOLUME_NOT_BOUND: Final = "VolumeNotBound"
VOLUME_NOT_MOUNTED: Final = "VolumeNotMounted"
CONTAINER_CONFIG: Final = "ContainerConfig"
IN_SYNC: Final = "InSync"
OUT_OF_SYNC: Final = "OutOfSync"
WITHIN_LIMIT: Final = "WithinLimit"

MAX_NAME = 63
HASH_LENGTH = 10  # of a ReplicaSet's pod template
SUFFIX_LENGTH = 5  # of a pod that a ReplicaSet generates
MAX_REPLICAS = 4096


def child_name(job: str, component: str) -> str:
    """Name of a child object: `<job>-<component>`. The pools of `samplers` have `sampler-<name>` as component."""
    return f"{job}-{component}"


def pool_component(sampler: str | None = None) -> str:
    """Component of an engine pool: `inference`, or `sampler-<name>`."""
    return INFERENCE if sampler is None else f"{SAMPLER}-{sampler}"


def generated_pod_name(job: str, component: str) -> str:
    """A Deployment's pod, with `x` for what Kubernetes generates: `<job>-<component>-<10 of the ReplicaSet>-<5>`."""
    return f"{child_name(job, component)}-{'x' * HASH_LENGTH}-{'x' * SUFFIX_LENGTH}"


def longest_pod_name(job: str, samplers: tuple[str, ...] = ()) -> str:
    """The longest name that any pod of the job gets; pods of StatefulSets end in their ordinal."""
    generated = [generated_pod_name(job, pool_component(name)) for name in (None, *samplers)]
    ordinals = [f"{child_name(job, TRAINER)}-{MAX_REPLICAS - 1}", f"{child_name(job, ORCHESTRATOR)}-0"]
    return max([*generated, *ordinals], key=len)


MAX_JOB_NAME = MAX_NAME - len(longest_pod_name(""))
