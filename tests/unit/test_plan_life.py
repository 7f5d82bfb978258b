"""Suspension, deadlines, the pace of passes, clocks."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_job, make_observed, make_orchestrator

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.plan_memory import Memory
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status import next_status

NOW = 1_000_000.0
GONE = Observed()


class Life:
    """A job over several passes."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.job: FP8RLJob = make_job(spec)

    def at(self, second: float, seen: Observed, **spec: Any) -> Plan:
        """One pass, with other fields of the spec."""
        self.spec |= spec
        self.job = make_job(self.spec, self.job.status)
        plan = compute_plan(self.job, seen, NOW + second)
        status = next_status(self.job, seen, plan, NOW + second)
        self.job = make_job(self.spec, self.job.status if status is None else status)
        return plan

    @property
    def times(self) -> dict[str, Any]:
        """Start and suspension."""
        return {
            key: self.job.status[key]
            for key in ("startTime", "suspendTime", "suspendedSeconds")
            if key in self.job.status
        }


def test_suspended_time_counts_for_no_deadline() -> None:
    life = Life(activeDeadlineSeconds=100)
    life.at(0, make_observed())
    life.at(60, make_observed(), suspend=True)
    assert life.times == {"startTime": "1970-01-12T13:46:40Z", "suspendTime": "1970-01-12T13:47:40Z"}
    assert life.at(5000, GONE).verdict is None
    assert life.at(6060, GONE, suspend=False).verdict is None
    assert life.times == {"startTime": "1970-01-12T13:46:40Z", "suspendedSeconds": 6000}
    life.at(6070, GONE, suspend=True)
    life.at(6080, GONE, suspend=False)
    assert life.times["suspendedSeconds"] == 6010
    assert life.at(6109, GONE).verdict is None
    verdict = life.at(6111, GONE).verdict
    assert verdict is not None
    assert verdict.message == "ran for 101 s, activeDeadlineSeconds is 100"


def test_a_job_that_is_made_suspended_starts_with_its_first_attempt() -> None:
    life = Life(suspend=True, preRunningDeadlineSeconds=50)
    assert life.at(0, GONE).suspended
    assert "startTime" not in life.job.status
    plan = life.at(900, GONE, suspend=False)
    assert (plan.attempt, plan.running, plan.verdict) == (0, True, None)
    assert life.times == {"startTime": "1970-01-12T14:01:40Z"}
    assert life.at(949, GONE).verdict is None
    assert life.at(951, GONE).verdict is not None


def test_pods_that_a_suspension_took_away_are_no_loss() -> None:
    life = Life()
    life.at(0, make_observed())
    life.at(1, make_observed(), suspend=True)
    assert [life.job.status[role]["uids"] for role in ("trainer", "inference")] == [[], []]
    plan = life.at(2, GONE, suspend=False)
    assert (plan.attempt, plan.restarts, plan.loss, plan.resumed) == (1, 0, None, True)
    assert life.at(3, GONE).loss is None


def test_a_suspension_while_backing_off_keeps_what_was_spent_and_resumes_at_once() -> None:
    life = Life()
    life.at(0, make_observed())
    life.at(1, make_observed(pods=()))
    assert (life.job.status["restarts"], life.job.status["attempt"]) == (1, 1)
    assert life.at(2, GONE, suspend=True).suspended
    plan = life.at(3, GONE, suspend=False)
    assert (plan.attempt, plan.restarts, plan.attempt_time, plan.backing_off) == (2, 1, NOW + 3, False)


def test_a_job_that_is_complete_when_it_is_suspended_is_complete() -> None:
    life = Life()
    life.at(0, make_observed())
    plan = life.at(1, make_observed(orchestrator=make_orchestrator(phase="complete", step=4)), suspend=True)
    assert plan.verdict is not None
    assert plan.verdict.complete
    assert not life.at(2, GONE).suspended
    assert life.at(3, GONE, suspend=False).verdict == plan.verdict


def test_a_wait_that_a_wrong_clock_has_written_is_cut() -> None:
    memory = Memory.read({"startTime": "1970-01-12T13:46:40Z", "attemptTime": "2999-01-01T00:00:00Z"}, NOW)
    assert memory.attempt_time == NOW + 3600


@pytest.mark.parametrize(
    ("spec", "seen", "second", "pause"),
    [
        ({}, GONE, 0, 15.0),
        ({}, GONE, 100, 50.0),
        ({}, GONE, 800, 100.5),  # the stall
        ({}, GONE, 10_000, 300.0),
        ({"preRunningDeadlineSeconds": 110}, GONE, 100, 10.5),
        ({"activeDeadlineSeconds": 101}, make_observed(), 100, 1.5),
        ({}, make_observed(), 100, 15.0),
        ({"suspend": True}, GONE, 100, 300.0),
    ],
)
def test_a_job_without_events_is_looked_at_ever_more_rarely(
    spec: dict[str, Any], seen: Observed, second: float, pause: float
) -> None:
    job = make_job(spec, {"startTime": "1970-01-12T13:46:40Z", "attemptTime": "1970-01-12T13:46:40Z"})
    assert compute_plan(job, seen, NOW + second).requeue_after == pause
