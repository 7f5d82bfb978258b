"""What the cluster says when it gives no pod: the job's reason, Kubernetes' words, the way out, what kstatus reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import make_job, make_observed, make_pod, make_pods

from fp8rl_operator.cluster import Outcome
from fp8rl_operator.observed import Observed, Trouble
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.plan_troubles import of_outcome
from fp8rl_operator.status import next_status

NOW = 1_000_000.0
QUOTA = 'create Pod job-trainer-0 in StatefulSet job-trainer failed error: pods "job-trainer-0" is forbidden: exceeded quota: q'
TASTE = 'admission webhook "w" denied the request: no'


def written(seen: Observed, spec: dict[str, Any] | None = None, outcome: Outcome | None = None) -> dict[str, Any]:
    """The status after one pass."""
    job = make_job(spec)
    status = next_status(job, seen, compute_plan(job, seen, NOW), NOW, outcome)
    assert status is not None
    return status


def told(status: dict[str, Any], kind: str = "Ready") -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    return next(
        (item["status"], item["reason"], item["message"]) for item in status["conditions"] if item["type"] == kind
    )


@pytest.mark.parametrize(
    ("trouble", "reason", "remedy", "person"),
    [
        (
            Trouble("trainer", "FailedCreate", QUOTA),
            "QuotaExceeded",
            "raise the ResourceQuota of namespace team, or ask for less in spec.trainer",
            True,
        ),
        (
            Trouble("trainer", "FailedCreate", TASTE),
            "AdmissionRefused",
            "change spec.trainer.template, or what the namespace allows",
            True,
        ),
        (
            Trouble("trainer", "FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "Unschedulable",
            "add nodes, free some, or ask for less in spec.trainer, spec.topology or the role's template",
            False,
        ),
        (
            Trouble("trainer", "FailedScheduling", "0/1 nodes: pod has unbound immediate PersistentVolumeClaims."),
            "VolumeNotBound",
            "make a PersistentVolume that fits, or name another claim or storage class",
            True,
        ),
        (
            Trouble("", "ProvisioningFailed", 'storageclass.storage.k8s.io "gold" not found'),
            "VolumeNotBound",
            "make a PersistentVolume that fits, or name another claim or storage class",
            True,
        ),
        (
            Trouble("trainer", "FailedMount", 'MountVolume.SetUp failed for volume "v"'),
            "VolumeNotMounted",
            "see that what the volume names exists and that no other node holds it",
            False,
        ),
    ],
)
def test_trouble_is_quoted_with_its_way_out(trouble: Trouble, reason: str, remedy: str, *, person: bool) -> None:
    status = written(Observed(troubles=(trouble,)))
    assert told(status) == ("False", reason, f"trainer pods: {trouble.reason}: {trouble.message}; {remedy}")
    assert told(status, "Stalled")[:2] == (str(person), reason)
    assert told(status, "Reconciling")[:2] == (str(not person), reason)


@pytest.mark.parametrize(
    ("reason", "message", "expected", "person"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "no:1"', "ImagePull", True),
        ("InvalidImageName", "couldn't parse image name", "ImagePull", True),
        ("CreateContainerConfigError", 'secret "hub" not found', "ContainerConfig", True),
        ("Unschedulable", "0/1 nodes are available", "Unschedulable", False),
        ("CrashLoopBackOff", "ValueError: boom", "WaitingForPods", False),
    ],
)
def test_a_pod_that_cannot_start_is_quoted(reason: str, message: str, expected: str, *, person: bool) -> None:
    pod = make_pod("inference", phase="Pending", ready=False, starting=True, ip="", reason=reason, message=message)
    pods = tuple(item for item in make_pods() if item.role != "inference")
    status = written(make_observed(pods=(*pods, pod)))
    state, why, words = told(status)
    assert (state, why) == ("False", expected)
    assert words.startswith(f"pod job-inference-0: {reason}: {message}")
    assert told(status, "Stalled")[0] == str(person)


def test_a_claim_that_is_missing_starts_nothing_and_stands_still_for_a_person() -> None:
    blocked = Trouble("trainer", "VolumeNotBound", "claim ckpt does not exist in namespace team: make it")
    seen = Observed(blocked=blocked)
    plan = compute_plan(make_job(), seen, NOW)
    assert [plan.replicas(role, 1) for role in ("trainer", "inference", "orchestrator")] == [0, 0, 0]
    status = written(seen)
    assert told(status) == ("False", "VolumeNotBound", "claim ckpt does not exist in namespace team: make it")
    assert (told(status, "Stalled")[0], told(status, "Reconciling")[0]) == ("True", "False")
    running = compute_plan(make_job(), make_observed(blocked=blocked), NOW)
    assert running.running
    assert compute_plan(make_job(status=status), Observed(), NOW + 60).running


def test_the_deadline_before_running_quotes_what_was_waited_for() -> None:
    job = make_job({"preRunningDeadlineSeconds": 50}, {"startTime": "1970-01-12T13:46:40Z"})
    verdict = compute_plan(job, Observed(troubles=(Trouble("trainer", "FailedCreate", QUOTA),)), NOW + 51).verdict
    assert verdict is not None
    assert verdict.message == (
        f"no step started within preRunningDeadlineSeconds, 50 s: trainer pods: FailedCreate: {QUOTA}; raise the ResourceQuota"
        " of namespace team, or ask for less in spec.trainer"
    )
    blocked = Observed(blocked=Trouble("trainer", "VolumeNotBound", "claim ckpt does not exist"))
    verdict = compute_plan(job, blocked, NOW + 51).verdict
    assert verdict is not None
    assert verdict.message == "no step started within preRunningDeadlineSeconds, 50 s: claim ckpt does not exist"


def test_an_engine_that_the_job_can_spare_does_not_make_it_unready() -> None:
    short = tuple(pod for pod in make_pods(engines=1))
    status = written(make_observed(pods=short, troubles=(Trouble("inference", "FailedCreate", QUOTA),)))
    assert told(status)[:2] == ("True", "Running")
    assert told(status)[2].startswith(
        f"step 1 of 4; 1 of 2 engines are ready; inference pods: FailedCreate: {QUOTA}; raise"
    )
    assert (status["engines"], told(status, "Stalled")[0]) == ("1/2", "False")
    needed = written(
        make_observed(pods=short, troubles=(Trouble("inference", "FailedCreate", QUOTA),)),
        {"inference": {"replicas": 2, "minReplicas": 2}},
    )
    assert told(needed)[:2] == ("False", "QuotaExceeded")


def test_an_engine_killed_for_its_memory_is_named_while_the_others_go_on() -> None:
    killed = {"ready": False, "restarts": 1, "exit_code": 137, "reason": "OOMKilled"}
    pods = tuple(replace(pod, **killed) if pod.name == "job-inference-1" else pod for pod in make_pods())
    expected = (
        "step 1 of 4; 1 of 2 engines are ready; pod job-inference-1: OOMKilled; raise resources.limits.memory (and requests) of"
        " the container in spec.inference.template.spec"
    )
    assert told(written(make_observed(pods=pods))) == ("True", "Running", expected)


def test_a_name_that_somebody_else_has_is_said_and_stands_still() -> None:
    outcome = Outcome(clashes=("Service/job-trainer",), failed=(("ConfigMap/job-trainer", "x"),))
    status = written(Observed(), outcome=outcome)
    assert told(status) == (
        "False",
        "NameClash",
        (
            "Service/job-trainer of namespace team exists and is not this job's: left as it was; give the job another name, or remove"
            " what has the name"
        ),
    )
    assert (told(status, "Stalled")[0], told(status, "Reconciling")[0]) == ("True", "False")


@pytest.mark.parametrize(
    ("words", "reason", "person"),
    [
        ('configmaps "x" is forbidden: exceeded quota: q', "QuotaExceeded", True),
        ('StatefulSet.apps "x" is invalid: spec.template: y', "InvalidObject", True),
        ("failed to create typed patch object (n/x; apps/v1): .a: field not declared in schema", "InvalidObject", True),
        ('services is forbidden: User "u" cannot patch', "AdmissionRefused", True),
        ("etcdserver: request timed out", "ApplyFailed", False),
    ],
)
def test_what_could_not_be_applied_is_quoted(words: str, reason: str, *, person: bool) -> None:
    waiting = of_outcome(make_job(), Outcome(failed=(("ConfigMap/job-trainer", words), ("Secret/s", "y"))))
    assert waiting is not None
    assert (waiting.reason, waiting.person) == (reason, person)
    assert waiting.message.startswith(f"ConfigMap/job-trainer: {words}; and 1 more; ")
    assert of_outcome(make_job(), Outcome(changed=("Secret/s",))) is None


def test_a_failed_apply_of_a_running_job_shows_and_goes_away() -> None:
    status = written(make_observed(), outcome=Outcome(failed=(("NetworkPolicy/job-workers", "boom"),)))
    assert told(status)[:2] == ("False", "ApplyFailed")
    job = make_job(status=status)
    later = next_status(job, make_observed(), compute_plan(job, make_observed(), NOW + 1), NOW + 1, Outcome())
    assert later is not None
    assert told(later)[:2] == ("True", "Running")


def test_long_words_of_kubernetes_are_cut_before_the_way_out() -> None:
    status = written(Observed(troubles=(Trouble("trainer", "FailedScheduling", "0/3 nodes " + "x\n" * 4000),)))
    message = told(status)[2]
    assert len(message) < 1400
    assert message.endswith("or the role's template")


def test_a_stall_is_what_kstatus_reads() -> None:
    job = make_job(status={"startTime": "1970-01-01T00:00:00Z"})
    seen = make_observed()
    status = next_status(job, seen, compute_plan(job, seen, NOW), NOW)
    assert status is not None
    assert (told(status, "Stalled")[:2], told(status, "Reconciling")[0]) == (("True", "StallDeadlineExceeded"), "False")
