"""The first weights of an attempt, beside stand-ins: engines that boot later than others are waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from orchestrator_peers import Cluster


@pytest.mark.parametrize("delay", [0.3, 2.5])
async def test_a_new_attempt_waits_for_the_slower_engine_before_it_forms_the_group(
    tmp_path: Path, delay: float
) -> None:
    async with Cluster(tmp_path, steps=40) as cluster:
        await cluster.until(lambda: cluster.trainer.step >= 2, "step 2")
        cluster.kill()
        for engine in cluster.engines:
            await engine.kill()
        await cluster.trainer.restart()
        await cluster.relaunch()
        before = len(cluster.events("EpochFormed"))
        await cluster.engines[0].start()
        await asyncio.sleep(delay)
        await cluster.engines[1].start()
        await cluster.until(lambda: cluster.trainer.step >= 5, "steps of the new attempt")
        formed = [item["message"].partition(": ")[2] for item in cluster.events("EpochFormed")[before:]]
        assert formed == ["world of 3"]
        assert cluster.events("EpochFailed") == []
