"""Events: each thing once, and an invalid spec."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from builders import make_body, make_job, make_observed, make_orchestrator, make_pods

from fp8rl_operator.errors import Fault
from fp8rl_operator.observed import Observed, Refusal, Trouble
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.spec.status import JobStatus
from fp8rl_operator.status import invalid_status, next_status
from fp8rl_operator.status_conditions import reason_of
from fp8rl_operator.status_events import Told as Event
from fp8rl_operator.status_events import events, invalid_event

NOW = 1_000_000.0
QUOTA = Trouble("trainer", "FailedCreate", "exceeded quota: q")
MEND = "raise the ResourceQuota of namespace team, or ask for less in spec.trainer"


class Told:
    """A job over several passes and what was told."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.job = make_job(spec)
        self.now = NOW

    def by(self, seen: Observed, **spec: Any) -> list[tuple[str, str, bool]]:
        """Events of the next pass, 20 s later."""
        self.now += 20
        self.spec |= spec
        job = make_job(self.spec, self.job.status)
        plan = compute_plan(job, seen, self.now)
        status = next_status(job, seen, plan, self.now)
        told = [] if status is None else events(job, plan, status)
        self.job = make_job(self.spec, job.status if status is None else status)
        return [(item.reason, item.message, item.warning) for item in told]


def test_the_life_of_a_job_is_told_once_each() -> None:
    job = Told()
    assert job.by(Observed()) == [("Started", "the job's pods are being made", False)]
    assert job.by(make_observed()) == [("Running", "step 1 of 4", False)]
    assert job.by(make_observed(orchestrator=make_orchestrator(step=2))) == []
    assert job.by(make_observed(), inference={"replicas": 3}) == [("Scaled", "engines: 2 -> 3", False)]
    assert job.by(make_observed(), suspend=True) == [
        ("Suspended", "spec.suspend is true: the pods go, the checkpoints stay", False)
    ]
    assert job.by(Observed()) == []
    assert job.by(Observed(), suspend=False) == [("Resumed", "attempt 1 goes on from the newest checkpoint", False)]
    again = {"pods": tuple(make_pods(1)), "orchestrator": make_orchestrator(attempt=1, step=2)}
    assert job.by(make_observed(**again)) == [("Running", "step 2 of 4; 2 of 3 engines are ready", False)]
    changed = "spec.rollout.steps is 9, was 4: a new attempt of the whole job, which costs no restart"
    assert job.by(make_observed(**again), rollout={"steps": 9}) == [("SpecChanged", changed, False)]
    done = make_orchestrator(attempt=2, step=9, phase="complete")
    assert job.by(make_observed(pods=tuple(make_pods(2)), orchestrator=done)) == [
        ("Complete", "StepsDone: 9 steps done", False)
    ]
    assert job.by(Observed()) == []


def test_what_comes_in_the_way_is_told_once_and_again_when_it_comes_back() -> None:
    job = Told()
    words = f"trainer pods: FailedCreate: exceeded quota: q; {MEND}"
    assert job.by(Observed(troubles=(QUOTA,)))[1:] == [("QuotaExceeded", words, True)]
    assert job.by(Observed(troubles=(QUOTA,))) == []
    assert job.by(make_observed()) == [("Running", "step 1 of 4", False)]
    pods = tuple(replace(pod, ready=False) if pod.role == "orchestrator" else pod for pod in make_pods())
    assert job.by(make_observed(pods=pods)) == []


def test_an_excluded_node_is_told_once() -> None:
    job = Told()
    fleet = tuple(pod for pod in make_pods() if pod.role != "trainer")
    told = []
    for number in range(4):
        refused = (Refusal(f"u{number}", "trainer", "n1", "TopologyAffinityError", "no fit"),)
        waiting = make_orchestrator(phase="booting")
        told += job.by(make_observed(pods=fleet, trainer=None, orchestrator=waiting, refusals=refused))
        job.now += 300
    assert [item[0] for item in told] == ["Started", "NodeRefused", "NodeExcluded", "NodeRefused"]
    assert told[2][1:] == (
        (
            "node n1 refused pods 3 times and is excluded for this job: TopologyAffinityError: no fit; once it is repaired, suspend and"
            " resume the job to use it again"
        ),
        True,
    )


def test_an_end_by_a_loss_is_told_with_the_loss() -> None:
    job = Told(failurePolicy={"maxRestarts": 0})
    job.by(make_observed())
    told = job.by(make_observed(pods=()))
    assert [(reason, warning) for reason, _, warning in told] == [("TrainerLost", True), ("Failed", True)]


FAULTS = [
    Fault("spec.rollout.batchSize", 9, "is no multiple of groupSize 4", "set it to 8"),
    Fault("spec.gate.required", None, "is only a warning", "", level="warning"),
]
TEXT = "spec.rollout.batchSize: value 9: is no multiple of groupSize 4; set it to 8"


def test_an_invalid_spec_is_said_once_and_stands_still() -> None:
    body = make_body(generation=3)
    status = invalid_status(body, FAULTS, NOW)
    assert status == {
        "observedGeneration": 3,
        "conditions": [
            {
                "type": kind,
                "status": value,
                "observedGeneration": 3,
                "lastTransitionTime": "1970-01-12T13:46:40Z",
                "reason": "InvalidSpec",
                "message": TEXT,
            }
            for kind, value in (("Ready", "False"), ("Reconciling", "False"), ("Stalled", "True"))
        ],
    }
    JobStatus.model_validate_json(json.dumps(status))
    assert invalid_status(body | {"status": status}, FAULTS, NOW + 60) is None
    assert invalid_event({}, status) == Event("InvalidSpec", TEXT, warning=True)
    assert invalid_event(status, status) is None


def test_a_running_job_with_an_invalid_edit_keeps_what_it_knows_and_goes_on_when_it_is_put_right() -> None:
    job = make_job()
    running = next_status(job, make_observed(), compute_plan(job, make_observed(), NOW), NOW)
    assert running is not None
    status = invalid_status(make_body(generation=2) | {"status": running}, FAULTS, NOW + 5)
    assert status is not None
    assert {key: status[key] for key in ("attempt", "applied", "trainer")} == {
        key: running[key] for key in ("attempt", "applied", "trainer")
    }
    assert [item["type"] for item in status["conditions"]] == [item["type"] for item in running["conditions"]]
    right = make_job(status=status, generation=3)
    after = next_status(right, make_observed(), compute_plan(right, make_observed(), NOW + 9), NOW + 9)
    assert after is not None
    assert (after["conditions"][0]["status"], after["conditions"][0]["reason"]) == ("True", "Running")
    assert (after["attempt"], after["observedGeneration"]) == (0, 3)


def test_an_ended_job_stays_as_it_ended_whatever_is_edited() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "NaN", "message": "m"}
    assert invalid_status(make_body() | {"status": {"conditions": [failed]}}, FAULTS, NOW) is None


def test_many_faults_are_cut_where_a_condition_ends() -> None:
    status = invalid_status(make_body(), FAULTS * 100, NOW)
    assert status is not None
    assert len(status["conditions"][0]["message"]) == 2048


def test_a_reason_is_what_the_api_takes() -> None:
    assert [reason_of(text) for text in ("NaN", "No space: left", "9lives_", "")] == [
        "NaN",
        "Nospaceleft",
        "lives",
        "Unknown",
    ]
