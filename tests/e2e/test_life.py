"""The life of a job on real nodes: growing and shrinking, suspend and resume, deletion, the end, a status that somebody edits."""

from __future__ import annotations

import json
import time

from failure_cases import policy
from test_failures import skipped_or_repeated

DELETION_SECONDS = 30


def test_engines_come_and_go_while_the_job_runs_and_nobody_is_restarted(toy):
    job = toy(policy()).start().until_running()
    before = job.uids()
    epoch = job.status["weightSyncGroup"]["epoch"]
    job.patch({"inference": {"replicas": 3}})
    job.until(lambda: job.members() == ["inference"] * 3 + ["trainer"], "a group of three engines")
    job.until(lambda: job.ready() == 5, "five pods")
    assert before <= job.uids()
    grown = job.status["weightSyncGroup"]["epoch"]
    assert grown > epoch
    job.patch({"inference": {"replicas": 1}})
    job.until(lambda: job.members() == ["inference", "trainer"], "a group of one engine")
    job.until(lambda: len(job.pods("inference")) == 1, "one engine")
    assert job.status["weightSyncGroup"]["epoch"] > grown
    assert before >= job.uids("trainer", "orchestrator")
    assert (job.status["attempt"], job.status["restarts"], job.restarts()) == (0, 0, 0)
    assert skipped_or_repeated(job.steps()) == []
    print(f"epochs {epoch}, {grown}, {job.status['weightSyncGroup']['epoch']}; {len(job.steps())} steps in a row")


def test_a_suspended_job_has_no_pods_and_a_resumed_one_runs_again_at_no_cost(toy):
    job = toy(policy()).start().until_running()
    job.patch({"suspend": True})
    job.until_condition("Suspended", "True", "SuspendedByUser")
    job.until(lambda: not job.pods(), "no pods")
    job.patch({"suspend": False})
    job.until_running()
    assert job.status["restarts"] == 0
    assert job.condition("Suspended")[0] == "False"


def test_a_job_that_runs_is_gone_with_all_its_objects_within_thirty_seconds_of_its_deletion(toy):
    job = toy(policy()).start().until_running()
    started = time.monotonic()
    job.kubectl("delete", "f8j", job.name, "--wait=false")
    kinds = (
        "pods,statefulsets,deployments,replicasets,services,configmaps,secrets,pdb,networkpolicies,serviceaccounts,f8j"
    )

    def left() -> list[str]:
        items = json.loads(job.kubectl("get", kinds, "-o", "json"))["items"]
        mine = [
            item
            for item in items
            if item["metadata"].get("labels", {}).get("fp8rl.dev/job-uid") or item["kind"] == "FP8RLJob"
        ]
        return [f"{item['kind']}/{item['metadata']['name']}" for item in mine]

    job.until(lambda: not left(), "nothing is left", DELETION_SECONDS)
    print(f"gone after {time.monotonic() - started:.1f} s")


def test_a_job_deleted_while_it_starts_is_gone_within_thirty_seconds(toy):
    job = toy(policy()).start()
    job.until(job.pods, "the first pods")
    job.kubectl("delete", "f8j", job.name, "--wait=false")
    job.until(
        lambda: job.world.job(job.namespace, job.name) is None and not job.pods(), "nothing is left", DELETION_SECONDS
    )


def test_kubectl_wait_sees_the_end_and_pods_go(toy):
    job = toy(policy()).start().until_running()
    job.tell("done")
    job.kubectl("wait", "--for=condition=Complete", f"f8j/{job.name}", "--timeout=60s")
    job.until(lambda: not job.pods(), "no pods are kept")
    reasons = [reason for reason, _ in job.told()]
    assert "Complete" in reasons
    print(job.kubectl("get", "f8j", job.name))


def test_pods_of_an_ended_job_stay_where_they_shall(toy):
    job = toy(policy() | {"cleanupPolicy": "keepPods"}).start().until_running()
    job.tell("done")
    job.until_condition("Complete", "True", "StepsDone")
    assert job.ready() == 4


def test_a_job_goes_when_its_time_after_the_end_is_over(toy):
    job = toy(policy() | {"ttlSecondsAfterFinished": 3}).start().until_running()
    job.tell("done")
    job.until(lambda: job.world.job(job.namespace, job.name) is None, "the job is gone", 60)
    job.until(lambda: not job.pods(), "and its pods", DELETION_SECONDS)


def test_a_status_edited_by_hand_is_put_right(toy):
    job = toy(policy()).start().until_running()
    wrong = {"status": {"attempt": 7, "restarts": 3, "step": 999999, "conditions": []}}
    job.kubectl("patch", "f8j", job.name, "--subresource=status", "--type=merge", "-p", json.dumps(wrong))
    job.until(lambda: job.condition("Ready")[:2] == ("True", "Running"), "Ready again")
    job.until(lambda: (job.status["attempt"], job.status["restarts"]) == (0, 0), "attempt and restarts as they were")
    assert job.status["step"] < 999999
    assert job.restarts() == 0


def test_a_job_past_its_deadline_ends_and_says_so(toy):
    job = toy(policy() | {"activeDeadlineSeconds": 15}).start()
    message = job.until_condition("Failed", "True", "DeadlineExceeded", 60)
    assert "activeDeadlineSeconds is 15" in message
    job.until(lambda: not job.pods(), "no pods")


def test_a_job_that_never_runs_ends_at_its_deadline_before_running(toy):
    job = toy(policy() | {"preRunningDeadlineSeconds": 45}).of_main(
        "inference", image="registry.invalid/engine:nowhere"
    )
    message = job.start().until_condition("Failed", "True", "PreRunningDeadlineExceeded", 150)
    assert "registry.invalid/engine:nowhere" in message
    print(message)


def test_a_job_that_another_controller_manages_is_left_alone(toy):
    job = toy(policy() | {"managedBy": "kueue.x-k8s.io/multikueue"}).start()
    time.sleep(3)
    assert job.pods() == []
    assert job.status == {}


def test_two_runs_of_one_manifest_in_two_namespaces_do_not_meet(toy, operated):
    first = toy(policy()).start()
    operated.kubectl("create", "namespace", f"{first.namespace}-b")
    try:
        second = type(first)(operated, f"{first.namespace}-b", first.folder.with_name("second"), policy()).start()
        first.until_running()
        second.until_running()
        second.kubectl("delete", "f8j", second.name)
        second.until(lambda: not second.pods(), "the second is gone", DELETION_SECONDS)
        steps = len(first.steps())
        first.until(lambda: len(first.steps()) > steps + 5, "the first goes on")
        assert first.restarts() == 0
    finally:
        operated.kubectl("delete", "namespace", f"{first.namespace}-b", "--wait=false")
