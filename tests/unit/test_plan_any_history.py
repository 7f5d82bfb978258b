"""Whatever happens to a job, in any order: counters only grow, ends stay, the API takes every status, and rest is rest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from builders import make_job, make_orchestrator, make_pods, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_operator.cluster import Outcome
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.observed import Observed, PodState, Refusal, Trouble
from fp8rl_operator.plan import Plan, compute_plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.status import JobStatus
from fp8rl_operator.status import next_status
from fp8rl_operator.status_events import events

NOW = 1_000_000.0
POLICY = {"failurePolicy": {"backoffSeconds": 10, "maxRestarts": 2}, "inference": {"replicas": 3}}
EDITS: tuple[dict[str, Any], ...] = (
    {},
    {"suspend": True},
    {"suspend": False},
    {"inference": {"replicas": 1}},
    {"inference": {"replicas": 4}},
    {"trainer": {"compile": True}},
    {"rollout": {"steps": 9}},
    {"failurePolicy": {"replicaLoss": "restart"}},
    {"activeDeadlineSeconds": 400},
)
FATES: tuple[dict[str, Any], ...] = (
    {},
    {"ready": False, "starting": True},
    {"restarts": 1, "exit_code": 137, "reason": "OOMKilled", "ready": False},
    {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "ready": False},
    {"phase": "Pending", "reason": "Unschedulable", "message": "0/1 nodes", "ready": False, "ip": "", "starting": True},
    {"unreachable": True, "ready": False, "node": "n1"},
    {"terminating": True, "gone_by": NOW},
    {"uid": "again"},
)
PHASES = ("booting", "running", "complete", "failed")

events_of_the_world = st.fixed_dictionaries(
    {
        "edit": st.sampled_from(EDITS),
        "pods": st.booleans(),
        "fates": st.lists(st.tuples(st.integers(0, 5), st.sampled_from(FATES)), max_size=2),
        "phase": st.sampled_from(PHASES) | st.none(),
        "reason": st.sampled_from(("TrainerLost", "NaN", "TrainerOutOfMemory", "")),
        "refused": st.booleans(),
        "blocked": st.booleans(),
        "clash": st.booleans(),
        "seconds": st.sampled_from((0.5, 5.0, 60.0, 1000.0, -30.0)),
    }
)


def observed(happens: dict[str, Any], job: FP8RLJob, number: int) -> Observed:
    """What a pass sees."""
    attempt, fleet = job.status.get("attempt", 0), job.status.get("fleetAttempt", 0)
    pods: list[PodState] = make_pods(attempt, 3, fleet) if happens["pods"] else []
    for index, fate in happens["fates"]:
        if index < len(pods):
            pods[index] = replace(pods[index], **fate)
    phase, reason = happens["phase"], happens["reason"]
    orchestrator = phase and make_orchestrator(attempt=attempt, phase=phase, reason=reason, step=number)
    refused = (Refusal(f"r{number}", "trainer", "n1", "TopologyAffinityError", "no fit"),) if happens["refused"] else ()
    blocked = Trouble("trainer", "VolumeNotBound", "no claim") if happens["blocked"] else None
    return Observed(
        tuple(pods), orchestrator or None, phase and make_trainer(attempt=attempt), "t", refused, (), blocked
    )


def check(old: dict[str, Any], new: dict[str, Any], plan: Plan) -> None:
    """What holds between two statuses."""
    JobStatus.model_validate_json(json.dumps(new))
    assert old.get("attempt", 0) <= new["attempt"] <= old.get("attempt", 0) + 1
    assert new["fleetAttempt"] <= new["attempt"]
    assert new["restarts"] - old.get("restarts", 0) == int(plan.loss is not None and plan.verdict is None)
    assert new["restarts"] <= 2
    assert new.get("suspendedSeconds", 0) >= old.get("suspendedSeconds", 0)
    held = {item["type"]: item["status"] for item in new["conditions"]}
    assert (held["Reconciling"], held["Stalled"]) != ("True", "True")
    assert (held["Complete"], held["Failed"]) != ("True", "True")
    for kind in ("Complete", "Failed"):
        if any(item["type"] == kind and item["status"] == "True" for item in old.get("conditions", ())):
            assert held[kind] == "True"


@given(st.lists(events_of_the_world, min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_any_history(history: list[dict[str, Any]]) -> None:
    spec, status, now = dict(POLICY), {}, NOW
    for number, happens in enumerate(history):
        spec, now = merge(spec, happens["edit"]), now + happens["seconds"]
        job = make_job(spec, status)
        seen = observed(happens, job, number)
        outcome = Outcome(clashes=("Service/job-trainer",)) if happens["clash"] else Outcome()
        for _ in range(4):
            plan = compute_plan(job, seen, now)
            written = next_status(job, seen, plan, now, outcome)
            if written is not None:
                check(job.status, written, plan)
                events(job, plan, written)
                job = make_job(spec, written)
        plan = compute_plan(job, seen, now)
        assert next_status(job, seen, plan, now, outcome) is None, "the same again is no write"
        assert all(0 <= plan.replicas(role, 3) <= 3 for role in ("trainer", "inference", "orchestrator"))
        status = job.status
