"""Which loss costs what: killed by the kernel, evicted, node gone, engines that were asked away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import make_job, make_observed, make_pods

from fp8rl_operator.observed import Observed, PodState, Trouble
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.status import next_status

NOW = 1_000_000.0
RESTART = {"failurePolicy": {"backoffSeconds": 0, "replicaLoss": "restart"}}


def running(spec: dict[str, Any] | None = None, seen: Observed | None = None) -> dict[str, Any]:
    """The status of a job that runs."""
    job, found = make_job(spec), seen or make_observed()
    status = next_status(job, found, compute_plan(job, found, NOW), NOW)
    assert status is not None
    return status


def with_trainer(**changes: Any) -> tuple[PodState, ...]:
    """All pods, the trainer's changed."""
    return tuple(replace(pod, **changes) if pod.role == "trainer" else pod for pod in make_pods())


def test_a_trainer_killed_for_its_memory_names_the_limit_and_is_restarted_by_the_budget() -> None:
    pods = with_trainer(restarts=1, exit_code=137, reason="OOMKilled")
    plan = compute_plan(make_job(status=running()), make_observed(pods=pods), NOW + 1)
    assert (plan.attempt, plan.fleet_attempt, plan.restarts, plan.verdict) == (1, 0, 1, None)
    assert plan.loss is not None
    assert (plan.loss.reason, plan.loss.message) == (
        "HostOutOfMemory",
        (
            "trainer pod job-trainer-0 ended with code 137 (OOMKilled); raise resources.limits.memory (and requests) of container main"
            " in spec.trainer.template.spec.containers, or lower trainer.offload"
        ),
    )


def test_an_evicted_trainer_is_lost_in_the_kubelets_words() -> None:
    words = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 40Mi."
    pods = with_trainer(phase="Failed", ready=False, reason="Evicted", message=words)
    plan = compute_plan(make_job(status=running()), make_observed(pods=pods), NOW + 1)
    assert plan.loss is not None
    assert (plan.loss.reason, plan.loss.message) == (
        "TrainerLost",
        f"trainer pod job-trainer-0 ended (Evicted): {words}",
    )


def test_an_evicted_trainer_that_never_started_is_no_loss() -> None:
    pods = with_trainer(phase="Failed", ready=False, reason="Evicted", message="m", starting=True)
    assert compute_plan(make_job(), make_observed(pods=pods), NOW).loss is None


def test_a_deleted_trainer_is_told_with_what_the_cluster_says() -> None:
    pods = with_trainer(terminating=True)
    evicted = Trouble("trainer", "TaintManagerEviction", "Marking for deletion Pod team/job-trainer-0")
    seen = make_observed(pods=pods, troubles=(evicted,))
    loss = compute_plan(make_job(status=running()), seen, NOW + 1).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (
        "TrainerLost",
        "1 trainer pods were deleted: job-trainer-0; TaintManagerEviction: Marking for deletion Pod team/job-trainer-0",
    )


NODE_TEXT = (
    "trainer pod job-trainer-0 is on node n1, which has lost touch with the cluster: its pods are deleted without it and start"
    " elsewhere; drain or repair the node"
)


@pytest.mark.parametrize("terminating", [False, True])
def test_a_trainer_on_a_node_that_lost_touch_is_lost_once_it_is_silent(*, terminating: bool) -> None:
    pods = with_trainer(unreachable=True, ready=False, node="n1", terminating=terminating)
    plan = compute_plan(make_job(status=running()), make_observed(pods=pods, trainer=None), NOW + 1)
    assert plan.loss is not None
    assert (plan.loss.reason, plan.loss.message) == ("NodeLost", NODE_TEXT)
    assert (plan.attempt, plan.fleet_attempt) == (1, 0)


def test_a_trainer_that_answers_from_an_unreachable_node_goes_on() -> None:
    pods = with_trainer(unreachable=True, ready=False, node="n1")
    plan = compute_plan(make_job(status=running()), make_observed(pods=pods), NOW + 1)
    assert plan.loss is None
    assert plan.waiting is not None
    assert (
        plan.waiting.message == "pod job-trainer-0 to load its checkpoint; its node n1 has lost touch with the cluster"
    )


@pytest.mark.parametrize(("late", "forced"), [(29.0, ()), (31.0, ("trainer-0-0",))])
def test_a_pod_that_its_node_does_not_let_go_is_forced_thirty_seconds_after_its_grace(
    late: float, forced: tuple[str, ...]
) -> None:
    pods = with_trainer(unreachable=True, terminating=True, gone_by=NOW)
    for spec in ({}, {"suspend": True}):
        plan = compute_plan(make_job(spec, running()), make_observed(pods=pods), NOW + late)
        assert plan.force_pods == forced


@pytest.mark.parametrize(("late", "forced"), [(299.0, ()), (301.0, ("trainer-0-0",))])
def test_a_pod_whose_kubelet_is_merely_slow_is_forced_after_five_minutes(late: float, forced: tuple[str, ...]) -> None:
    pods = with_trainer(terminating=True, gone_by=NOW)
    plan = compute_plan(make_job(None, running()), make_observed(pods=pods), NOW + late)
    assert plan.force_pods == forced


def test_engines_that_were_asked_away_are_no_loss_under_restart() -> None:
    status = running(RESTART | {"inference": {"replicas": 3}}, make_observed(pods=tuple(make_pods(engines=3))))
    fewer = RESTART | {"inference": {"replicas": 2}}
    gone = make_observed(pods=tuple(make_pods(engines=2)))
    plan = compute_plan(make_job(fewer, status), gone, NOW + 5)
    assert (plan.loss, plan.attempt, plan.replicas("inference", 2)) == (None, 0, 2)
    two = make_observed(pods=tuple(make_pods(engines=1)))
    assert compute_plan(make_job(fewer, status), two, NOW + 5).loss is not None


def test_more_engines_cost_no_attempt_and_join_the_group() -> None:
    more = RESTART | {"inference": {"replicas": 3, "minReplicas": 2}}
    job = make_job(more, running(RESTART))
    plan = compute_plan(job, make_observed(), NOW + 5)
    assert (plan.attempt, plan.restarts, plan.replicas("inference", 3)) == (0, 0, 3)
    joined = compute_plan(job, make_observed(pods=tuple(make_pods(engines=3))), NOW + 9)
    assert joined.group is not None
    assert [member.pod for member in joined.group.members] == [
        "job-trainer-0",
        *(f"job-inference-{n}" for n in range(3)),
    ]
    assert joined.group.min_replicas == 2


def test_an_engine_that_is_gone_when_the_operator_comes_back_has_left_the_group() -> None:
    plan = compute_plan(make_job(status=running()), make_observed(pods=tuple(make_pods(engines=1))), NOW + 600)
    assert (plan.loss, plan.attempt) == (None, 0)
    assert plan.group is not None
    assert [member.pod for member in plan.group.members] == ["job-trainer-0", "job-inference-0"]


def test_an_orchestrator_with_a_new_pod_costs_nothing() -> None:
    pods = tuple(replace(pod, uid="new") if pod.role == "orchestrator" else pod for pod in make_pods())
    plan = compute_plan(make_job(status=running()), make_observed(pods=pods), NOW + 600)
    assert (plan.loss, plan.attempt, plan.restarts) == (None, 0, 0)


def test_the_groups_generation_grows_also_when_the_clock_steps_back() -> None:
    seen = make_observed()
    assert seen.orchestrator is not None
    held = seen.orchestrator.model_copy(update={"group_generation": 2_000_000_000})
    group = compute_plan(make_job(), make_observed(orchestrator=held), NOW).group
    assert group is not None
    assert group.generation == 2_000_000_001
    later = compute_plan(make_job(), make_observed(), NOW).group
    assert later is not None
    assert later.generation == 1_000_000_000
