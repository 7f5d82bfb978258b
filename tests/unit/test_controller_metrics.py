"""What the operator's metrics say of jobs."""

from __future__ import annotations

from builders import UID, make_body

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.controller.facts import Facts
from fp8rl_operator.controller.metrics import Metrics, reason_of
from fp8rl_operator.kube.api import ApiError

STATUS = {
    "step": 3,
    "version": 7,
    "attempt": 2,
    "restarts": 1,
    "weightSyncGroup": {"epoch": 5},
    "precision": {"recipe": "bf16", "wire": "channel"},
    "inference": {"desired": 2, "ready": 1},
    "conditions": [{"type": "Ready", "status": "False"}, {"type": "Stalled", "status": "True"}],
}
LIMITS = {"limits": {"mismatchKL": {"warn": "0.015", "stop": "0.5"}}, "failurePolicy": {"maxRestarts": 3}}


def lines(metrics: Metrics, start: str) -> list[str]:
    """The samples whose name starts so."""
    return [line for line in metrics.text().decode().splitlines() if line.startswith(start)]


def test_a_job_is_told_by_its_newest_object():
    metrics = Metrics({UID: Facts.of({**make_body(LIMITS), "status": STATUS})})
    where = 'name="job",namespace="team"'
    assert lines(metrics, "fp8rl_job_") == [
        f'fp8rl_job_info{{{where},recipe="bf16",uid="{UID}",wire="channel"}} 1.0',
        f'fp8rl_job_condition{{{where},status="False",type="Ready"}} 1.0',
        f'fp8rl_job_condition{{{where},status="True",type="Stalled"}} 1.0',
        f'fp8rl_job_pods{{{where},role="inference",state="desired"}} 2.0',
        f'fp8rl_job_pods{{{where},role="inference",state="ready"}} 1.0',
        f'fp8rl_job_limit{{limit="mismatch_kl_warn",{where}}} 0.015',
        f'fp8rl_job_limit{{limit="mismatch_kl_stop",{where}}} 0.5',
        f'fp8rl_job_limit{{limit="max_restarts",{where}}} 3.0',
        f"fp8rl_job_step{{{where}}} 3.0",
        f"fp8rl_job_steps{{{where}}} 4.0",
        f"fp8rl_job_policy_version{{{where}}} 7.0",
        f"fp8rl_job_weight_sync_epoch{{{where}}} 5.0",
        f"fp8rl_job_attempt{{{where}}} 2.0",
        f"fp8rl_job_restarts_total{{{where}}} 1.0",
    ]


def test_the_series_of_a_job_vanish_with_it():
    metrics = Metrics({UID: Facts.of(make_body())})
    assert lines(metrics, "fp8rl_job_info")
    del metrics.facts[UID]
    assert lines(metrics, "fp8rl_job_") == []


def test_a_job_of_nonsense_is_told_all_the_same():
    facts = Facts.of({"metadata": {"name": "x"}, "spec": None, "status": {"step": "a", "weightSyncGroup": []}})
    assert (facts.namespace, facts.step, facts.epoch, facts.conditions) == ("default", 0, 0, ())
    assert set(facts.limits) == {None}


def test_requests_are_counted_by_verb_kind_and_code():
    metrics = Metrics()
    metrics.count_request("apply", "ConfigMap", 201)
    metrics.count_request("apply", "ConfigMap", 201)
    (line,) = lines(metrics, "fp8rl_operator_api_requests_total")
    assert line == 'fp8rl_operator_api_requests_total{code="201",kind="ConfigMap",verb="apply"} 2.0'


def test_gauges_of_the_process_are_read_at_each_scrape():
    metrics, waiting = Metrics(), [1, 2]
    metrics.measure(lambda: len(waiting), lambda: len(waiting) == 2)
    assert lines(metrics, "fp8rl_operator_queue_depth") == ["fp8rl_operator_queue_depth 2.0"]
    assert lines(metrics, "fp8rl_operator_leader") == ["fp8rl_operator_leader 1.0"]
    waiting.clear()
    assert lines(metrics, "fp8rl_operator_leader") == ["fp8rl_operator_leader 0.0"]


def test_an_error_is_named_by_the_api_servers_reason_its_status_or_its_kind():
    assert reason_of(ApiError("apply", "/x", 403, "Forbidden", "no")) == "Forbidden"
    assert reason_of(ApiError("apply", "/x", 403, "", "no")) == "403"
    assert reason_of(ClusterError("no answer")) == "ClusterError"
