"""Weight syncs that fail again and again, engines that hang, syncs under steps: the orchestrator beside stand-ins."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from orchestrator_peers import ORCHESTRATOR_PORT, Cluster, StandInEngine
from test_orchestrator_run import consumed

from fp8rl_workers.errors import SyncError
from fp8rl_workers.orchestrator import trouble


def refuses_commits(engine: StandInEngine) -> None:
    """Every commit of this engine fails in the same way."""

    def fail() -> None:
        raise SyncError(f"CUDA error: invalid argument (sync {len(engine.attempts)})")

    engine.on_commit = fail


async def metric(cluster: Cluster, name: str) -> float:
    """A value of the orchestrator's metrics."""
    async with cluster.session.get(f"http://{cluster.host}:{ORCHESTRATOR_PORT}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


async def test_commits_that_always_fail_are_repeated_with_pauses_and_end_the_job_with_pod_and_error(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster:
        for engine in cluster.engines:
            refuses_commits(engine)
        texts: set[str] = set()

        async def over() -> bool:
            status = await cluster.status()
            texts.add(status.waiting_for)
            return status.phase == "failed"

        started = time.monotonic()
        await cluster.until(over, "the job to give up", 90.0)
        pauses = sum(trouble.pause_seconds(number) for number in range(1, trouble.GIVE_UP_AFTER))
        assert pauses <= time.monotonic() - started < pauses + 25
        status = await cluster.status()
        assert status.reason == "WeightSyncFailed"
        assert "8 weight syncs in a row reached no engine: engine-0, engine-1: POST http" in status.message
        assert "CUDA error: invalid argument" in status.message
        assert cluster.trainer.version == 8
        held = [text for text in texts if "tried again in" in text]
        assert all("to reach engine-0, engine-1: engine-0, engine-1: POST" in text for text in held)
        assert any("failure 4 in a row" in text for text in held)
        assert {item.pod: item.state for item in status.members}["engine-0"] == "fenced"
        assert all("CUDA error" in item.message for item in status.members if item.role == "inference")
        assert len(cluster.events("SyncFailed")) == 1
        assert await metric(cluster, "fp8rl_weight_sync_failures_total") == 8.0


async def test_prepares_that_fail_on_the_trainer_are_repeated_with_pauses(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:

        def fail() -> None:
            if len(cluster.trainer.decisions) < 3:
                raise SyncError("cannot cast")

        cluster.trainer.after_prepare = fail
        status = await cluster.finish()
        assert status.phase == "complete"
        assert cluster.trainer.version == 3 + 6
        assert [item["message"] for item in cluster.events("SyncAborted")] == [
            f"version 1 reached no engine: trainer-0: POST http://{cluster.trainer.host}:8100/v1/syncs: 500 cannot cast"
        ]


async def test_one_engine_that_cannot_commit_is_fenced_with_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=30) as cluster:
        good, bad = cluster.engines
        refuses_commits(bad)
        await cluster.until(lambda: good.step >= 25, "the run to go on")
        status = await cluster.status()
        member = {item.pod: item for item in status.members}["engine-1"]
        assert (member.state, member.version) == ("fenced", None)
        assert "CUDA error: invalid argument" in member.message
        assert {item.pod: item.message for item in status.members}["engine-0"] == ""
        assert len(bad.attempts) <= 4
        assert bad.requests == []
        bad.on_commit = lambda: None
        cluster.trainer.step_seconds = 2.0
        await cluster.until(lambda: bad.version is not None, "the engine to be tried again", 60.0)
        status = await cluster.status()
        assert {item.pod: item.message for item in status.members}["engine-1"] == ""


async def test_stages_of_a_sync_add_up_to_its_seconds(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=3) as cluster:
        await cluster.finish()
        syncs = [row for row in cluster.lines("metrics.jsonl") if row["kind"] == "sync"]
        assert len(syncs) == 4
        for row in syncs:
            assert set(row["stages"]) == {"cast", "wire", "report", "commit"}
            assert sum(row["stages"].values()) == pytest.approx(row["metrics"]["sync_seconds"], abs=1e-6)
            assert row["stages"]["report"] >= cluster.trainer.sync_seconds


async def test_a_step_begins_while_the_weights_of_the_one_before_are_on_their_way(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=8, evaluation={"samples": 4, "every_steps": 4}) as cluster:
        cluster.trainer.sync_seconds = 0.3
        cluster.trainer.step_seconds = 0.5
        status = await cluster.finish()
        assert status.step == 8
        assert len(cluster.trainer.steps_under_syncs) >= 4
        assert not set(cluster.trainer.steps_under_syncs) & {1, 5}  # evaluations wait for their weights
        rows = cluster.lines("metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "sync"] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        versions = [decision.version for decision in cluster.engines[0].commits]
        assert versions == sorted(set(versions))
        assert max(row["metrics"]["off_policy_max"] for row in rows if row["kind"] == "step") <= 1
        assert [row["version"] for row in rows if row["kind"] == "evaluation"] == [1, 5, 9]
        assert status.off_policy["dropped"] == 0.0
        assert consumed(cluster) == Counter(range(16))


async def test_with_no_off_policy_step_allowed_every_sample_is_of_the_newest_weights(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=4, max_off_policy_steps=0) as cluster:
        cluster.trainer.sync_seconds = 0.2
        await cluster.finish()
        rows = [row for row in cluster.lines("metrics.jsonl") if row["kind"] == "step"]
        assert [row["metrics"]["off_policy_max"] for row in rows] == [0.0] * 4
        assert cluster.trainer.steps_under_syncs == []


async def test_an_orchestrator_killed_under_a_step_and_a_sync_goes_on_and_uses_no_prompt_twice(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=8) as cluster:
        trainer = cluster.trainer
        trainer.sync_seconds = trainer.step_seconds = 0.4
        for step in (2, 5):
            await cluster.until(
                lambda step=step: trainer.syncing and trainer.training and trainer.step >= step, "a sync under a step"
            )
            cluster.kill()
            await cluster.relaunch()
        status = await cluster.finish()
        assert (status.phase, status.step) == ("complete", 8)
        trained = Counter(
            tuple(sample.tokens[:10]) for step in range(1, 9) for sample in trainer.requests[step][-1].samples
        )
        assert set(trained.values()) == {4}
        assert len(trained) == 16
        assert {engine.digest for engine in cluster.engines} == {"digest-0-8"}


async def test_a_trainer_lost_under_a_step_and_a_sync_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=6) as cluster:
        trainer = cluster.trainer
        trainer.sync_seconds = trainer.step_seconds = 0.4
        await cluster.until(lambda: trainer.syncing and trainer.training and trainer.step >= 2, "a sync under a step")
        await trainer.restart()
        await cluster.tell()
        status = await cluster.finish()
        assert (status.phase, status.step, status.attempt) == ("complete", 6, 1)
        assert {engine.digest for engine in cluster.engines} == {"digest-1-6"}
        assert consumed(cluster) == Counter(range(12))


async def test_an_engine_that_hangs_is_lost_after_the_time_limit_and_back_when_it_answers(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=400, weight_sync={"timeout_seconds": 3.0}) as cluster:
        good, hung = cluster.engines
        await cluster.until(lambda: hung.step >= 2, "step 2")
        hung.awake.clear()
        since = time.monotonic()

        async def lost() -> bool:
            return {item.pod: item.state for item in (await cluster.status()).members}["engine-1"] == "lost"

        await cluster.until(lost, "the engine to be lost")
        assert 2.0 < time.monotonic() - since < 3.0 + 4.0
        reached = good.step
        await cluster.until(lambda: good.step >= reached + 5, "the run to go on", 20.0)
        hung.awake.set()
        await cluster.until(lambda: hung.step > reached + 5, "the engine to be back", 20.0)
        status = await cluster.status()
        assert {item.pod: item.state for item in status.members}["engine-1"] == "serving"
        assert status.off_policy["dropped"] == 0.0
        assert (
            max(row["metrics"]["off_policy_max"] for row in cluster.lines("metrics.jsonl") if row["kind"] == "step")
            <= 2
        )


async def test_rollouts_of_an_engine_that_hangs_are_sent_elsewhere(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=40, weight_sync={"timeout_seconds": 2.0}) as cluster:
        good, hung = cluster.engines
        hung.seconds = 8.0
        await cluster.until(lambda: hung.requests, "a request")
        hung.awake.clear()
        before = len(good.requests)
        await cluster.until(lambda: cluster.trainer.step >= 3, "steps without the engine", 20.0)
        assert len(good.requests) > before


async def test_another_tokenizer_than_the_trainers_ends_the_job(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.trainer.tokenizer_digest = "f" * 64
        status = await cluster.finish()
        assert (status.phase, status.reason) == ("failed", "InvalidModel")
        assert f"{tmp_path}/model/tokenizer.json has SHA-256" in status.message
        assert "f" * 64 in status.message
