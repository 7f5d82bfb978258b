"""What a job waits for, in one sentence: the first thing in its way. Pure."""

from __future__ import annotations

from dataclasses import replace

from fp8rl_operator import names
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.plan_group import current_status
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_refusals import excluded_text, refusal_text
from fp8rl_operator.plan_troubles import of_pod, of_trouble
from fp8rl_operator.plan_types import Refusals, Waiting
from fp8rl_operator.spec import FP8RLJob


def wanted_pods(job: FP8RLJob) -> dict[str, int]:
    """Pods of each role."""
    return {
        names.TRAINER: job.spec.trainer.replicas,
        names.INFERENCE: job.spec.inference.replicas,
        names.ORCHESTRATOR: 1,
    }


def running(memory: Memory, seen: Observed) -> bool:
    """Whether the job has ever come as far as its first step."""
    status = current_status(memory, seen)
    return memory.step > 0 or (status is not None and status.phase not in {"waiting", "booting"})


def waited_for(job: FP8RLJob, memory: Memory, seen: Observed, refusals: Refusals, now: float) -> Waiting:
    """What the job waits for, or that it runs."""
    for role in wanted_pods(job):
        if (missing := missing_pods(job, memory, seen, role)) is not None:
            return with_refusals(missing, role, refusals, now)
    status = current_status(memory, seen)
    if status is None:
        return Waiting(names.WAITING_FOR_PODS, "the orchestrator has not answered yet")
    trainers = seen.of_role(names.TRAINER, memory.attempt)
    if status.phase == "running" and (loading := next((pod for pod in trainers if not pod.ready), None)) is not None:
        lost = f"; its node {loading.node} has lost touch with the cluster" if loading.unreachable else ""
        return Waiting(names.WAITING_FOR_PODS, f"pod {loading.name} to load its checkpoint{lost}")
    if status.phase == "running":
        text = f"step {status.step} of {status.steps}"
        return Waiting(names.RUNNING, "; ".join([text, *spare_engines(job, memory, seen, refusals, now)]))
    return Waiting(names.WAITING_FOR_WEIGHTS, status.waiting_for or f"the orchestrator is {status.phase}")


def missing_pods(job: FP8RLJob, memory: Memory, seen: Observed, role: str) -> Waiting | None:
    """What keeps the job from the pods of a role that it needs; None when they have started and nothing is wrong."""
    pods, count = seen.of_role(role, memory.attempt_of(role)), wanted_pods(job)[role]
    needed = job.spec.inference.min_replicas if role == names.INFERENCE else count
    troubled = next(iter(troubled_pods(seen, pods)), None)
    started = sum(not pod.starting and pod.phase != "Failed" for pod in pods)
    enough = started >= needed
    if troubled is not None and (role != names.INFERENCE or sum(pod.ready for pod in pods) < needed):
        return of_pod(job, troubled)
    if enough:
        return None
    told = next((item for item in seen.troubles if item.role in {role, ""}), None)
    if told is not None:
        return of_trouble(job, role, told)
    ever = role == names.INFERENCE and running(memory, seen)
    preparing = f"; {pods[0].name} prepares the model" if any(pod.starting and pod.ip for pod in pods) else ""
    reason = names.WAITING_FOR_REPLICAS if ever else names.WAITING_FOR_PODS
    return Waiting(reason, f"{started} of {count} {role} pods have started{preparing}")


def troubled_pods(seen: Observed, pods: tuple[PodState, ...]) -> list[PodState]:
    """Pods that say what is wrong with them, those apart that a node refused."""
    refused = {item.uid for item in seen.refusals}
    telling = (pod for pod in pods if pod.message or (pod.reason and pod.exit_code is not None))
    return [pod for pod in telling if not pod.ready and pod.uid not in refused]


def with_refusals(missing: Waiting, role: str, refusals: Refusals, now: float) -> Waiting:
    """The same with what kubelets said: their refusal is the cause during a back-off, excluded nodes are named after it."""
    held = refusal_text(refusals, now)
    if held is not None and role in refusals.roles:
        return held
    excluded = excluded_text(refusals)
    if not excluded:
        return missing
    person = missing.person or missing.reason == names.UNSCHEDULABLE
    return replace(missing, message=f"{missing.message}; {excluded}", person=person)


def spare_engines(job: FP8RLJob, memory: Memory, seen: Observed, refusals: Refusals, now: float) -> list[str]:
    """What is to be said of a running job whose pool is not full."""
    pods = seen.of_role(names.INFERENCE, memory.fleet_attempt)
    ready, count = sum(pod.ready for pod in pods), job.spec.inference.replicas
    if ready >= count:
        return []
    why = shortage(job, seen, pods, refusals, now)
    return [f"{ready} of {count} engines are ready"] + ([why.message] if why is not None else [])


def shortage(
    job: FP8RLJob, seen: Observed, engines: tuple[PodState, ...], refusals: Refusals, now: float
) -> Waiting | None:
    """Why the pool is not full, where anything says so."""
    held = refusal_text(refusals, now)
    if held is not None and names.INFERENCE in refusals.roles:
        return held
    if troubled := troubled_pods(seen, engines):
        return of_pod(job, troubled[0])
    told = next((item for item in seen.troubles if item.role == names.INFERENCE), None)
    return None if told is None else of_trouble(job, names.INFERENCE, told)


def stalled(job: FP8RLJob, memory: Memory, seen: Observed, waiting: Waiting, now: float) -> Waiting | None:
    """No step within stallDeadlineSeconds, with what was waited for."""
    limit = job.spec.stall_deadline_seconds
    if now - last_progress(memory, seen) <= limit:
        return None
    status = current_status(memory, seen)
    text = status.waiting_for if status is not None and status.waiting_for else waiting.message
    return Waiting(
        names.STALL_DEADLINE_EXCEEDED, f"no step within stallDeadlineSeconds, {limit} s; waiting for: {text}"
    )


def last_progress(memory: Memory, seen: Observed) -> float:
    """When the last step ended, or the attempt began. Unix seconds."""
    status = current_status(memory, seen)
    if status is None:
        return memory.attempt_time
    return max(memory.attempt_time, status.last_step_time, status.engines_ready_time or 0.0)
