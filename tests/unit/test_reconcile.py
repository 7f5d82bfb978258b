"""One pass over a cluster that is a list of objects."""

from __future__ import annotations

from typing import Any

from builders import make_job, make_observed, make_orchestrator, make_pod

from fp8rl_operator.cluster import Object, Outcome
from fp8rl_operator.control import url_of
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import Plan
from fp8rl_operator.reconcile import reconcile
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status_events import setback

NOW = 1_000_000.0


class FakeCluster:
    """Remembers what it was told."""

    def __init__(self, seen: Observed) -> None:
        self.seen = seen
        self.told: list[Any] = []

    async def observe(self, job: FP8RLJob) -> Observed:
        return self.seen

    async def apply(self, job: FP8RLJob, objects: list[Object], plan: Plan) -> Outcome:
        self.told.append(("apply", [item["kind"] for item in objects if item["kind"] == "Secret"], plan.attempt))
        self.objects = objects
        return Outcome()

    async def write_status(self, job: FP8RLJob, status: dict[str, Any]) -> None:
        self.told.append(("status", status.get("step")))

    async def record(self, job: FP8RLJob, reason: str, message: str, *, warning: bool = False) -> None:
        self.told.append(("event", reason, warning))


STARTED = [("event", "Started", False), ("event", "Running", False)]


async def test_a_pass_applies_then_writes_the_status_then_tells() -> None:
    cluster = FakeCluster(make_observed())
    done = await reconcile(cluster, make_job(), NOW)
    assert cluster.told == [("apply", ["Secret"], 0), ("status", 1), *STARTED]
    again = FakeCluster(cluster.seen)
    await reconcile(again, make_job(status=done.status), NOW + 100)
    assert again.told == [("apply", ["Secret"], 0)]


async def test_the_end_is_written_before_the_pods_go() -> None:
    cluster = FakeCluster(make_observed(orchestrator=make_orchestrator(phase="complete", step=4)))
    done = await reconcile(cluster, make_job(), NOW)
    assert cluster.told == [("status", 4), ("event", "Complete", False), ("apply", ["Secret"], 0)]
    assert done.plan.verdict is not None
    again = FakeCluster(cluster.seen)
    await reconcile(again, make_job(status=done.status), NOW + 100)
    assert again.told == [("apply", ["Secret"], 0)]


async def test_the_token_is_made_once_and_then_kept() -> None:
    first = FakeCluster(Observed())
    await reconcile(first, make_job(), NOW)
    second = FakeCluster(Observed())
    await reconcile(second, make_job(), NOW)
    assert first.objects[0]["data"] != second.objects[0]["data"]
    kept = FakeCluster(Observed(token="t"))
    await reconcile(kept, make_job(), NOW)
    assert kept.objects[0]["data"] == {"token": "dA=="}


async def test_a_loss_is_told_with_its_reason_and_the_new_attempt() -> None:
    seen = make_observed()
    started = await reconcile(FakeCluster(seen), make_job(), NOW)
    pods = tuple(pod for pod in seen.pods if pod.role != "trainer")
    cluster = FakeCluster(make_observed(pods=pods))
    await reconcile(cluster, make_job(status=started.status), NOW + 1)
    lost = [("event", "TrainerLost", True), ("event", "Restarting", True)]
    assert cluster.told == [("status", 1), *lost, ("apply", ["Secret"], 1)]


async def test_hands_off_touches_nothing() -> None:
    cluster = FakeCluster(make_observed())
    await reconcile(cluster, make_job({"managedBy": "kueue.x-k8s.io/multikueue"}), NOW)
    assert cluster.told == []


async def test_steps_that_no_checkpoint_kept_are_told_once() -> None:
    cluster = FakeCluster(make_observed(orchestrator=make_orchestrator(step=0)))
    job = make_job({"trainer": {"checkpoint": {"everySteps": 20}}}, {"step": 137})
    done = await reconcile(cluster, job, NOW)
    assert cluster.told[1:] == [("status", 0), ("event", "StepsLost", True), *STARTED]
    again = FakeCluster(cluster.seen)
    await reconcile(again, make_job(status=done.status), NOW + 100)
    assert [item for item in again.told if item[0] == "event"] == []
    assert setback(job, {"step": 118}) == []
    assert [told.message for told in setback(job, {"step": 117})] == [
        (
            "goes on at step 117, step 137 was done: no newer checkpoint was found, trainer.checkpoint.everySteps is 20; in a cluster"
            " set trainer.checkpoint.claimName or volumeClaimTemplate, which outlive a pod"
        )
    ]


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert url_of(make_pod("trainer", ip="fd00::1"), 8100, "/v1/state") == "http://[fd00::1]:8100/v1/state"
    assert url_of(make_pod("trainer", ip="10.0.0.1"), 8100, "/v1/state") == "http://10.0.0.1:8100/v1/state"
