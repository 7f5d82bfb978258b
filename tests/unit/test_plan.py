"""Plans: exact decisions from job, observation and clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import make_job, make_observed, make_orchestrator, make_pod, make_pods, make_trainer
from failure_cases import CASES, Case, essence, wanted

from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.observed import Observed, PodState
from fp8rl_operator.plan import Memory, Verdict, compute_plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status import next_status

NOW = 1_000_000.0


class PureWorld:
    """Pods as StatefulSets and Deployments would have them, without any process."""

    def __init__(self, job: FP8RLJob) -> None:
        self.job = job
        self.now = NOW
        self.pods: list[PodState] = make_pods()
        self.words: dict[str, str] = {}

    def observe(self) -> Observed:
        attempt = max((pod.attempt for pod in self.pods), default=0)
        trainer, orchestrator = make_trainer(attempt=attempt), make_orchestrator(attempt=attempt)
        if "trainer" in self.words:
            trainer = make_trainer(attempt=0, phase="failed", reason=self.words["trainer"])
        if "orchestrator" in self.words:
            orchestrator = make_orchestrator(attempt=0, phase="failed", reason=self.words["orchestrator"])
        return Observed(tuple(self.pods), orchestrator, trainer, "t")

    def step(self) -> None:
        self.now += 1.0
        plan = compute_plan(self.job, seen := self.observe(), self.now)
        status = next_status(self.job, seen, plan, self.now)
        if status is not None:
            self.job = self.job.model_copy(update={"status": status})
        engines = plan.replicas("inference", self.job.spec.inference.replicas)
        scaled = engines != sum(pod.role == "inference" for pod in self.pods)
        if plan.verdict is None and (plan.loss is not None or plan.changed or scaled):
            wanted = make_pods(plan.attempt, engines=engines, fleet=plan.fleet_attempt)
            kept = {pod.uid: pod for pod in self.pods}
            self.pods = [kept.get(pod.uid, pod) for pod in wanted if plan.replicas(pod.role, 1)]
            self.words = {}

    def strike(self, case: Case) -> None:
        if case.strike == "edit":
            self.job = make_job(merge(case.spec, case.change), self.job.status)
            return
        target = next((pod for pod in self.pods if pod.role == case.role), None)
        if target is None:
            return
        self.pods.remove(target)
        if case.strike == "kill":
            self.pods.append(replace(target, restarts=1, exit_code=137, ready=True))
        elif case.strike == "delete":
            self.pods.append(replace(target, uid=f"{target.uid}-again"))
        else:
            self.pods.append(target)
            self.words[case.role] = case.word


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_failure_case(case: Case) -> None:
    world = PureWorld(make_job(case.spec))
    world.step()
    before = {pod.uid for pod in world.pods}
    world.strike(case)
    for _ in range(4):
        world.step()
    assert essence(world.job.status, case.expected) == wanted(case.expected)
    assert {pod.role for pod in world.pods if pod.uid not in before} == set(case.expected.new_pods)
    assert len(world.pods) == case.engines + 2 or world.job.status.get("completionTime")


def test_a_new_job_runs_its_pods_at_once_and_waits_for_them() -> None:
    plan = compute_plan(make_job(), Observed(), NOW)
    assert (plan.attempt, plan.restarts, plan.running, plan.group) == (0, 0, True, None)
    assert plan.waiting is not None
    assert (plan.waiting.reason, plan.waiting.message) == ("WaitingForPods", "0 of 1 trainer pods have started")


def test_the_group_has_started_pods_only_by_uid_trainer_first() -> None:
    pods = [
        make_pod("orchestrator"),
        make_pod("inference", 0, uid="b"),
        make_pod("inference", 1, uid="a"),
        make_pod("inference", 2, uid="c", starting=True),
        make_pod("inference", 3, uid="d", terminating=True),
        make_pod("trainer", 0, uid="z"),
    ]
    job = make_job({"inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}}})
    group = compute_plan(job, make_observed(pods=tuple(pods)), NOW).group
    assert group is not None
    assert [(member.uid, member.world_size) for member in group.members] == [("z", 1), ("a", 2), ("b", 2)]
    assert (group.generation, group.attempt, group.job_uid) == (1_000_000_000, 0, job.uid)


def test_the_backoff_doubles_and_no_trainer_runs_meanwhile() -> None:
    job = make_job({"failurePolicy": {"backoffSeconds": 10}})
    world = PureWorld(job)
    world.step()
    world.pods[0] = replace(world.pods[0], restarts=1, exit_code=1)
    seen = world.observe()
    plan = compute_plan(world.job, seen, NOW + 2)
    assert (plan.attempt, plan.fleet_attempt, plan.restarts, plan.requeue_after) == (1, 0, 1, 10.0)
    assert (plan.replicas("trainer", 1), plan.replicas("inference", 2), plan.replicas("orchestrator", 1)) == (0, 2, 1)
    assert plan.attempt_time == NOW + 12
    status = next_status(world.job, seen, plan, NOW + 2)
    waiting = compute_plan(world.job.model_copy(update={"status": status}), Observed(tuple(make_pods())), NOW + 5)
    assert (waiting.replicas("trainer", 1), waiting.requeue_after, waiting.attempt) == (0, 7.0, 1)
    assert waiting.end_pods == ("trainer-0-0",)
    assert waiting.group is not None
    assert (waiting.group.attempt, [member.role for member in waiting.group.members]) == (1, ["inference"] * 2)
    lost = Observed((make_pod("trainer", attempt=1, restarts=1, exit_code=1),))
    again = compute_plan(world.job.model_copy(update={"status": status}), lost, NOW + 60)
    assert again.requeue_after == 20.0


def test_a_lost_engine_under_restart_takes_all_pods_away_until_the_backoff_is_over() -> None:
    world = PureWorld(make_job({"failurePolicy": {"backoffSeconds": 10, "replicaLoss": "restart"}}))
    world.step()
    world.pods[2] = replace(world.pods[2], restarts=1, exit_code=1)
    seen = world.observe()
    plan = compute_plan(world.job, seen, NOW + 2)
    assert (plan.attempt, plan.fleet_attempt, plan.running) == (1, 1, False)
    status = next_status(world.job, seen, plan, NOW + 2)
    later = compute_plan(world.job.model_copy(update={"status": status}), Observed(tuple(make_pods())), NOW + 5)
    assert (later.running, len(later.end_pods), later.group) == (False, 4, None)
    again = compute_plan(world.job.model_copy(update={"status": status}), Observed(), NOW + 13)
    assert [again.replicas(role, 1) for role in ("trainer", "inference", "orchestrator")] == [1, 1, 1]


def test_a_trainer_that_loads_its_checkpoint_is_waited_for_while_the_engines_run() -> None:
    pods = [replace(pod, ready=pod.role != "trainer") for pod in make_pods(1, fleet=0)]
    seen = make_observed(pods=tuple(pods), orchestrator=make_orchestrator(attempt=1), trainer=None)
    plan = compute_plan(make_job(status={"attempt": 1, "fleetAttempt": 0, "restarts": 1}), seen, NOW)
    assert plan.waiting is not None
    assert (plan.waiting.reason, plan.waiting.message) == (
        "WaitingForPods",
        "pod job-trainer-0 to load its checkpoint",
    )
    assert plan.group is not None
    assert (plan.group.attempt, len(plan.group.members)) == (1, 3)


def test_pods_of_an_old_attempt_are_ended() -> None:
    job = make_job(status={"attempt": 1, "restarts": 1, "startTime": "1970-01-01T00:00:00Z"})
    plan = compute_plan(job, Observed((make_pod("trainer", uid="old"), make_pod("trainer", uid="new", attempt=1))), NOW)
    assert plan.end_pods == ("old",)


def test_words_of_an_old_attempt_are_ignored() -> None:
    job = make_job(status={"attempt": 1, "startTime": "1970-01-12T13:46:40Z"})
    seen = make_observed(orchestrator=make_orchestrator(phase="failed", reason="NaN"), pods=tuple(make_pods(1)))
    assert compute_plan(job, seen, NOW).verdict is None


def test_the_end_is_final_whatever_is_seen_later() -> None:
    world = PureWorld(make_job())
    done = make_observed(orchestrator=make_orchestrator(phase="complete", step=4))
    plan = compute_plan(world.job, done, NOW)
    assert plan.verdict == Verdict(complete=True, reason="StepsDone", message="4 steps done")
    status = next_status(world.job, done, plan, NOW)
    later = compute_plan(make_job(status=status), make_observed(), NOW + 100)
    assert later.verdict == plan.verdict
    assert not later.running


@pytest.mark.parametrize(
    ("spec", "seen", "later", "reason"),
    [
        ({"activeDeadlineSeconds": 100}, make_observed(), 101.0, "DeadlineExceeded"),
        ({"activeDeadlineSeconds": 100}, make_observed(), 99.0, None),
        ({"preRunningDeadlineSeconds": 50}, Observed(), 51.0, "PreRunningDeadlineExceeded"),
        ({"preRunningDeadlineSeconds": 50}, make_observed(), 51.0, None),
    ],
)
def test_deadlines(spec: dict[str, Any], seen: Observed, later: float, reason: str | None) -> None:
    job = make_job(spec, {"startTime": "1970-01-12T13:46:40Z"})
    verdict = compute_plan(job, seen, NOW + later).verdict
    assert (verdict.reason if verdict else None) == reason


def test_a_run_without_steps_is_stalled_with_what_it_waits_for() -> None:
    orchestrator = make_orchestrator(last_step_time=NOW - 901, waiting_for="rollouts of step 2")
    job = make_job(status={"startTime": "1970-01-01T00:00:00Z"})
    plan = compute_plan(job, make_observed(orchestrator=orchestrator), NOW)
    assert plan.stalled is not None
    expected = "no step within stallDeadlineSeconds, 900 s; waiting for: rollouts of step 2"
    assert (plan.stalled.reason, plan.stalled.message) == ("StallDeadlineExceeded", expected)
    fresh = make_orchestrator(last_step_time=NOW - 899)
    assert compute_plan(job, make_observed(orchestrator=fresh), NOW).stalled is None


def test_suspension_takes_the_pods_and_resume_starts_a_new_attempt_for_free() -> None:
    job = make_job({"suspend": True}, {"startTime": "1970-01-12T13:46:40Z"})
    plan = compute_plan(job, make_observed(), NOW)
    assert (plan.suspended, plan.running, plan.attempt) == (True, False, 0)
    status = next_status(job, make_observed(), plan, NOW)
    resumed = compute_plan(make_job(status=status), Observed(), NOW + 50)
    assert (resumed.running, resumed.attempt, resumed.restarts, resumed.resumed) == (True, 1, 0, True)


def test_another_controllers_job_is_left_alone() -> None:
    plan = compute_plan(make_job({"managedBy": "kueue.x-k8s.io/multikueue"}), make_observed(), NOW)
    assert plan.hands_off
    assert not plan.running


def test_a_finished_job_is_deleted_after_its_ttl() -> None:
    finished = {"type": "Failed", "status": "True", "reason": "NaN", "message": "m"}
    status = {"conditions": [finished], "completionTime": "1970-01-12T13:46:40Z"}
    job = make_job({"ttlSecondsAfterFinished": 60}, status)
    assert not compute_plan(job, Observed(), NOW + 59).delete_job
    assert compute_plan(job, Observed(), NOW + 60).delete_job


def test_containers_that_never_come_up_end_the_job_with_their_words() -> None:
    pod = make_pod("trainer", starting=True, ready=False, restarts=4, exit_code=1, message="x\nmodel.path: no model\n")
    verdict = compute_plan(make_job(), Observed((pod,)), NOW).verdict
    assert verdict is not None
    assert verdict.reason == "RestartsExhausted"
    assert "trainer pod job-trainer-0 ended with code 1: model.path: no model" in verdict.message


def test_out_of_memory_twice_ends_the_job() -> None:
    status = {"attempt": 1, "restarts": 1, "lastFailure": {"reason": "TrainerOutOfMemory"}}
    trainer = make_trainer(attempt=1, phase="failed", reason="TrainerOutOfMemory", message="rank 0, step 3")
    seen = Observed(tuple(make_pods(1)), None, trainer, "t")
    assert compute_plan(make_job(status=status), seen, NOW).verdict == Verdict(
        complete=False, reason="TrainerOutOfMemory", message="rank 0, step 3"
    )


def test_memory_of_an_empty_status_starts_now() -> None:
    memory = Memory.read({}, NOW)
    assert (memory.attempt, memory.start_time, memory.attempt_time, memory.verdict) == (0, NOW, NOW, None)


def test_a_pod_that_can_never_start_ends_the_job() -> None:
    pod = make_pod(
        "inference", phase="Failed", ready=False, starting=True, reason="FailedMount", message="volume v: no folder"
    )
    verdict = compute_plan(make_job(), Observed((pod,)), NOW).verdict
    expected = "inference pod job-inference-0 cannot start: volume v: no folder"
    assert verdict == Verdict(complete=False, reason="FailedMount", message=expected)


def test_wrong_input_by_exit_code_is_never_tried_again() -> None:
    text = "boots\nInvalidModel: model.path: /m/tokenizer.json does not exist\n"
    pod = make_pod("orchestrator", ready=False, exit_code=65, message=text)
    verdict = compute_plan(make_job(), Observed((pod,)), NOW).verdict
    assert verdict == Verdict(
        complete=False, reason="InvalidModel", message="model.path: /m/tokenizer.json does not exist"
    )
    silent = make_pod("inference", ready=False, exit_code=65)
    verdict = compute_plan(make_job(), Observed((silent,)), NOW).verdict
    expected = "inference pod job-inference-0 ended with code 65"
    assert verdict == Verdict(complete=False, reason="InvalidInput", message=expected)


def test_a_pod_that_ended_is_told_with_the_cause_and_not_with_the_last_line() -> None:
    text = "(EngineCore pid=6) ValueError: no such kernel\n(APIServer pid=5) RuntimeError: See root cause above."
    pods = [replace(pod, ready=False, reason="Error", message=text) for pod in make_pods() if pod.role == "inference"]
    plan = compute_plan(make_job(), Observed((make_pod("trainer"), *pods)), NOW)
    assert plan.waiting is not None
    assert plan.waiting.message == "pod job-inference-0: Error: ValueError: no such kernel"


def restarted(*, ready: tuple[bool, bool], restarts: int = 4, role: str = "inference") -> Observed:
    """A job one of whose pods was started again and again."""
    pods = make_pods()
    engines = [pod for pod in pods if pod.role == role]
    changed = {pod.uid: replace(pod, ready=is_ready) for pod, is_ready in zip(engines, ready, strict=False)}
    changed[engines[0].uid] = replace(changed[engines[0].uid], restarts=restarts, exit_code=1, message="boom")
    return make_observed(pods=tuple(changed.get(pod.uid, pod) for pod in pods))


def test_an_engine_that_the_job_can_spare_is_started_again_for_ever() -> None:
    plan = compute_plan(make_job(), restarted(ready=(False, True), restarts=900), NOW)
    assert (plan.verdict, plan.running) == (None, True)
    few = {"inference": {"replicas": 2, "minReplicas": 2}}
    verdict = compute_plan(make_job(few), restarted(ready=(False, True)), NOW).verdict
    assert verdict is not None
    assert verdict.message == (
        "inference pod job-inference-0 ended with code 1: boom; it was started again 4 times without a finished step in between,"
        " failurePolicy.maxRestarts is 3"
    )


def test_restarts_before_the_last_step_cost_nothing() -> None:
    seen = restarted(ready=(False, False), restarts=7, role="orchestrator")
    uid = next(pod.uid for pod in seen.pods if pod.role == "orchestrator")
    counted = {"orchestrator": {"restartsBefore": {uid: 4}}}
    assert compute_plan(make_job(status=counted), seen, NOW).verdict is None
    verdict = compute_plan(make_job(status={"orchestrator": {"restartsBefore": {uid: 3}}}), seen, NOW).verdict
    assert verdict is not None
    assert verdict.reason == "RestartsExhausted"


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(0, 10.0), (1, 20.0), (8, 2560.0), (9, 3600.0), (40, 3600.0), (999, 3600.0)]
)
def test_the_backoff_doubles_up_to_an_hour(restarts: int, seconds: float) -> None:
    job = make_job({"failurePolicy": {"maxRestarts": 1000}}, {"attempt": restarts, "restarts": restarts})
    lost = Observed((make_pod("trainer", attempt=restarts, restarts=1, exit_code=1),))
    plan = compute_plan(job, lost, NOW)
    assert (plan.requeue_after, plan.attempt_time) == (seconds, NOW + seconds)
