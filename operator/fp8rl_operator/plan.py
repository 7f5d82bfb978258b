"""What to do next, as a pure function: (job with its status, Observed, now) -> Plan.

The order of the questions, each a function below: is the job ours, has it ended, is it suspended, has a role said that
it is over, has a deadline passed, is a pod lost that the group cannot do without, and else who may belong to the
weight-sync group. What must outlive the operator stands in the job's status (`plan_memory`). Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import replace

from fp8rl_operator import names
from fp8rl_operator.last_words import cause
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.plan_losses import OF_TRAINER, find_loss, restartable
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_types import Loss, Plan, Verdict, Waiting
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.protocol import GroupDocument, GroupMember, OrchestratorStatus

__all__ = ["Memory", "Plan", "Verdict", "Waiting", "compute_plan"]

RESYNC_SECONDS = 15.0
MAX_BACKOFF_SECONDS = 3600


def compute_plan(job: FP8RLJob, seen: Observed, now: float) -> Plan:
    """The next step of a job. `now` in Unix seconds."""
    memory = Memory.read(job.status, now)
    base = Plan(memory.attempt, memory.fleet_attempt, memory.restarts, memory.attempt_time)
    if job.spec.managed_by != names.MANAGED_BY:
        return replace(base, hands_off=True)
    if memory.verdict is not None:
        return finished(job, memory, base, now)
    if job.spec.suspend or memory.suspended:
        return replace(base, suspended=True) if job.spec.suspend else after_suspension(memory, base, now)
    verdict = said_by_roles(memory, seen) or past_deadline(job, memory, seen, now)
    if verdict is not None:
        return replace(base, verdict=verdict, running=job.spec.cleanup_policy == "keepPods")
    loss = find_loss(job, memory, seen)
    return go_on(job, memory, base, seen, now) if loss is None else after_loss(job, memory, base, loss, now)


def after_suspension(memory: Memory, base: Plan, now: float) -> Plan:
    """A new attempt, which costs nothing of the restart budget."""
    attempt = memory.attempt + 1
    return replace(base, attempt=attempt, fleet_attempt=attempt, attempt_time=now, running=True, resumed=True)


def finished(job: FP8RLJob, memory: Memory, base: Plan, now: float) -> Plan:
    """A job that has ended stays so; its pods and, after the TTL, the job itself are cleaned up."""
    ttl = job.spec.ttl_seconds_after_finished
    ended = memory.completion_time if memory.completion_time is not None else now
    due = None if ttl is None else ended + ttl
    return replace(
        base,
        verdict=memory.verdict,
        running=job.spec.cleanup_policy == "keepPods",
        delete_job=due is not None and now >= due,
        requeue_after=RESYNC_SECONDS if due is None else max(0.0, due - now),
    )


def said_by_roles(memory: Memory, seen: Observed) -> Verdict | None:
    """The end of the job by the word of its orchestrator, or its failure by the trainer's. Words of old attempts are ignored."""
    orchestrator, trainer = seen.orchestrator, seen.trainer
    if orchestrator is not None and orchestrator.attempt == memory.attempt:
        if orchestrator.phase == "complete":
            return Verdict(
                complete=True,
                reason=names.STEPS_DONE,
                message=orchestrator.message or f"{orchestrator.step} steps done",
            )
        if orchestrator.phase == "failed" and not restartable(orchestrator.reason, memory.last_failure_reason):
            return Verdict(complete=False, reason=orchestrator.reason or "Failed", message=orchestrator.message)
    failed = trainer is not None and trainer.attempt == memory.attempt and trainer.phase == "failed"
    if trainer is not None and failed and not restartable(trainer.reason, memory.last_failure_reason):
        return Verdict(complete=False, reason=trainer.reason or "Failed", message=trainer.message)
    return None


def past_deadline(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> Verdict | None:
    """Failure by activeDeadlineSeconds or preRunningDeadlineSeconds."""
    spec = job.spec
    age, limit = now - memory.start_time, spec.active_deadline_seconds
    if limit is not None and age > limit:
        message = f"ran for {age:.0f} s, activeDeadlineSeconds is {limit}"
        return Verdict(complete=False, reason=names.DEADLINE_EXCEEDED, message=message)
    limit = spec.pre_running_deadline_seconds
    if limit is not None and not running(memory, seen) and age > limit:
        message = (
            f"no step started within preRunningDeadlineSeconds, {limit} s: {waited_for(job, memory, seen).message}"
        )
        return Verdict(complete=False, reason=names.PRE_RUNNING_DEADLINE_EXCEEDED, message=message)
    return None


def running(memory: Memory, seen: Observed) -> bool:
    """Whether the job has ever come as far as its first step."""
    status = current_status(memory, seen)
    return memory.step > 0 or (status is not None and status.phase not in {"waiting", "booting"})


def current_status(memory: Memory, seen: Observed) -> OrchestratorStatus | None:
    """The orchestrator's word, if it is of this attempt."""
    status = seen.orchestrator
    return status if status is not None and status.attempt == memory.attempt else None


def after_loss(job: FP8RLJob, memory: Memory, base: Plan, loss: Loss, now: float) -> Plan:
    """A new attempt after a backoff, of the trainer alone where only it was lost; the end when the budget is spent."""
    policy = job.spec.failure_policy
    if loss.permanent:
        return replace(base, verdict=Verdict(complete=False, reason=loss.reason, message=loss.message), loss=loss)
    if memory.restarts >= policy.max_restarts:
        message = f"{loss.message}; failurePolicy.maxRestarts is {policy.max_restarts} and {memory.restarts} are spent"
        verdict = Verdict(complete=False, reason=names.RESTARTS_EXHAUSTED, message=message)
        return replace(base, verdict=verdict, loss=loss)
    delay = backoff(policy.backoff_seconds, memory.restarts)
    attempt = memory.attempt + 1
    fleet_goes_on = loss.reason in OF_TRAINER
    return replace(
        base,
        attempt=attempt,
        fleet_attempt=memory.fleet_attempt if fleet_goes_on else attempt,
        restarts=memory.restarts + 1,
        attempt_time=now + delay,
        running=fleet_goes_on or delay == 0,
        backing_off=delay > 0,
        waiting=Waiting(names.RESTARTING, f"attempt {attempt} in {delay} s: {loss.message}"),
        requeue_after=float(delay),
        loss=loss,
    )


def backoff(first: int, restarts: int) -> int:
    """Wait before the next restart, after so many: doubled by each, at most MAX_BACKOFF_SECONDS. Unit: seconds."""
    return min(first << min(restarts, MAX_BACKOFF_SECONDS.bit_length()), MAX_BACKOFF_SECONDS)


def go_on(job: FP8RLJob, memory: Memory, base: Plan, seen: Observed, now: float) -> Plan:
    """Start or keep the attempt's pods, end those of older ones, say who may belong to the group."""
    foreign = (pod for pod in seen.pods if pod.attempt != memory.attempt_of(pod.role) and not pod.terminating)
    outdated = tuple(sorted(pod.uid for pod in foreign))
    if now < memory.attempt_time:
        return replace(
            base,
            running=memory.fleet_attempt < memory.attempt,
            backing_off=True,
            end_pods=outdated,
            group=group_document(job, memory, seen, now),
            waiting=Waiting(names.RESTARTING, f"attempt {memory.attempt} after the backoff"),
            requeue_after=memory.attempt_time - now,
        )
    return replace(
        base,
        running=True,
        end_pods=outdated,
        group=group_document(job, memory, seen, now),
        waiting=waited_for(job, memory, seen),
        stalled=stalled(job, memory, seen, now),
        requeue_after=RESYNC_SECONDS,
    )


def group_document(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> GroupDocument | None:
    """Who may belong to the weight-sync group: started pods of this attempt and its fleet, by uid, trainer first.

    `generation` is the time in milliseconds: it grows, also over restarts of the operator. None without an orchestrator.
    """
    if not any(pod.ip and not pod.starting for pod in seen.of_role(names.ORCHESTRATOR, memory.fleet_attempt)):
        return None
    engine = job.spec.inference.parallelism.tensor
    members = [
        *members_of(seen.of_role(names.TRAINER, memory.attempt), "trainer", max(1, job.spec.trainer.gpus_per_replica)),
        *members_of(seen.of_role(names.INFERENCE, memory.fleet_attempt), "inference", engine),
    ]
    return GroupDocument(
        job_uid=job.uid, attempt=memory.attempt, generation=int(now * 1000), members=members, suspended=False
    )


def members_of(pods: tuple[PodState, ...], role: str, world_size: int) -> list[GroupMember]:
    """Members of one role, by uid."""
    started = sorted(
        (pod for pod in pods if pod.ip and not pod.starting and pod.phase == "Running"), key=lambda p: p.uid
    )
    return [
        GroupMember.model_validate(
            {"pod": pod.name, "uid": pod.uid, "role": role, "address": pod.ip, "world_size": world_size}
        )
        for pod in started
    ]


def waited_for(job: FP8RLJob, memory: Memory, seen: Observed) -> Waiting:
    """What the job waits for, or that it runs."""
    for role, count in wanted_pods(job).items():
        pods = seen.of_role(role, memory.attempt_of(role))
        troubled = next((pod for pod in pods if pod.message and not pod.ready), None)
        if troubled is not None:
            words = ": ".join(filter(None, (f"pod {troubled.name}", troubled.reason, cause(troubled.message))))
            return Waiting(names.WAITING_FOR_PODS, words)
        started = sum(not pod.starting for pod in pods)
        if started < (job.spec.inference.min_replicas if role == names.INFERENCE else count):
            reason = (
                names.WAITING_FOR_REPLICAS
                if role == names.INFERENCE and running(memory, seen)
                else names.WAITING_FOR_PODS
            )
            preparing = f"; {pods[0].name} prepares the model" if any(pod.starting for pod in pods) else ""
            return Waiting(reason, f"{started} of {count} {role} pods have started{preparing}")
    status = current_status(memory, seen)
    if status is None:
        return Waiting(names.WAITING_FOR_PODS, "the orchestrator has not answered yet")
    trainers = seen.of_role(names.TRAINER, memory.attempt)
    if status.phase == "running" and (loading := next((pod for pod in trainers if not pod.ready), None)) is not None:
        return Waiting(names.WAITING_FOR_PODS, f"pod {loading.name} to load its checkpoint")
    if status.phase == "running":
        return Waiting(names.RUNNING, f"step {status.step} of {status.steps}")
    return Waiting(names.WAITING_FOR_WEIGHTS, status.waiting_for or f"the orchestrator is {status.phase}")


def wanted_pods(job: FP8RLJob) -> dict[str, int]:
    """Pods of each role."""
    return {
        names.TRAINER: job.spec.trainer.replicas,
        names.INFERENCE: job.spec.inference.replicas,
        names.ORCHESTRATOR: 1,
    }


def stalled(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> Waiting | None:
    """No step within stallDeadlineSeconds, with what was waited for."""
    status = current_status(memory, seen)
    since = max(
        memory.attempt_time,
        status.last_step_time if status is not None else 0.0,
        (status.engines_ready_time or 0.0) if status is not None else 0.0,
    )
    limit = job.spec.stall_deadline_seconds
    if now - since <= limit:
        return None
    what = waited_for(job, memory, seen)
    text = status.waiting_for if status is not None and status.waiting_for else what.message
    return Waiting(
        names.STALL_DEADLINE_EXCEEDED, f"no step within stallDeadlineSeconds, {limit} s; waiting for: {text}"
    )
