"""Changes of the spec while a job runs: what stays, what starts again, what is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import make_job, make_observed, make_orchestrator, make_pods

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.plan_revisions import applied, change_text, changed, revision
from fp8rl_operator.spec.status import JobStatus
from fp8rl_operator.status import next_status

NOW = 1_000_000.0
ROLES = ("trainer", "inference", "orchestrator")


def started(spec: dict[str, Any] | None = None) -> dict[str, Any]:
    """The status of a job that runs."""
    job = make_job(spec)
    status = next_status(job, make_observed(), compute_plan(job, make_observed(), NOW), NOW)
    assert status is not None
    return status


def test_what_is_applied_is_told_of_each_job_anew_and_nobody_can_change_it() -> None:
    job = make_job()
    other = job.model_copy(update={"spec": job.spec.model_copy(update={"seed": 3})})
    first = applied(job)
    assert first | {"seed": "3"} == applied(other)
    first.clear()
    assert "rollout.steps" in applied(job)


def test_what_is_applied_are_the_fields_that_are_not_at_their_default() -> None:
    assert applied(
        make_job({"trainer": {"template": {"spec": {"hostNetwork": True}}}, "weightSync": {"port": 29500}})
    ) == {
        "model.source": '{"builtin":{"name":"reverse-text-tiny"}}',
        "rollout.batchSize": "8",
        "rollout.environment": '{"id":"reverse-text"}',
        "rollout.groupSize": "4",
        "rollout.maxTokens": "8",
        "rollout.steps": "4",
        "inference.gpusPerReplica": "0",
        "trainer.backend": '"torch"',
        "trainer.gpusPerReplica": "0",
        "trainer.offload": '"none"',
        "trainer.optimizer": '{"learningRate":"0.0005"}',
        "trainer.template": '{"spec":{"hostNetwork":true}}',
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"inference": {"replicas": 7, "minReplicas": 2}},
        {"failurePolicy": {"maxRestarts": 9, "replicaLoss": "restart"}},
        {"activeDeadlineSeconds": 9, "preRunningDeadlineSeconds": 9, "stallDeadlineSeconds": 9},
        {"ttlSecondsAfterFinished": 9, "cleanupPolicy": "keepPods"},
        {"podDisruptionBudget": "disabled", "networkPolicy": "disabled"},
    ],
)
def test_what_changes_in_place_restarts_nobody(spec: dict[str, Any]) -> None:
    assert changed(started()["applied"], make_job(spec)) == ()
    assert [revision(make_job(spec), role) for role in ROLES] == [revision(make_job(), role) for role in ROLES]


def test_a_change_of_the_trainer_restarts_the_trainer_alone_and_costs_nothing() -> None:
    job = make_job({"trainer": {"optimizer": {"learningRate": "1e-5"}, "compile": True}}, started())
    plan = compute_plan(job, make_observed(), NOW + 1)
    assert (plan.attempt, plan.fleet_attempt, plan.restarts, plan.running) == (1, 0, 0, True)
    assert plan.changed == ("trainer.compile", "trainer.optimizer")
    assert plan.waiting is not None
    assert plan.waiting.reason == "SpecChanged"
    assert plan.waiting.message == (
        'spec.trainer.compile is true, was the default; spec.trainer.optimizer is {"learningRate":"1e-05"}, was'
        ' {"learningRate":"0.0005"}: a new attempt of the trainer, which costs no restart'
    )
    status = next_status(job, make_observed(), plan, NOW + 1)
    assert status is not None
    assert (status["attempt"], status["fleetAttempt"], status["restarts"]) == (1, 0, 0)
    assert status["applied"] == applied(job)
    assert "lastFailure" not in status
    later = compute_plan(
        make_job({"trainer": {"compile": True}}, {**status, "applied": applied(job)}), Observed(), NOW + 2
    )
    assert later.changed == ("trainer.optimizer",)
    settled = compute_plan(job.model_copy(update={"status": status}), make_observed(), NOW + 2)
    assert (settled.attempt, settled.changed, settled.end_pods) == (1, (), ("trainer-0-0",))


def test_any_other_change_restarts_the_whole_job() -> None:
    job = make_job({"rollout": {"steps": 9}}, started())
    plan = compute_plan(job, make_observed(), NOW + 1)
    assert (plan.attempt, plan.fleet_attempt, plan.restarts) == (1, 1, 0)
    assert plan.waiting is not None
    assert plan.waiting.message == (
        "spec.rollout.steps is 9, was 4: a new attempt of the whole job, which costs no restart"
    )


def test_revisions_of_the_fleet_know_nothing_of_the_trainer() -> None:
    base, other = make_job(), make_job({"trainer": {"compile": True}})
    assert [revision(base, role) == revision(other, role) for role in ROLES] == [False, True, True]
    wide = make_job({"rollout": {"maxTokens": 16}})
    assert [revision(base, role) == revision(wide, role) for role in ROLES] == [False, False, False]
    assert len(revision(base, "trainer")) == 10


def test_a_status_of_a_release_without_revisions_adopts_what_runs() -> None:
    old = {key: value for key, value in started().items() if key != "applied"}
    job = make_job({"rollout": {"steps": 9}}, old)
    plan = compute_plan(job, make_observed(), NOW + 1)
    assert (plan.attempt, plan.changed) == (0, ())
    status = next_status(job, make_observed(), plan, NOW + 1)
    assert status is not None
    assert status["applied"]["rollout.steps"] == "9"
    JobStatus.model_validate_json(json.dumps(status))


def test_a_change_during_a_backoff_waits_for_its_end() -> None:
    status = started() | {"attempt": 1, "restarts": 1, "attemptTime": "1970-01-12T13:47:00Z"}
    plan = compute_plan(make_job({"rollout": {"steps": 9}}, status), Observed(), NOW + 5)
    assert (plan.attempt, plan.fleet_attempt, plan.attempt_time, plan.running) == (2, 2, NOW + 20, False)
    assert (plan.requeue_after, plan.restarts) == (15.0, 1)


def test_a_long_value_is_told_as_another_one_and_many_fields_are_counted() -> None:
    before = {f"rollout.f{number}": "1" for number in range(10)} | {"trainer.template": "sha256:0"}
    job = make_job({"trainer": {"template": {"spec": {"nodeSelector": {"a": "b" * 60}}}}})
    assert change_text(before, job, ("trainer.template",)) == (
        "spec.trainer.template is another one, was another one: a new attempt of the trainer, which costs no restart"
    )
    text = change_text(before, job, tuple(f"rollout.f{number}" for number in range(10)))
    assert text.endswith("; 2 more fields have changed: a new attempt of the whole job, which costs no restart")


def test_out_of_memory_is_forgiven_once_the_spec_has_changed() -> None:
    failed = {"reason": "TrainerOutOfMemory", "message": "m", "time": "1970-01-12T13:46:40Z", "attempt": 0}
    oom = {"attempt": 1, "phase": "failed", "reason": "TrainerOutOfMemory", "message": "rank 0"}
    seen = make_observed(pods=tuple(make_pods(1)), orchestrator=make_orchestrator(**oom))
    status = started() | {"attempt": 1, "fleetAttempt": 1, "restarts": 1, "lastFailure": failed}
    assert compute_plan(make_job(status=status), seen, NOW + 9).verdict is not None
    changed_since = status | {"attempt": 2, "fleetAttempt": 2}
    again = make_observed(pods=tuple(make_pods(2)), orchestrator=make_orchestrator(**oom | {"attempt": 2}))
    plan = compute_plan(make_job(status=changed_since), again, NOW + 9)
    assert (plan.verdict, plan.attempt, plan.restarts) == (None, 3, 2)
