"""What the cluster says when it gives no pod: the job's reason for it, and the way out. Pure.

Kubernetes' own words are quoted. `person`: nothing that the operator or the cluster does will change it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl_operator import names
from fp8rl_operator.last_words import cause
from fp8rl_operator.observed import PodState, Trouble
from fp8rl_operator.plan_types import Outcome, Waiting
from fp8rl_operator.spec import FP8RLJob

MAX_QUOTED = 1200


@dataclass(frozen=True)
class Kind:
    """One kind of trouble, known by Kubernetes' reason or by a part of its message."""

    reason: str
    remedy: str
    reasons: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    person: bool = True

    def fits(self, reason: str, message: str) -> bool:
        """Whether it is of this kind."""
        return reason in self.reasons or any(word in message for word in self.words)


KINDS = (
    Kind(
        names.QUOTA_EXCEEDED,
        "raise the ResourceQuota of namespace {namespace}, or ask for less in spec.{role}",
        words=("exceeded quota", "failed quota"),
    ),
    Kind(
        names.ADMISSION_REFUSED,
        "change spec.{role}.template, or what the namespace allows",
        words=("denied the request", "violates PodSecurity", "is forbidden"),
    ),
    Kind(
        names.IMAGE_PULL,
        "set the image of container main in spec.{role}.template.spec.containers, or imagePullSecrets beside it",
        reasons=frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}),
    ),
    Kind(
        names.VOLUME_NOT_BOUND,
        "make a PersistentVolume that fits, or name another claim or storage class",
        reasons=frozenset({"FailedBinding", "ProvisioningFailed"}),
        words=("unbound immediate PersistentVolumeClaims", 'persistentvolumeclaim "'),
    ),
    Kind(
        names.VOLUME_NOT_MOUNTED,
        "see that what the volume names exists and that no other node holds it",
        reasons=frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"}),
        person=False,
    ),
    Kind(
        names.CONTAINER_CONFIG,
        "see that every Secret, ConfigMap and path that spec.{role}.template names exists",
        reasons=frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}),
    ),
    Kind(
        names.HOST_OUT_OF_MEMORY,
        "raise resources.limits.memory (and requests) of the container in spec.{role}.template.spec",
        reasons=frozenset({"OOMKilled"}),
        person=False,
    ),
    Kind(
        names.UNSCHEDULABLE,
        "add nodes, free some, or ask for less in spec.{role}, spec.topology or the role's template",
        reasons=frozenset({"FailedScheduling", "Unschedulable"}),
        person=False,
    ),
)


def of_trouble(job: FP8RLJob, role: str, trouble: Trouble) -> Waiting:
    """What a workload or a claim waits for."""
    return explained(job, role, f"{trouble.role or role} pods", trouble.reason, trouble.message)


def of_pod(job: FP8RLJob, pod: PodState) -> Waiting:
    """What a pod waits for, or how it ended."""
    return explained(job, pod.role, f"pod {pod.name}", pod.reason, cause(pod.message))


def explained(job: FP8RLJob, role: str, what: str, reason: str, message: str) -> Waiting:
    """One sentence: who waits, what Kubernetes says, the way out."""
    said = quoted(message)
    words = ": ".join(filter(None, (what, reason, said)))
    kind = next((kind for kind in KINDS if kind.fits(reason, message)), None)
    if kind is None:
        return Waiting(names.WAITING_FOR_PODS, words)
    remedy = kind.remedy.format(namespace=job.namespace, role=role)
    return Waiting(kind.reason, f"{words}; {remedy}", person=kind.person)


def quoted(message: str) -> str:
    """Words of Kubernetes in one line, as long as a condition can hold beside ours."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_QUOTED else f"{line[: MAX_QUOTED - 1]}…"


def of_outcome(job: FP8RLJob, outcome: Outcome) -> Waiting | None:
    """What could not be applied, None when all was."""
    if outcome.clashes:
        listed = ", ".join(outcome.clashes)
        verb, they = ("exists", "is") if len(outcome.clashes) == 1 else ("exist", "are")
        return Waiting(
            names.NAME_CLASH,
            f"{listed} of namespace {job.namespace} {verb} and {they} not this job's: left as it was; give the job another"
            " name, or remove what has the name",
            person=True,
        )
    if not outcome.failed:
        return None
    what, message = outcome.failed[0]
    more = f"; and {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    text = f"{what}: {quoted(message)}{more}"
    if "exceeded quota" in message:
        remedy = f"raise the ResourceQuota of namespace {job.namespace}"
        return Waiting(names.QUOTA_EXCEEDED, f"{text}; {remedy}", person=True)
    if "is invalid" in message or "field not declared in schema" in message:
        return Waiting(names.INVALID_OBJECT, f"{text}; change the role's template in the spec", person=True)
    if "denied the request" in message or "is forbidden" in message:
        return Waiting(
            names.ADMISSION_REFUSED, f"{text}; see the operator's rights and the namespace's policies", person=True
        )
    return Waiting(names.APPLY_FAILED, f"{text}; it is tried again")
