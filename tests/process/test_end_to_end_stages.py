"""Kills at an exact stage of a sync: two real engines, a real trainer, the orchestrator's own parts in the test."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from stage_kit import BOOT_SECONDS, TIMEOUT_SECONDS, OrchestratorDiedError, Stage

pytestmark = pytest.mark.vllm

MODEST = TIMEOUT_SECONDS + 12.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("stage"))
    try:
        stage.start_trainer()
        for engine in stage.engines:
            engine.start()
        yield stage
    finally:
        stage.stop()


def send(engine, number: signal.Signals) -> None:
    os.killpg(engine.process.pid, number)


def spans(engine) -> list[list[int]]:
    """Which version an engine samples with now."""
    return engine.generate([1, 2, 3], max_tokens=4)["kv_transfer_params"]["fp8rl"]["spans"]


async def test_the_first_weights_reach_both_engines(stage):
    async with stage.orchestrator() as orchestrator:
        assert await orchestrator.attach() == []
        await orchestrator.settle(2, BOOT_SECONDS)
        newest = orchestrator.newest
        assert (newest.version, newest.attempt, newest.step) == (1, 0, 0)
        assert stage.served() == [(1, newest.digest)] * 2


async def test_a_sync_that_fails_on_one_engine_leaves_the_old_version_serving_on_both(stage):
    first, second = stage.engines
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old = orchestrator.newest
        await orchestrator.step()
        seen = []

        def look() -> None:
            send(second, signal.SIGCONT)
            seen.extend([*stage.served(), spans(first), spans(second)])

        orchestrator.strike("_begin", lambda: send(second, signal.SIGSTOP), after=True)
        orchestrator.strike("_finish", look, after=False)
        await orchestrator.settle(2, TIMEOUT_SECONDS + 2 * MODEST)
        assert seen == [(old.version, old.digest)] * 2 + [[[old.version, 4]]] * 2
        assert orchestrator.newest.version >= old.version + 2  # the failed number is used up
        assert stage.served() == [(orchestrator.newest.version, orchestrator.newest.digest)] * 2
        assert orchestrator.newest.digest != old.digest


async def test_an_orchestrator_that_dies_after_the_first_of_two_commits_is_followed_by_one_that_rolls_forward(stage):
    first, second = stage.engines
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old = orchestrator.newest
        await orchestrator.step()
        orchestrator.die_after_first_commit(first.uid)
        with pytest.raises(OrchestratorDiedError):
            await orchestrator.parts.group.settle()
    (new, digest), behind = stage.served()
    assert (new, behind) == (old.version + 1, (old.version, old.digest))
    assert second.state()["prepared_version"] == new
    async with stage.orchestrator() as orchestrator:
        assert await orchestrator.attach() == [f"version {new} rolled forward"]
        assert stage.served() == [(new, digest)] * 2
        await orchestrator.settle(2, MODEST)
        assert (orchestrator.newest.version, orchestrator.newest.digest) == (new, digest)
        assert [spans(engine) for engine in stage.engines] == [[[new, 4]]] * 2


async def test_an_orchestrator_that_dies_before_the_decision_is_on_disk_is_followed_by_one_that_aborts(stage):
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old = orchestrator.newest
        await orchestrator.step()

        def die() -> None:
            raise OrchestratorDiedError

        orchestrator.strike("_decide", die, after=False)
        with pytest.raises(OrchestratorDiedError):
            await orchestrator.parts.group.settle()
    assert [engine.state()["prepared_version"] for engine in stage.engines] == [old.version + 1] * 2
    async with stage.orchestrator() as orchestrator:
        assert await orchestrator.attach() == [f"version {old.version + 1} aborted"]
        assert stage.served() == [(old.version, old.digest)] * 2
        assert [engine.state()["prepared_version"] for engine in stage.engines] == [None] * 2
        await orchestrator.settle(2, MODEST)
        assert orchestrator.newest.version == old.version + 2
        assert stage.served() == [(old.version + 2, orchestrator.newest.digest)] * 2


async def test_a_trainer_killed_during_the_prepare_leaves_the_old_version_serving_until_its_next_attempt(stage):
    first, second = stage.engines
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old = orchestrator.newest
        step = await orchestrator.step()
        begun = asyncio.Event()

        def begin() -> None:
            send(second, signal.SIGSTOP)
            begun.set()

        orchestrator.strike("_begin", begin, after=True)
        settling = asyncio.create_task(orchestrator.parts.group.settle())
        await begun.wait()
        await asyncio.sleep(0.5)  # the offer is out, the first engine has received, the second one cannot
        assert not settling.done()
        stage.trainer.kill()
        send(second, signal.SIGCONT)
        assert not await asyncio.wait_for(settling, MODEST)
        assert [spans(engine) for engine in (first, second)] == [[[old.version, 4]]] * 2
        assert [engine.call("GET", "/fp8rl/v1/ready")[0] for engine in (first, second)] == [200, 200]
        assert stage.served() == [(old.version, old.digest)] * 2
    stage.next_attempt()
    async with stage.orchestrator() as orchestrator:
        assert await orchestrator.attach() == []
        await orchestrator.settle(2, 60.0)
        newest = orchestrator.newest
        assert (newest.attempt, newest.step) == (1, step)
        assert newest.version >= old.version + 2
        assert stage.served() == [(newest.version, newest.digest)] * 2


async def test_an_engine_killed_during_the_prepare_costs_the_sync_a_member_and_comes_back(stage):
    first, second = stage.engines
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old, step = orchestrator.newest, await orchestrator.step()
        orchestrator.strike("_begin", lambda: send(second, signal.SIGKILL), after=True)
        await orchestrator.settle(1, TIMEOUT_SECONDS + MODEST)
        assert orchestrator.newest.step == step
        assert orchestrator.newest.version > old.version
        assert spans(first) == [[orchestrator.newest.version, 4]]
        second.process.wait()
        second.start()
        await orchestrator.settle(2, BOOT_SECONDS)
        assert orchestrator.newest.step == step
        assert stage.served() == [(orchestrator.newest.version, orchestrator.newest.digest)] * 2


async def test_an_engine_killed_between_prepare_and_commit_is_fenced_and_the_other_serves_the_decided_version(stage):
    first, second = stage.engines
    async with stage.orchestrator() as orchestrator:
        await orchestrator.attach()
        await orchestrator.settle(2, MODEST)
        old, step = orchestrator.newest, await orchestrator.step()
        orchestrator.strike("_decide", lambda: send(second, signal.SIGKILL), after=True)
        await orchestrator.settle(1, TIMEOUT_SECONDS + MODEST)
        decided = old.version + 1
        newest = orchestrator.newest
        assert (newest.version, newest.step) == (decided, step)
        assert spans(first) == [[decided, 4]]
        assert not orchestrator.parts.dispatcher.replicas[second.uid].serving
        await orchestrator.step()
        await orchestrator.settle(1, TIMEOUT_SECONDS + MODEST)
        assert spans(first) == [[orchestrator.newest.version, 4]]
        assert orchestrator.newest.version > decided
