"""Pods of a running job are killed, deleted, starved or refused: what the job does, and what its conditions say."""

from __future__ import annotations

import itertools

import pytest
from failure_cases import CASES, essence, policy, wanted

MANY_STEPS = 5


def skipped_or_repeated(lines):
    """Steps of steps.jsonl that are no successor of the one before."""
    steps = [line["step"] for line in lines]
    return [(old, new) for old, new in itertools.pairwise(steps) if new != old + 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_failure_case(toy, case):
    job = toy(case.spec).start().until_running()
    before = {role: job.uids(role) for role in ("trainer", "inference", "orchestrator")}
    match case.strike:
        case "kill":
            job.kill(case.role)
        case "delete":
            job.delete_pod(case.role)
        case "says":
            job.tell(f"{case.role}.says", case.word)
        case "edit":
            job.patch(case.change)
        case "none":
            job.until(lambda: len(job.steps()) > 2 * MANY_STEPS, "steps")
    job.until(lambda: essence(job.status, case.expected) == wanted(case.expected), f"{case.expected}")
    if case.expected.conditions.get("Ready") == ("True", "Running"):
        job.until_running()
        job.until(
            lambda: {role for role, uids in before.items() if job.uids(role) - uids} == case.expected.new_pods,
            f"new pods of {set(case.expected.new_pods)} alone",
        )
        if not case.expected.new_pods & {"orchestrator"}:
            steps = len(job.steps())
            job.until(lambda: len(job.steps()) > steps + MANY_STEPS, "the job goes on")
            assert skipped_or_repeated(job.steps()) == []
    print(f"{case.name}: {job.condition('Ready')}, last failure {job.status.get('lastFailure', {}).get('message')}")


def test_an_image_that_does_not_exist_is_told_in_the_registrys_words_and_a_right_one_goes_on(toy):
    job = toy(policy()).of_main("inference", image="registry.invalid/engine:nowhere").start()
    message = job.until_condition("Ready", "False", "ImagePull")
    assert "registry.invalid/engine:nowhere" in message
    assert "spec.inference.template" in message
    assert job.condition("Stalled")[:2] == ("True", "ImagePull")
    assert job.status["restarts"] == 0
    print(message)
    job.patch({"inference": {"template": toy(name="right").body["spec"]["inference"]["template"]}})
    job.until_running()
    assert job.status["restarts"] == 0


@pytest.mark.slow
def test_a_quota_that_is_too_small_is_quoted_and_a_larger_one_goes_on(toy, operated, namespace):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "2"}},
    }
    operated.apply(quota, namespace=namespace)
    job = toy(policy()).start()
    message = job.until_condition("Ready", "False", "QuotaExceeded")
    assert "exceeded quota: small" in message
    assert f"raise the ResourceQuota of namespace {namespace}" in message
    print(message)
    quota["spec"]["hard"]["pods"] = "4"
    operated.apply(quota, namespace=namespace)
    # which pods got in was chance, and a ReplicaSet that was refused a dozen times asks again after minutes only
    job.until_condition("Ready", "True", "Running", 400)
    assert job.status["restarts"] == 0


def test_a_claim_that_never_binds_is_told_and_no_pod_is_restarted(toy, operated, namespace):
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "by-hand",
        },
    }
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "by-hand"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    operated.apply(storage, claim, namespace=namespace)
    job = toy(policy() | {"trainer": {"checkpoint": {"claimName": "checkpoints"}}}).start()
    message = job.until_condition("Ready", "False", "VolumeNotBound")
    assert "checkpoints" in message or "unbound immediate PersistentVolumeClaims" in message
    assert "make a PersistentVolume that fits" in message
    assert job.status["restarts"] == 0
    print(message)


def test_a_claim_that_is_missing_starts_nothing_and_names_the_claim(toy):
    job = toy(policy() | {"trainer": {"checkpoint": {"claimName": "nowhere"}}}).start()
    message = job.until(lambda: job.condition("Stalled")[0] == "True" and job.condition("Stalled")[2], "Stalled")
    assert "nowhere" in message
    assert job.pods() == []
    print(job.condition("Stalled"))


def test_a_trainer_killed_for_its_memory_costs_an_attempt_and_the_message_says_so(toy):
    job = toy(policy()).of_main("trainer", resources={"limits": {"memory": "96Mi"}}).start().until_running()
    job.tell("trainer.hog")
    job.until(lambda: job.status["restarts"] == 1, "the attempt that it costs", 120)
    job.untell("trainer.hog")
    failure = job.status["lastFailure"]
    assert "OOMKilled" in failure["message"] or "memory" in failure["message"]
    job.until_running()
    print(failure)


def test_a_container_that_crashes_at_its_start_ends_the_job_when_the_budget_is_spent(toy):
    job = toy(policy(maxRestarts=1))
    job.tell("trainer.crash")
    job.start()
    message = job.until_condition("Failed", "True", "RestartsExhausted", 120)
    assert "the toy was told to crash" in message
    assert "failurePolicy.maxRestarts is 1" in message
    print(message)
