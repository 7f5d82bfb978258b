"""What to do next, as a pure function: (job with its status, Observed, now) -> Plan.

The order of the questions, each a function below: is the job ours, has it ended, is it suspended, has a role said that
it is over, has a deadline passed, has the spec changed, is a pod lost that the group cannot do without, and else who may belong
to the weight-sync group. What must outlive the operator stands in the job's status (`plan_memory`). Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fp8rl_operator import names
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan_ending import IDLE_SECONDS, finished, past_deadline, said_by_roles, said_complete
from fp8rl_operator.plan_group import group_document
from fp8rl_operator.plan_losses import OF_TRAINER, find_loss
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_refusals import avoided_by_engines, count_refusals, most_pods
from fp8rl_operator.plan_revisions import change_text, changed, of_trainer
from fp8rl_operator.plan_types import Loss, Plan, Refusals, Verdict, Waiting
from fp8rl_operator.plan_waiting import last_progress, stalled, waited_for, wanted_pods
from fp8rl_operator.spec import FP8RLJob

__all__ = ["Memory", "Plan", "Verdict", "Waiting", "compute_plan", "wanted_pods"]

RESYNC_SECONDS = 15.0
MAX_BACKOFF_SECONDS = 3600
FORCED_AFTER_SECONDS = 30.0  # past its grace, of a pod whose node has lost touch
STUCK_AFTER_SECONDS = 300.0  # of any other: its kubelet answers and may only be slow


def compute_plan(job: FP8RLJob, seen: Observed, now: float) -> Plan:
    """The next step of a job. `now` in Unix seconds."""
    memory = Memory.read(job.status, now)
    base = Plan(
        memory.attempt,
        memory.fleet_attempt,
        memory.restarts,
        memory.attempt_time,
        refusals=memory.refusals,
        suspended_seconds=memory.suspended_seconds,
    )
    if job.spec.managed_by != names.MANAGED_BY:
        return replace(base, hands_off=True)
    plan = decide(job, memory, base, seen, now)
    avoid = avoided_by_engines(memory, seen, plan.refusals, plan.fleet_attempt)
    forced, pause = held_by_dead_nodes(seen, now)
    return replace(
        plan,
        refusals=replace(plan.refusals, engines_avoid=avoid),
        force_pods=forced,
        requeue_after=min(plan.requeue_after, pause),
    )


def decide(job: FP8RLJob, memory: Memory, base: Plan, seen: Observed, now: float) -> Plan:
    """The questions in their order."""
    if memory.verdict is not None:
        return finished(job, memory, base, now)
    if job.spec.suspend and (done := said_complete(memory, seen)) is None:
        return replace(base, suspended=True, requeue_after=IDLE_SECONDS)
    if memory.suspended and not job.spec.suspend:
        return after_suspension(memory, base, now)
    verdict = done if job.spec.suspend else said_by_roles(memory, seen) or past_deadline(job, memory, seen, now)
    if verdict is not None:
        return replace(base, verdict=verdict, running=job.spec.cleanup_policy == "keepPods")
    if fields := changed(memory.applied, job):
        return after_change(job, memory, base, fields, now)
    loss = find_loss(job, memory, seen)
    return go_on(job, memory, base, seen, now) if loss is None else after_loss(job, memory, base, loss, now)


def after_suspension(memory: Memory, base: Plan, now: float) -> Plan:
    """A new attempt, which costs nothing of the restart budget; nodes that refused get another chance."""
    attempt = memory.attempt + memory.started
    return replace(
        base,
        attempt=attempt,
        fleet_attempt=attempt,
        attempt_time=now,
        running=True,
        resumed=True,
        refusals=Refusals(uids=memory.refusals.uids),
    )


def after_change(job: FP8RLJob, memory: Memory, base: Plan, fields: tuple[str, ...], now: float) -> Plan:
    """A new attempt of those whose part of the spec has changed; a backoff that runs goes on."""
    attempt, waits = memory.attempt + 1, now < memory.attempt_time
    fleet_goes_on = all(map(of_trainer, fields))
    return replace(
        base,
        attempt=attempt,
        fleet_attempt=memory.fleet_attempt if fleet_goes_on else attempt,
        attempt_time=max(now, memory.attempt_time),
        running=fleet_goes_on or not waits,
        backing_off=waits,
        changed=fields,
        waiting=Waiting(names.SPEC_CHANGED, change_text(memory.applied or {}, job, fields)),
        requeue_after=max(1.0, memory.attempt_time - now),
    )


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
    refusals, refused = count_refusals(job, memory, seen, now)
    plan = replace(
        base,
        running=True,
        refusals=refusals,
        refused=refused,
        most=most_pods(refusals, now),
        end_pods=pods_to_end(memory, seen),
        group=group_document(job, memory, seen, now),
    )
    if now < memory.attempt_time:
        return replace(
            plan,
            running=memory.fleet_attempt < memory.attempt,
            backing_off=True,
            waiting=Waiting(names.RESTARTING, f"attempt {memory.attempt} after the backoff"),
            requeue_after=memory.attempt_time - now,
        )
    if seen.blocked is not None and not any(seen.of_role(role, memory.attempt_of(role)) for role in wanted_pods(job)):
        blocked = Waiting(seen.blocked.reason, seen.blocked.message, person=True)
        return replace(plan, running=False, waiting=blocked, requeue_after=next_look(job, memory, seen, plan, now))
    waiting = waited_for(job, memory, seen, refusals, now)
    return replace(
        plan,
        waiting=waiting,
        stalled=stalled(job, memory, seen, waiting, now),
        requeue_after=next_look(job, memory, seen, plan, now),
    )


def pods_to_end(memory: Memory, seen: Observed) -> tuple[str, ...]:
    """Uids of pods of older attempts, and of engines that failed for good: a ReplicaSet replaces those but never removes them."""
    return tuple(
        sorted(
            pod.uid
            for pod in seen.pods
            if not pod.terminating
            and (pod.attempt != memory.attempt_of(pod.role) or (pod.role == names.INFERENCE and pod.phase == "Failed"))
        )
    )


def held_by_dead_nodes(seen: Observed, now: float) -> tuple[tuple[str, ...], float]:
    """Uids of pods that should long have ended, and seconds until the next one is: a StatefulSet makes no other before they are gone."""
    due = {
        pod.uid: pod.gone_by + (FORCED_AFTER_SECONDS if pod.unreachable else STUCK_AFTER_SECONDS)
        for pod in seen.pods
        if pod.terminating and pod.gone_by is not None
    }
    waits = [max(1.0, when - now + 0.5) for when in due.values() if when >= now]
    return tuple(sorted(uid for uid, when in due.items() if when < now)), min(waits, default=inf)


def next_look(job: FP8RLJob, memory: Memory, seen: Observed, plan: Plan, now: float) -> float:
    """Seconds until the next pass without an event: soon while pods answer, later the longer none does, at the next deadline."""
    spec, began = job.spec, memory.start_time + memory.suspended_seconds
    answering = any(pod.ip and not pod.starting for pod in seen.pods)
    waited = now - memory.attempt_time
    pause = RESYNC_SECONDS if answering else min(IDLE_SECONDS, max(RESYNC_SECONDS, waited / 2))
    limits = (spec.active_deadline_seconds, spec.pre_running_deadline_seconds)
    due = [began + limit for limit in limits if limit is not None]
    due += [last_progress(memory, seen) + spec.stall_deadline_seconds, plan.refusals.until]
    return max(1.0, min([pause, *(when - now + 0.5 for when in due if when > now)]))
