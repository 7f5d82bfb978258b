"""Engines that come and go while the job runs, and what the orchestrator remembers of the operator's documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from orchestrator_peers import Cluster, StandInEngine
from test_orchestrator_run import consumed

from fp8rl_workers.protocol import OrchestratorStatus


def worlds(cluster: Cluster) -> list[str]:
    """World sizes of the epochs that were formed."""
    return [item["message"].partition(": ")[2] for item in cluster.events("EpochFormed")]


def seeds(engine: StandInEngine) -> list[int | None]:
    """Seeds of the requests that reached an engine: each names a sample."""
    return [item["sampling_params"].get("seed") for item in engine.requests]


async def test_a_new_engine_gets_the_weights_before_its_first_request_and_no_step_is_skipped(tmp_path: Path) -> None:
    async with Cluster(tmp_path, engines=1, steps=12) as cluster:
        old = cluster.engines[0]
        await cluster.until(lambda: cluster.trainer.step >= 2, "step 2")
        new = cluster.engine()
        cluster.engines.append(new)
        await new.start()
        await cluster.tell()
        await cluster.until(lambda: new.requests, "the new engine's first request")
        assert new.commits
        assert new.requests[0]["cache_salt"] in {f"job-uid/{decision.version}" for decision in new.commits}
        status = await cluster.finish()
        assert (status.phase, status.step, status.off_policy["dropped"]) == ("complete", 12, 0.0)
        assert sorted(cluster.trainer.requests) == list(range(1, 13))
        assert all(len(requests) == 1 for requests in cluster.trainer.requests.values())
        assert consumed(cluster) == dict.fromkeys(range(24), 1)
        assert worlds(cluster) == ["world of 2", "world of 3"]
        assert sorted({decision.epoch for decision in old.commits}) == [1, 2]
        assert Counter(seeds(old)) == Counter(old.answers)  # none of its requests was broken off
        assert cluster.events("SyncAborted") + cluster.events("SyncFailed") == []


async def test_an_engine_that_leaves_the_document_gets_nothing_more_and_its_rollouts_are_sent_again(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path, engines=3, steps=8) as cluster:
        gone = cluster.engines[2]
        for engine in cluster.engines:
            engine.seconds = 0.2
        await cluster.until(lambda: cluster.trainer.step >= 2 and len(gone.requests) > len(gone.answers), "step 2")
        cluster.engines.remove(gone)
        await cluster.tell()
        in_flight = Counter(seeds(gone)) - Counter(gone.answers)
        asked, commits = len(gone.requests), len(gone.commits)
        status = await cluster.finish()
        assert (status.phase, status.step, status.off_policy["dropped"]) == ("complete", 8, 0.0)
        assert (len(gone.requests), gone.runner is not None) == (asked, True)
        assert len(gone.commits) <= commits + 1  # a sync that was decided before may reach it
        assert in_flight
        assert set(in_flight) <= {seed for engine in cluster.engines for seed in engine.answers}
        assert [item.pod for item in status.members] == ["trainer-0", "engine-0", "engine-1"]
        assert worlds(cluster) == ["world of 4", "world of 3"]
        assert consumed(cluster) == dict.fromkeys(range(16), 1)
        await gone.kill()


async def test_an_engine_that_leaves_while_a_sync_is_prepared_or_committed_is_nobodys_fault(tmp_path: Path) -> None:
    async with Cluster(tmp_path, engines=3, steps=6) as cluster:
        removed: list[StandInEngine] = []

        async def leave_while_it_prepares() -> None:
            if cluster.trainer.step == 2 and not removed:
                removed.append(cluster.engines.pop())
                await cluster.tell()

        cluster.trainer.after_prepare = leave_while_it_prepares
        status = await cluster.finish()
        assert (status.phase, status.step, status.warnings) == ("complete", 6, [])
        assert cluster.events("SyncFailed") == []
        assert {engine.digest for engine in cluster.engines} == {"digest-0-6"}
        await removed[0].kill()


async def test_the_least_number_of_engines_follows_the_document(tmp_path: Path) -> None:
    async with Cluster(tmp_path, engines=2, steps=30) as cluster:
        await cluster.tell(min_replicas=2)
        await cluster.until(lambda: cluster.trainer.step >= 2, "step 2")
        gone = cluster.engines.pop()
        await cluster.tell(min_replicas=2)

        async def waits() -> bool:
            text = (await cluster.status()).waiting_for
            return text == "2 serving engines (inference.minReplicas), 1 serve"

        await cluster.until(waits, "the run to wait for a second engine")
        await cluster.tell(min_replicas=1)
        assert (await cluster.finish()).step == 30
        await gone.kill()


async def test_an_older_document_is_refused_with_the_generation_at_hand_also_after_a_restart(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=200) as cluster:
        cluster.generation = 1000
        await cluster.tell()
        held = await cluster.status()
        assert (held.group_attempt, held.group_generation) == (0, 1001)
        assert [item.uid for item in held.members] == ["uid-trainer", "uid-engine-0", "uid-engine-1"]
        await refuses(cluster, 1000)
        async with cluster.put_group(cluster.document()) as response:
            assert response.status == 200  # the same again
        cluster.kill()
        assert cluster.process is not None
        await cluster.process.wait()
        await cluster.spawn()
        await cluster.until(lambda: answered(cluster), "the orchestrator to be back")
        assert (await cluster.status()).group_generation == 1001
        await refuses(cluster, 1000)


async def refuses(cluster: Cluster, generation: int) -> None:
    """PUT an older document."""
    async with cluster.put_group(cluster.document(generation=generation, members=[])) as response:
        body = await response.json()
        assert (response.status, body["reason"]) == (409, "StaleDocument")
        assert (body["attempt"], body["generation"]) == (0, 1001)
        assert body["error"].startswith(f"group document 0/{generation} (attempt/generation) is older than 0/1001")
    assert len((await cluster.status()).members) == 3


async def answered(cluster: Cluster) -> OrchestratorStatus | None:
    """The status, None while nobody listens."""
    try:
        return await cluster.status()
    except OSError:
        return None


async def test_an_engine_lost_while_operator_and_orchestrator_are_down_is_shed_all_the_same(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=8) as cluster:
        await cluster.until(lambda: cluster.trainer.step >= 2, "step 2")
        cluster.kill()
        assert cluster.process is not None
        await cluster.process.wait()
        await cluster.engines[1].kill()
        await cluster.spawn()
        await cluster.until(lambda: answered(cluster), "the orchestrator to be back")
        status = await cluster.finish()
        assert (status.phase, status.step) == ("complete", 8)
        assert consumed(cluster) == dict.fromkeys(range(16), 1)


async def test_another_pod_at_the_address_of_a_lost_engine_is_none_of_the_group_until_the_operator_says_so(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path, steps=400) as cluster:
        await cluster.until(lambda: cluster.trainer.step >= 2, "step 2")
        lost = cluster.engines.pop()
        await lost.kill()
        heir = StandInEngine("engine-9", lost.host)
        await heir.start()

        async def is_lost() -> bool:
            return (await cluster.status()).members[2].state == "lost"

        await cluster.until(is_lost, "the engine to be lost")
        step, asked = cluster.trainer.step, len(heir.requests)
        await cluster.until(lambda: cluster.trainer.step >= step + 3, "the run to go on")
        assert (heir.epoch, heir.resolved, len(heir.requests)) == (None, None, asked)
        cluster.engines.append(heir)
        await cluster.tell()
        await cluster.until(lambda: len(heir.requests) > asked, "its first request")
        assert heir.commits
