"""Groups in flight: what is started, handed out, dropped and tried again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from fp8rl_workers.orchestrator.batch import build_batch, dump_lines
from fp8rl_workers.orchestrator.dataset import Cursor
from fp8rl_workers.orchestrator.dispatch import Dispatcher
from fp8rl_workers.orchestrator.environments import Example, Segment, Trajectory, given
from fp8rl_workers.orchestrator.lineage import Lineage, Published
from fp8rl_workers.orchestrator.policy import Policy
from fp8rl_workers.orchestrator.rollouts import RolloutError, Rollouts, RolloutSettings
from fp8rl_workers.orchestrator.sampling import SamplingOptions


class Scripted:
    """An environment that plays each example when told: `versions` and `errors` by the example's id."""

    def __init__(self) -> None:
        self.versions: dict[str, list[tuple[int, int]]] = {}
        self.errors: dict[str, Exception] = {}
        self.held: set[str] = set()
        self.played: Counter[str] = Counter()
        self.go_on = asyncio.Event()

    async def rollout(self, client: Any, example: Example) -> Trajectory:
        self.played[example.id] += 1
        await asyncio.sleep(0)
        if example.id in self.held:
            await self.go_on.wait()
        if example.id in self.errors:
            raise self.errors[example.id]
        spans = self.versions.get(example.id, [(1, 2)])
        length = sum(count for _, count in spans)
        tokens = Segment((5,) * length, sampled=True, logprobs=(-0.5,) * length, spans=tuple(spans))
        return Trajectory((given([1, 2]), tokens), reward=float(client.sample))


class World:
    """Rollouts over one replica; groups of 2, 2 groups a batch, at most 2 steps old."""

    def __init__(self, environment: Scripted, lineage: Lineage, capacity: int = 64) -> None:
        self.dispatcher = Dispatcher(capacity)
        self.lineage = lineage
        self.drops: list[tuple[str, int, int]] = []
        policy = Policy(self.dispatcher, None, SamplingOptions(1.0, 1.0, 8), "job", 0, 64)  # type: ignore[arg-type]
        self.rollouts = Rollouts(
            RolloutSettings(group_size=2, groups_per_batch=2, limit=2, total_steps=10),
            environment=environment,  # type: ignore[arg-type]
            policy=policy,
            lineage=lineage,
            example_at=lambda position: Example(id=str(position), prompt="p"),
            on_drop=lambda reason, samples, tokens: self.drops.append((reason, samples, tokens)),
        )

    async def start(self, step: int = 0) -> Rollouts:
        self.dispatcher.add("a", "a", None)  # type: ignore[arg-type]
        await self.dispatcher.serve("a", 1)
        self.rollouts.reset(Cursor(), 0, step)
        self.rollouts.paused = False
        return self.rollouts


def versions(*steps: int) -> Lineage:
    """Versions 1, 2, ... of these steps."""
    return Lineage.of(Published(version=number, attempt=0, step=step) for number, step in enumerate(steps, 1))


async def test_a_batch_holds_whole_groups_in_order_and_their_prompts_are_consumed() -> None:
    environment = Scripted()
    rollouts = await World(environment, versions(0)).start()
    groups = await rollouts.take(1)
    assert [group.position for group in groups] == [0, 1]
    assert 0 not in rollouts.cursor.to_json()["again"]
    assert environment.played["0"] == 2
    await rollouts.stop()


async def test_no_more_is_started_than_pacing_and_the_engines_take() -> None:
    environment = Scripted()
    environment.held = {str(number) for number in range(20)}
    rollouts = await World(environment, versions(0)).start()
    rollouts.pump()
    assert rollouts.num_running == 8  # 2 batches of 2 groups of 2
    small = await World(environment, versions(0), capacity=4).start()
    small.pump()
    assert small.num_running == 4
    await rollouts.stop()
    await small.stop()


async def test_nothing_is_started_below_min_replicas_or_for_another_attempts_weights() -> None:
    world = World(Scripted(), versions(0))
    rollouts = await world.start()
    world.dispatcher.fence("a", "lost")
    rollouts.pump()
    assert rollouts.num_running == 0
    await world.dispatcher.serve("a", 1)
    rollouts.attempt = 1
    rollouts.pump()
    assert rollouts.num_running == 0


async def test_a_failed_group_is_tried_again_and_given_up_after_three_times() -> None:
    environment = Scripted()
    environment.errors["0"] = ValueError("broken example")
    world = World(environment, versions(0))
    rollouts = await world.start()
    groups = await rollouts.take(1)
    assert [group.position for group in groups] == [1, 2]
    await asyncio.sleep(0.01)
    assert environment.played["0"] == 6
    assert world.drops == [("error", 2, 0)] * 3
    await rollouts.stop()


async def test_rollouts_that_always_fail_end_the_job_with_the_reason() -> None:
    environment = Scripted()
    environment.errors = {str(number): ValueError("no such tool") for number in range(100)}
    rollouts = await World(environment, versions(0)).start()
    with pytest.raises(RolloutError, match="no such tool"):
        await rollouts.take(1)
    await rollouts.stop()


async def test_an_episode_that_spans_too_many_versions_is_dropped_for_good_and_counted_by_its_length() -> None:
    environment = Scripted()
    environment.versions = {"0": [(1, 3), (4, 4)], "1": [(2, 1), (4, 1)], "2": [(4, 2)]}
    environment.held = {str(number) for number in range(3, 20)}
    world = World(environment, versions(0, 1, 2, 3))
    rollouts = await world.start(step=2)
    groups = await rollouts.take(3)
    assert [group.position for group in groups] == [1, 2]
    assert world.drops == [("tooLong", 2, 7)]
    assert 0 not in rollouts.cursor.to_json()["again"]
    await rollouts.stop()


async def test_a_group_that_is_too_old_is_dropped_and_its_prompt_sent_again() -> None:
    environment = Scripted()
    environment.versions = {"0": [(1, 2)], "1": [(4, 2)], "2": [(4, 2)]}
    environment.held = {str(number) for number in range(3, 20)}
    world = World(environment, versions(0, 1, 2, 3))
    rollouts = await world.start(step=3)
    groups = await rollouts.take(4)
    assert [group.position for group in groups] == [1, 2]
    assert world.drops[0] == ("stale", 2, 2)
    await rollouts.stop()


async def test_before_a_sync_running_groups_that_are_too_old_are_cancelled() -> None:
    environment = Scripted()
    environment.held = {"0"}
    world = World(environment, versions(0))
    rollouts = await world.start()
    await rollouts.take(1)
    rollouts.consumed_step = 3
    rollouts.cancel_hopeless()
    assert ("stale", 2, 0) in world.drops
    assert 0 in rollouts.cursor.to_json()["again"]
    await rollouts.stop()


async def test_everything_of_an_abandoned_attempt_is_dropped_as_lineage() -> None:
    environment = Scripted()
    environment.held = {"0"}
    world = World(environment, versions(0))
    rollouts = await world.start()
    rollouts.pump()
    await asyncio.sleep(0.01)
    rollouts.reset(Cursor(), 1, 0)
    assert [reason for reason, _, _ in world.drops] == ["lineage"] * 4
    assert rollouts.num_running == rollouts.num_queued == 0


async def test_a_batch_carries_advantages_ages_versions_and_its_figures() -> None:
    environment = Scripted()
    environment.versions = {"0": [(1, 1), (2, 1)], "1": [(2, 2)]}
    environment.held = {"2", "3"}
    world = World(environment, versions(0, 1))
    rollouts = await world.start(step=1)
    batch = build_batch(2, await rollouts.take(2), world.lineage, 0, "std")
    first, second, third, _ = batch.samples
    assert (first.advantage, second.advantage) == (-1.0, 1.0)
    assert (first.age, first.version_min, first.version_max) == (1, 1, 2)
    assert (third.age, third.version_min) == (0, 2)
    assert first.tokens == [1, 2, 5, 5]
    assert first.loss_mask == [0, 0, 1, 1]
    assert first.logprobs == [0.0, 0.0, -0.5, -0.5]
    assert batch.metrics == {
        "reward": 0.5,
        "reward_std": 0.5,
        "off_policy_mean": 0.5,
        "off_policy_max": 1.0,
        "spanning_ratio": 0.5,
        "completion_tokens": 2.0,
        "zero_variance_ratio": 0.0,
    }
    line = dump_lines(batch, lambda tokens: f"{len(tokens)} tokens")[0]
    assert (line["position"], line["text"], line["versions"], line["age"]) == (0, "2 tokens", [(1, 1), (2, 1)], 1)
    await rollouts.stop()
