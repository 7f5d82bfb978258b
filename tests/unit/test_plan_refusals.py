"""Nodes that refuse pods: back-off, exclusion, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from builders import make_job, make_observed, make_orchestrator, make_pod, make_pods

from fp8rl_operator.observed import Observed, Refusal, Trouble
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.status import JobStatus
from fp8rl_operator.status import next_status

NOW = 1_000_000.0
WORDS = "Resources cannot be allocated with Topology locality"
TOPOLOGY = "TopologyAffinityError"


def refusal(uid: str, role: str = "trainer", node: str = "n1", reason: str = TOPOLOGY) -> Refusal:
    """A refused pod."""
    return Refusal(uid, role, node, reason, WORDS)


class Job:
    """A job over several passes; the status is kept, as the API would."""

    def __init__(self, spec: dict[str, Any] | None = None) -> None:
        self.job: FP8RLJob = make_job(spec)

    def look(self, seen: Observed, now: float, spec: dict[str, Any] | None = None) -> Plan:
        """One pass."""
        if spec is not None:
            self.job = make_job(spec, self.job.status)
        plan = compute_plan(self.job, seen, now)
        status = next_status(self.job, seen, plan, now)
        if status is not None:
            JobStatus.model_validate_json(json.dumps(status))
            self.job = self.job.model_copy(update={"status": status})
        return plan

    @property
    def ready(self) -> tuple[str, str, str]:
        """Status, reason and message of Ready."""
        item = next(item for item in self.job.status["conditions"] if item["type"] == "Ready")
        return item["status"], item["reason"], item["message"]

    def condition(self, kind: str) -> str:
        """Status of a condition."""
        return next(str(item["status"]) for item in self.job.status["conditions"] if item["type"] == kind)


FLEET = tuple(pod for pod in make_pods() if pod.role != "trainer")


def seen_without_trainer(*refusals: Refusal) -> Observed:
    """Engines and orchestrator run."""
    return make_observed(pods=FLEET, trainer=None, orchestrator=make_orchestrator(phase="booting"), refusals=refusals)


def test_a_refused_trainer_gets_no_pod_for_ten_seconds_and_the_engines_stay() -> None:
    job = Job()
    plan = job.look(seen_without_trainer(refusal("a")), NOW)
    assert [plan.replicas(role, 2) for role in ("trainer", "inference", "orchestrator")] == [0, 2, 2]
    assert (plan.restarts, plan.attempt, plan.loss, plan.excluded_nodes) == (0, 0, None, ())
    assert job.job.status["refusals"] == {
        "rounds": 1,
        "until": "1970-01-12T13:46:50Z",
        "roles": ["trainer"],
        "uids": ["a"],
    }
    assert job.job.status["nodes"] == [
        {
            "name": "n1",
            "refusals": 1,
            "excluded": False,
            "reason": TOPOLOGY,
            "message": WORDS,
            "lastTime": "1970-01-12T13:46:40Z",
        }
    ]
    assert job.ready == (
        "False",
        "NodeRefused",
        (
            f"node n1 refused pods of trainer: TopologyAffinityError: {WORDS}; refusal 1, the node is excluded after 3; tried again at"
            " 1970-01-12T13:46:50Z; ask for fewer GPUs and CPUs a replica so that they fit one NUMA node, set topology.numa:"
            " preferred, or drain the node"
        ),
    )
    assert (job.condition("Stalled"), job.condition("Reconciling")) == ("False", "True")


def test_refusals_of_one_backoff_count_once_and_a_pod_is_counted_once() -> None:
    job = Job()
    job.look(seen_without_trainer(refusal("a")), NOW)
    plan = job.look(seen_without_trainer(refusal("a"), refusal("b"), refusal("c")), NOW + 1)
    assert (plan.refused, plan.refusals.nodes[0].refusals, plan.refusals.until) == (True, 1, NOW + 10)
    again = job.look(seen_without_trainer(refusal("a"), refusal("b"), refusal("c")), NOW + 11)
    assert (again.refused, again.replicas("trainer", 1), again.refusals.rounds) == (False, 1, 1)


def test_the_backoff_doubles_and_the_third_refusal_excludes_the_node_for_all_roles() -> None:
    job = Job()
    assert job.look(seen_without_trainer(refusal("a")), NOW).refusals.until == NOW + 10
    assert job.look(seen_without_trainer(refusal("b")), NOW + 11).refusals.until == NOW + 31
    plan = job.look(seen_without_trainer(refusal("c")), NOW + 32)
    assert plan.replicas("trainer", 1) == 1  # the template names the node: no need to wait
    assert [plan.excluded_from(role) for role in ("trainer", "orchestrator", "inference")] == [("n1",), ("n1",), ()]
    nowhere = Trouble(
        "trainer", "FailedScheduling", "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity"
    )
    job.look(replace(seen_without_trainer(), troubles=(nowhere,)), NOW + 33)
    status, reason, message = job.ready
    assert (status, reason, job.condition("Stalled"), job.condition("Reconciling")) == (
        "False",
        "Unschedulable",
        "True",
        "False",
    )
    assert message.endswith(
        f"; kept away from n1 (TopologyAffinityError: {WORDS}); once repaired, suspend and resume the job to use them again"
    )


def test_the_backoff_ends_at_five_minutes() -> None:
    job, now, waits = Job(), NOW, []
    for number in range(8):
        until = job.look(seen_without_trainer(refusal(f"u{number}", node=f"n{number}")), now).refusals.until
        waits.append(until - now)
        now = until + 1
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]


def test_a_success_ends_the_backoff_and_keeps_the_exclusion() -> None:
    job = Job()
    for number in range(3):
        job.look(seen_without_trainer(refusal(f"u{number}")), NOW + 100 * number)
    job.look(make_observed(), NOW + 400)
    assert job.job.status["refusals"] == {"uids": ["u0", "u1", "u2"]}
    assert [node["excluded"] for node in job.job.status["nodes"]] == [True]
    assert job.ready == ("True", "Running", "step 1 of 4")
    later = make_observed(refusals=(refusal("later", "inference", "n2"),))
    assert job.look(later, NOW + 500).refusals.until == NOW + 510


def test_engines_that_run_stay_and_their_template_learns_of_a_node_when_none_is_up() -> None:
    job = Job({"inference": {"replicas": 3}})
    for number in range(3):
        plan = job.look(make_observed(refusals=(refusal(f"u{number}", "inference"),)), NOW + 100 * number)
        assert plan.replicas("inference", 3) == 2
    assert (plan.excluded_from("inference"), plan.excluded_from("trainer")) == ((), ("n1",))
    assert plan.refusals.until == NOW + 240
    assert job.ready[:2] == ("True", "Running")
    assert "step 1 of 4; 2 of 3 engines are ready; node n1 refused pods of inference: " in job.ready[2]
    without = tuple(pod for pod in make_pods() if pod.role != "inference")
    assert job.look(make_observed(pods=without), NOW + 500).excluded_from("inference") == ("n1",)
    assert job.look(make_observed(), NOW + 501).excluded_from("inference") == ("n1",)


def test_engines_that_came_up_since_the_last_backoff_stay_too() -> None:
    job = Job({"inference": {"replicas": 4}})
    assert job.look(make_observed(refusals=(refusal("a", "inference"),)), NOW).refusals.kept_engines == 2
    three = make_observed(pods=tuple(make_pods(engines=3)), refusals=(refusal("b", "inference"),))
    assert job.look(three, NOW + 11).replicas("inference", 4) == 3


def test_a_trainer_taken_away_by_a_backoff_is_no_loss() -> None:
    job = Job({"trainer": {"backend": "megatron", "replicas": 2, "gpusPerReplica": 1}})
    first = make_pod("trainer", 0, uid="t0")
    waiting = make_orchestrator(phase="booting")
    job.look(make_observed(pods=(first, *FLEET), trainer=None, orchestrator=waiting), NOW)
    assert job.job.status["trainer"]["uids"] == ["t0"]
    seen = make_observed(pods=(first, *FLEET), trainer=None, orchestrator=waiting, refusals=(refusal("a"),))
    job.look(seen, NOW + 1)
    assert job.job.status["trainer"]["uids"] == []
    plan = job.look(seen_without_trainer(), NOW + 2)
    assert (plan.loss, plan.attempt, plan.restarts) == (None, 0, 0)


def test_a_refused_pod_that_is_still_there_is_no_loss_and_an_engine_like_it_is_removed() -> None:
    failed = {"phase": "Failed", "ready": False, "reason": TOPOLOGY, "message": WORDS, "ip": "", "starting": True}
    pods = (*FLEET, make_pod("trainer", uid="a", **failed), make_pod("inference", 7, uid="b", **failed))
    plan = Job({"inference": {"replicas": 3}}).look(
        make_observed(pods=pods, trainer=None, refusals=(refusal("a"), refusal("b", "inference"))), NOW
    )
    assert (plan.loss, plan.verdict, plan.end_pods) == (None, None, ("b",))
    assert [plan.replicas(role, 3) for role in ("trainer", "inference")] == [0, 2]


def test_suspend_and_resume_give_a_node_another_chance() -> None:
    job = Job()
    for number in range(3):
        job.look(seen_without_trainer(refusal(f"u{number}")), NOW + 100 * number)
    job.look(Observed(), NOW + 400, {"suspend": True})
    assert [node["name"] for node in job.job.status["nodes"]] == ["n1"]
    plan = job.look(Observed(), NOW + 500, {"suspend": False})
    assert (plan.excluded_nodes, plan.refusals.uids) == ((), ("u0", "u1", "u2"))
    assert "nodes" not in job.job.status


def test_a_broken_device_names_the_device_plugin() -> None:
    job = Job()
    job.look(seen_without_trainer(refusal("a", reason="UnexpectedAdmissionError")), NOW)
    assert job.ready[2].endswith("a device of the node may be broken: look at its device plugin, or drain the node")


def test_uids_and_nodes_are_kept_as_many_as_the_api_takes() -> None:
    job = Job()
    many = tuple(refusal(f"u{number:04}", node=f"n{number:04}") for number in range(300))
    plan = job.look(seen_without_trainer(*many), NOW)
    assert (len(plan.refusals.uids), plan.refusals.uids[-1], len(plan.refusals.nodes)) == (256, "u0299", 64)
