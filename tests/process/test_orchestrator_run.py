"""The orchestrator's process beside stand-ins of trainer and engines: whole runs, and runs that lose a part of the job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from orchestrator_peers import EOS_ID, Cluster, cut


def consumed(cluster: Cluster) -> Counter[int]:
    """How often each prompt's position is in what was trained last for each step."""
    steps: dict[int, list[int]] = {}
    for row in cluster.lines("rollouts.jsonl"):
        if row["sample"] == 0:
            steps[row["step"]] = [*steps.get(row["step"], []), row["position"]][-2:]
    return Counter(position for positions in steps.values() for position in positions)


async def test_a_run_of_five_steps_publishes_every_step_and_learns(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        status = await cluster.finish()
        assert (status.phase, status.step, status.reason) == ("complete", 5, "")
        assert status.progress["reward_first"] == 0.0
        assert status.progress["reward_heldout"] == 1.0
        assert {engine.version for engine in cluster.engines} == {status.version}
        assert {engine.digest for engine in cluster.engines} == {"digest-0-5"}
        rows = cluster.lines("metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4, 5]
        assert [row["step"] for row in rows if row["kind"] == "sync"] == [0, 1, 2, 3, 4, 5]
        assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [0, 5]
        assert max(row["metrics"]["off_policy_max"] for row in rows if row["kind"] == "step") <= 2
        assert consumed(cluster) == Counter(range(10))


async def test_requests_carry_seed_salt_and_the_end_token_and_are_the_same_for_the_same_sample(tmp_path: Path) -> None:
    async with Cluster(tmp_path, engines=1, steps=2, evaluation={"samples": 0}) as cluster:
        await cluster.finish()
        body = cluster.engines[0].requests[0]
        params = body["sampling_params"]
        assert (params["temperature"], params["logprobs"], params["stop_token_ids"]) == (1.0, 0, [EOS_ID])
        assert body["cache_salt"] == "job-uid/1"
        seeds = [item["sampling_params"]["seed"] for item in cluster.engines[0].requests]
        assert len(set(seeds)) == len(seeds)


async def test_an_orchestrator_killed_after_the_first_of_two_commits_rolls_forward(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        first, second = cluster.engines

        def kill_before_second_commit() -> None:
            if second.prepared is not None and second.prepared[2] == 2:
                cluster.kill()
                raise ConnectionResetError

        second.on_commit = kill_before_second_commit
        await cluster.until(lambda: first.step == 2 and first.version is not None, "the first engine to commit step 2")
        assert cluster.process is not None
        await cluster.process.wait()
        assert second.step == 1
        held = second.prepared
        assert held is not None
        second.on_commit = lambda: None
        await cluster.relaunch()
        await cluster.until(lambda: second.step >= 2, "the second engine to commit step 2")
        status = await cluster.finish()
        assert status.step == 5
        assert [item["message"] for item in cluster.events("SyncRecovered")] == [f"version {held[1]} rolled forward"]
        assert consumed(cluster) == Counter(range(10))


async def test_an_engine_lost_between_prepare_and_commit_is_fenced_and_the_others_go_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        lost = cluster.engines[1]

        async def kill_once() -> None:
            if cluster.trainer.step == 2 and lost.runner is not None:
                await lost.kill()

        cluster.trainer.after_prepare = kill_once
        status = await cluster.finish()
        assert status.step == 5
        assert {item.pod: item.state for item in status.members}["engine-1"] == "lost"
        assert cluster.engines[0].digest == "digest-0-5"
        assert consumed(cluster) == Counter(range(10))


async def test_an_engine_lost_while_it_prepares_ends_the_sync_at_once_and_the_others_get_the_weights(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path, weight_sync={"timeout_seconds": 30.0}) as cluster:
        lost, trainer = cluster.engines[1], cluster.trainer

        async def kill_and_wait_for_its_report() -> None:
            if trainer.step == 2 and lost.runner is not None:
                await lost.kill()
                await cluster.until(lambda: any(not item.committed for item in trainer.decisions), "an abort", 25.0)

        trainer.after_prepare = kill_and_wait_for_its_report
        status = await cluster.finish()
        assert status.step == 5
        assert "engine-1 was lost while it prepared" in cluster.events("SyncAborted")[0]["message"]
        steps = [row["step"] for row in cluster.lines("metrics.jsonl") if row["kind"] == "sync"]
        assert steps == sorted(set(steps))
        assert set(steps) | {2} == {0, 1, 2, 3, 4, 5}  # the trainer may be past step 2 before it is sent again


async def test_a_job_without_engines_waits_and_goes_on_when_they_are_back(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.until(lambda: cluster.trainer.step == 2, "step 2")
        for engine in cluster.engines:
            await engine.kill()

        async def waits() -> bool:
            return "engines to boot" in (await cluster.status()).waiting_for

        await cluster.until(waits, "the status to say what is waited for")
        for engine in cluster.engines:
            await engine.start()
        status = await cluster.finish()
        assert status.step == 5
        assert consumed(cluster) == Counter(range(10))


async def test_an_engine_that_comes_back_joins_and_gets_the_weights(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=40) as cluster:
        lost = cluster.engines[1]
        await cluster.until(lambda: lost.step >= 2, "step 2")
        await lost.kill()
        await cluster.until(lambda: cluster.engines[0].step >= 6, "the run to go on with one engine")
        await lost.start()
        await cluster.until(lambda: lost.step >= 6, "the engine to be back")
        assert lost.commits[-1].epoch > lost.commits[0].epoch


async def test_a_failed_prepare_leaves_the_old_version_serving_and_its_number_is_never_used(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.until(lambda: cluster.engines[1].step == 1, "step 1")
        cluster.engines[1].prepare_error = "digest differs"
        status = await cluster.finish()
        assert status.step == 5
        aborted = [item.version for item in cluster.trainer.decisions if not item.committed]
        assert len(aborted) == 1
        committed = {decision.version for engine in cluster.engines for decision in engine.commits}
        assert not committed & set(aborted)
        assert "digest differs" in cluster.events("SyncAborted")[0]["message"]


async def test_a_new_attempt_of_the_trainer_goes_on_from_its_checkpoint_and_drops_the_old_lineage(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path, steps=6) as cluster:
        cluster.trainer.step_seconds = 0.3
        await cluster.until(lambda: cluster.trainer.step == 2 and cluster.trainer.training, "step 3 to run")
        await cluster.trainer.restart()
        await cluster.tell()
        status = await cluster.finish()
        assert (status.step, status.attempt) == (6, 1)
        assert all(request.attempt == 1 for step in (3, 4, 5, 6) for request in cluster.trainer.requests[step][-1:])
        trained = [cluster.trainer.requests[step][-1] for step in range(1, 7)]
        first_of_attempt = min(item.version for item in cluster.engines[0].commits if item.attempt == 1)
        assert all(sample.version_min >= first_of_attempt for item in trained[2:] for sample in item.samples)
        assert consumed(cluster) == Counter(range(12))


async def test_a_new_attempt_of_the_whole_job_goes_on_from_the_trainers_checkpoint(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=6) as cluster:
        cluster.trainer.step_seconds = 0.3
        await cluster.until(lambda: cluster.trainer.step == 2 and cluster.trainer.training, "step 3 to run")
        cluster.kill()
        for engine in cluster.engines:
            await engine.kill()
        before = cluster.trainer.version
        await cluster.trainer.restart()
        await cluster.relaunch()
        for engine in cluster.engines:
            await engine.start()
        status = await cluster.finish()
        assert (status.step, status.attempt) == (6, 1)
        assert min(item.version for item in cluster.engines[0].commits if item.attempt == 1) > before
        assert consumed(cluster) == Counter(range(12))


async def test_a_log_probability_that_is_not_finite_is_dropped_and_its_replica_healed(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.until(lambda: cluster.engines[1].step == 1, "step 1")
        cluster.engines[1].not_finite = 1
        status = await cluster.finish()
        assert status.step == 5
        assert status.off_policy["dropped"] == 1.0


async def test_engines_that_answer_nan_again_after_healing_end_the_job(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.until(lambda: cluster.engines[1].step == 1, "step 1")
        for engine in cluster.engines:
            engine.not_finite = 10_000
        status = await cluster.finish()
        assert (status.phase, status.reason) == ("failed", "NaN")


async def test_a_killed_orchestrator_uses_no_prompt_twice(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=8) as cluster:
        cluster.trainer.step_seconds = 0.2
        for step in (2, 4, 6):
            await cluster.until(lambda step=step: cluster.trainer.step >= step, f"step {step}")
            cluster.kill()
            await cluster.relaunch()
        status = await cluster.finish()
        assert status.step == 8
        trained = Counter(
            tuple(sample.tokens[:10]) for step in range(1, 9) for sample in cluster.trainer.requests[step][-1].samples
        )
        assert len(trained) == 16
        assert set(trained.values()) == {4}
        assert all(len(requests) == 1 for requests in cluster.trainer.requests.values())


async def test_a_trainer_that_failed_ends_the_job_with_its_reason_and_a_new_attempt_goes_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.until(lambda: cluster.trainer.step == 2, "step 2")
        cluster.trainer.failure = ("TrainerOutOfMemory", "rank 0, step 3: 80 GiB; double the context parallelism")
        status = await cluster.finish()
        assert (status.phase, status.reason) == ("failed", "TrainerOutOfMemory")
        assert status.message.startswith("rank 0, step 3")
        await cluster.trainer.restart()
        await cluster.tell()

        async def goes_on() -> bool:
            return (await cluster.status()).phase != "failed"

        await cluster.until(goes_on, "the next attempt")
        status = await cluster.finish()
        assert (status.phase, status.step, status.attempt) == ("complete", 5, 1)


async def test_a_mismatch_over_the_stop_limit_ends_the_job(tmp_path: Path) -> None:
    limits = {"mismatch_kl_warn": 0.01, "mismatch_kl_stop": 0.1}
    async with Cluster(tmp_path, limits=limits) as cluster:
        cluster.trainer.metrics = {"loss": 0.1, "mismatch_kl": 0.2}
        status = await cluster.finish()
        assert (status.phase, status.reason, status.step) == ("failed", "MismatchLimit", 1)
        assert status.warnings == ["mismatch_kl 0.2 is over limits.mismatchKL.warn 0.01"]


async def test_failed_checkpoints_warn_and_the_third_in_a_row_ends_the_job(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.trainer.checkpoint_error = "No space left on device"
        status = await cluster.finish()
        assert (status.phase, status.reason, status.step) == ("failed", "CheckpointFailed", 3)
        assert status.message == "checkpoint of step 3 failed: No space left on device"


async def test_a_trainer_that_is_silent_for_a_moment_costs_no_sample(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=6) as cluster:
        trainer = cluster.trainer
        trainer.step_seconds = 0.2
        await cluster.until(lambda: trainer.step == 2 and not trainer.training, "step 2")
        runner = trainer.runner
        assert runner is not None
        await cut(runner)
        await trainer.start()
        status = await cluster.finish()
        assert (status.step, status.attempt) == (6, 0)
        assert status.off_policy["dropped"] == 0.0
        assert consumed(cluster) == Counter(range(12))


async def test_an_engine_of_an_old_release_or_with_other_quantized_layers_ends_the_job(tmp_path: Path) -> None:
    old = Cluster(tmp_path / "old")
    old.engines[1].paths = ["/v1/completions"]
    async with old as cluster:
        status = await cluster.finish()
        assert (status.phase, status.reason) == ("failed", "EngineReleaseUnsupported")
        assert "vLLM 0.26.0 and lacks /inference/v1/generate" in status.message
    other = Cluster(tmp_path / "other")
    for engine in other.engines:
        engine.audit_error = "12 layers are quantized, the plan says 14"
    async with other as cluster:
        status = await cluster.finish()
        assert (status.phase, status.reason) == ("failed", "QuantizedLayersDiffer")
        assert "engine-1: 12 layers are quantized, the plan says 14" in status.message
