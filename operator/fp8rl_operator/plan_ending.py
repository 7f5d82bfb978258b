"""How a job ends: by the word of a role, by a deadline, and what becomes of it then. Pure."""

from __future__ import annotations

from dataclasses import replace

from fp8rl_operator import names
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan_group import current_status
from fp8rl_operator.plan_losses import restartable
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_types import Plan, Verdict
from fp8rl_operator.plan_waiting import running, waited_for
from fp8rl_operator.spec import FP8RLJob

IDLE_SECONDS = 300.0


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
        requeue_after=IDLE_SECONDS if due is None else max(0.0, due - now),
    )


def said_complete(memory: Memory, seen: Observed) -> Verdict | None:
    """The end of the job by the word of its orchestrator. Words of old attempts are ignored."""
    status = current_status(memory, seen)
    if status is None or status.phase != "complete":
        return None
    return Verdict(complete=True, reason=names.STEPS_DONE, message=status.message or f"{status.step} steps done")


def said_by_roles(memory: Memory, seen: Observed) -> Verdict | None:
    """The end of the job by the word of its orchestrator, or its failure by the trainer's."""
    if (done := said_complete(memory, seen)) is not None:
        return done
    for role in (current_status(memory, seen), seen.trainer):
        failed = role is not None and role.attempt == memory.attempt and role.phase == "failed"
        if role is not None and failed and not restartable(role.reason, memory.last_failure_reason):
            return Verdict(complete=False, reason=role.reason or "Failed", message=role.message)
    return None


def past_deadline(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> Verdict | None:
    """Failure by activeDeadlineSeconds or preRunningDeadlineSeconds; suspended time does not count."""
    spec = job.spec
    age, limit = memory.age(now), spec.active_deadline_seconds
    if limit is not None and age > limit:
        message = f"ran for {age:.0f} s, activeDeadlineSeconds is {limit}"
        return Verdict(complete=False, reason=names.DEADLINE_EXCEEDED, message=message)
    limit = spec.pre_running_deadline_seconds
    if limit is not None and not running(memory, seen) and age > limit:
        waits = seen.blocked or waited_for(job, memory, seen, memory.refusals, now)
        message = f"no step started within preRunningDeadlineSeconds, {limit} s: {waits.message}"
        return Verdict(complete=False, reason=names.PRE_RUNNING_DEADLINE_EXCEEDED, message=message)
    return None
