"""The operator dies between any two of its writes, or the API server is away: nothing stops and nothing is done twice."""

from __future__ import annotations

import time

import pytest
from failure_cases import policy
from operator_world import OperatorProcess, pods, scale
from test_failures import skipped_or_repeated
from testcluster import lifecycle

MOST_WRITES = 60
AWAY_SECONDS = 60


@pytest.fixture
def alone(operated):
    """No operator in the cluster; afterwards it is there again."""
    scale(operated, 0)
    yield operated
    scale(operated, 2)


def test_an_operator_killed_after_each_of_its_writes_brings_the_job_up_as_if_it_had_never_died(alone, toy, tmp_path):
    job = toy(policy()).start()
    deaths = 0
    while job.condition("Ready")[:2] != ("True", "Running"):
        assert deaths < MOST_WRITES, job.story()
        with OperatorProcess(alone, tmp_path / "operator.log", dies_after=1, namespaces=job.namespace) as operator:
            job.until(
                lambda operator=operator: (
                    operator.process.poll() is not None or job.condition("Ready")[:2] == ("True", "Running")
                ),
                "a write, or the end",
                90,
            )
            deaths += operator.process.poll() is not None
    with OperatorProcess(alone, tmp_path / "operator.log", namespaces=job.namespace):
        job.until_running()
        time.sleep(5)
        assert (job.status["attempt"], job.status["restarts"], job.restarts()) == (0, 0, 0)
        assert len(job.pods()) == 4
        steps = len(job.steps())
        job.until(lambda: len(job.steps()) > steps + 5, "steps")
    print(f"{deaths} deaths, one after each write; attempt 0, no pod restarted")


def test_a_trainer_lost_while_no_operator_runs_costs_one_attempt_once_one_does(alone, toy, tmp_path):
    job = toy(policy())
    with OperatorProcess(alone, tmp_path / "operator.log", namespaces=job.namespace):
        job.start().until_running()
    engines, steps = job.uids("inference", "orchestrator"), len(job.steps())
    job.until(lambda: len(job.steps()) > steps + 5, "nothing stops without an operator")
    job.kill("trainer")
    time.sleep(3)
    with OperatorProcess(alone, tmp_path / "operator.log", namespaces=job.namespace):
        job.until(lambda: job.status["restarts"] == 1, "the attempt that it costs")
        job.until_running()
        assert (job.status["attempt"], job.status["lastFailure"]["reason"]) == (1, "TrainerLost")
        assert job.uids("inference", "orchestrator") == engines
    assert skipped_or_repeated(job.steps()) == []


def test_the_api_server_is_away_for_a_minute_and_the_job_goes_on(operated, toy):
    job = toy(policy()).start().until_running()
    before, place = job.uids(), operated.volume(job.pod("orchestrator"), "state") / "steps.jsonl"
    operators = {pod["metadata"]["uid"] for pod in pods(operated)}
    lifecycle.stop(operated.cluster, "kube-apiserver")
    try:
        first = len(place.read_text().splitlines())
        time.sleep(AWAY_SECONDS)
        meanwhile = len(place.read_text().splitlines()) - first
    finally:
        lifecycle.start(operated.cluster, "kube-apiserver")
    assert meanwhile > AWAY_SECONDS / 0.2 / 4
    job.until_running(120)
    job.delete_pod("inference")
    job.until(lambda: job.uids("inference") != before & job.uids("inference") and job.ready() == 4, "a new engine", 120)
    job.until_running()
    assert (job.status["attempt"], job.status["restarts"]) == (0, 0)
    assert skipped_or_repeated(job.steps()) == []
    assert {pod["metadata"]["uid"] for pod in pods(operated)} == operators
    print(f"{meanwhile} steps while the API server was away for {AWAY_SECONDS} s")
