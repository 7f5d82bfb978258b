"""Which loss of a pod costs an attempt, and of whom. Pure.

A trainer pod that ended or vanished always costs one: its collective is broken and it holds the weights. Engines and
orchestrator go on meanwhile: syncs of the old attempt are fenced by epoch and sync id. An engine costs one, and of the
whole job, under `replicaLoss: restart` only; under `shrink` its own Deployment starts it again while the others go on. The
orchestrator is started again in place and rolls its recorded decision forward; it costs an attempt never, but a
container that ends again and again without a finished step in between ends the job, and so does one that says by its exit
code that its input is wrong. Engines that the job can spare end it by the latter only. Pods that a kubelet refused, and
those that a smaller `replicas` has taken away, are no loss.
"""

from __future__ import annotations

from fp8rl_operator import names
from fp8rl_operator.last_words import cause, wrong_input
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_troubles import quoted
from fp8rl_operator.plan_types import Loss
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.errors import WRONG_INPUT_EXIT

UNSTARTABLE = frozenset({"FailedMount", "PortInUse", "CreateContainerConfigError"})  # of a pod that has failed for good
OF_TRAINER = frozenset(  # the fleet goes on
    {names.TRAINER_LOST, names.TRAINER_OUT_OF_MEMORY, names.HOST_OUT_OF_MEMORY, names.NODE_LOST}
)
OOM_KILLED = "OOMKilled"
NO_WORDS = frozenset({"", "Error", "Completed"})
MAX_NAMED = 8
REASONS = {names.TRAINER: names.TRAINER_LOST, names.INFERENCE: names.ENGINE_LOST}


def find_loss(job: FP8RLJob, memory: Memory, seen: Observed) -> Loss | None:
    """The first loss that counts, None if the group can go on."""
    roles = (names.TRAINER, names.ORCHESTRATOR, names.INFERENCE)
    pods = [pod for role in roles for pod in seen.of_role(role, memory.attempt_of(role))]
    for pod in pods:
        if (loss := unstartable(pod) or exhausted(job, memory, seen, pod)) is not None:
            return loss
    loss = said_lost(memory, seen) or lost(job, names.TRAINER, memory, seen) or silent(memory, seen)
    if loss is not None:
        return loss
    if job.spec.failure_policy.replica_loss == "restart":
        return lost(job, names.INFERENCE, memory, seen)
    return None


def restartable(reason: str, last: str) -> bool:
    """Whether a new attempt can help: a lost peer always, out of memory unless the last attempt ended so, a wrong input never."""
    if reason == names.TRAINER_OUT_OF_MEMORY:
        return last != names.TRAINER_OUT_OF_MEMORY
    return reason in {names.TRAINER_LOST, names.ENGINE_LOST, "WeightSyncFailed"}


def said_lost(memory: Memory, seen: Observed) -> Loss | None:
    """A failure that trainer or orchestrator reports and that a new attempt may heal."""
    for role in (seen.trainer, seen.orchestrator):
        failed = role is not None and role.attempt == memory.attempt and role.phase == "failed"
        if role is not None and failed and restartable(role.reason, memory.last_failure_reason):
            return Loss(role.reason, role.message)
    return None


def unstartable(pod: PodState) -> Loss | None:
    """A pod that no further start can help."""
    if pod.phase == "Failed" and pod.reason in UNSTARTABLE:
        return Loss(pod.reason, f"{pod.role} pod {pod.name} cannot start: {pod.message}", permanent=True)
    if pod.exit_code == WRONG_INPUT_EXIT:
        reason, text = wrong_input(pod.message) or (names.INVALID_INPUT, ended_text(pod))
        return Loss(reason, text, permanent=True)
    return None


def exhausted(job: FP8RLJob, memory: Memory, seen: Observed, pod: PodState) -> Loss | None:
    """A pod that ended more often than the budget allows, without a finished step in between, and that the job cannot spare."""
    budget = job.spec.failure_policy.max_restarts
    counted = pod.starting or pod.role != names.TRAINER
    times = pod.restarts - memory.restarts_before.get(pod.uid, 0)
    if not counted or pod.ready or times <= budget or spared(job, memory, seen, pod):
        return None
    text = (
        f"{ended_text(pod)}; it was started again {times} times without a finished step in between,"
        f" failurePolicy.maxRestarts is {budget}"
    )
    return Loss(names.RESTARTS_EXHAUSTED, text, permanent=True)


def spared(job: FP8RLJob, memory: Memory, seen: Observed, pod: PodState) -> bool:
    """Whether the job goes on without this pod: an engine under `replicaLoss: shrink` while minReplicas others are ready."""
    if pod.role != names.INFERENCE or job.spec.failure_policy.replica_loss != "shrink":
        return False
    ready = sum(other.ready for other in seen.of_role(names.INFERENCE, memory.attempt_of(names.INFERENCE)))
    return ready >= job.spec.inference.min_replicas


def lost(job: FP8RLJob, role: str, memory: Memory, seen: Observed) -> Loss | None:
    """A pod of the role that ended, failed or vanished within this attempt."""
    refused = {item.uid for item in seen.refusals}
    pods = [pod for pod in seen.of_role(role, memory.attempt_of(role)) if pod.uid not in refused]
    before = memory.uids.get(role, frozenset())
    for pod in pods:
        ended = pod.restarts > 0 or pod.phase == "Failed" or bool(pod.exit_code)
        if ended and (not pod.starting or pod.uid in before):
            return out_of_memory(pod) or Loss(REASONS[role], ended_text(pod))
    gone = before - {pod.uid for pod in pods}
    asked = job.spec.trainer.replicas if role == names.TRAINER else job.spec.inference.replicas
    taken = max(0, len(before) - min(asked, memory.desired.get(role, asked)))
    return vanished(role, gone, seen) if len(gone) > taken else None


def out_of_memory(pod: PodState) -> Loss | None:
    """A trainer that the kernel killed for its container's memory limit, or for its node's memory."""
    if pod.role != names.TRAINER or pod.reason != OOM_KILLED:
        return None
    text = (
        f"{ended_text(pod)}; raise resources.limits.memory (and requests) of container main in"
        " spec.trainer.template.spec.containers, or lower trainer.offload"
    )
    return Loss(names.HOST_OUT_OF_MEMORY, text)


def vanished(role: str, gone: frozenset[str], seen: Observed) -> Loss:
    """Pods that are not there any more, or are on their way; with what the cluster says of them."""
    known = sorted((pod for pod in seen.pods if pod.uid in gone), key=lambda pod: pod.name)
    said = [f"{item.reason}: {quoted(item.message)}" for item in seen.troubles if item.role == role]
    dead = next((pod for pod in known if pod.unreachable), None)
    if dead is not None and role == names.TRAINER:
        return Loss(names.NODE_LOST, "; ".join([node_text(dead), *said]))
    listed = ", ".join(pod.name for pod in known) or f"uid {', '.join(sorted(gone)[:MAX_NAMED])}"
    return Loss(REASONS[role], "; ".join([f"{len(gone)} {role} pods were deleted: {listed}", *said]))


def silent(memory: Memory, seen: Observed) -> Loss | None:
    """The trainer's first pod is on a node that has lost touch, and does not answer either."""
    if seen.trainer is not None and seen.trainer.attempt == memory.attempt:
        return None
    pods = seen.of_role(names.TRAINER, memory.attempt)
    first = next((pod for pod in pods if not pod.starting), None)
    return Loss(names.NODE_LOST, node_text(first)) if first is not None and first.unreachable else None


def node_text(pod: PodState) -> str:
    """One sentence about a pod on a node that has lost touch."""
    return (
        f"{pod.role} pod {pod.name} is on node {pod.node or 'unknown'}, which has lost touch with the cluster: its pods are deleted"
        " without it and start elsewhere; drain or repair the node"
    )


def ended_text(pod: PodState) -> str:
    """One sentence about how a pod ended, with Kubernetes' reason and the cause that its words tell."""
    code = "" if pod.exit_code is None else f" with code {pod.exit_code}"
    reason = "" if pod.reason in NO_WORDS else f" ({pod.reason})"
    words = cause(pod.message)
    return f"{pod.role} pod {pod.name} ended{code}{reason}{f': {words}' if words else ''}"
