"""Groups of samples in flight: starts as many as pacing allows, hands out batches, counts what is dropped.

A group is `group_size` rollouts of one prompt. What is lost to age, lineage or an error gives its prompt back to the
cursor (at most MAX_TRIES times, then the prompt is given up); an episode that spans too many versions is not tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fp8rl_workers.errors import WorkerError
from fp8rl_workers.orchestrator.dataset import Cursor, ExampleAt
from fp8rl_workers.orchestrator.environments import Environment, Example, Trajectory
from fp8rl_workers.orchestrator.lineage import Lineage
from fp8rl_workers.orchestrator.policy import GroupHome, Policy, SampleClient
from fp8rl_workers.orchestrator.staleness import Candidate, DropReason, Pace, choose, hopeless, num_dispatchable

log = logging.getLogger(__name__)

MAX_TRIES = 3
MAX_ERRORS_IN_A_ROW = 12
LATE_SECONDS = 5.0
STOP_SECONDS = 2.0


class RolloutError(WorkerError):
    """Raised when rollouts fail again and again: the environment or the engines' configuration is broken."""

    reason = "RolloutsFail"


@dataclass
class Group:
    """Rollouts of one prompt. `started_step`: step of the version that was served when it started."""

    index: int
    position: int
    example: Example
    started_step: int
    task: asyncio.Task[None] | None = None
    trajectories: list[Trajectory] | None = None
    errors: list[BaseException] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutSettings:
    """What a run's rollouts look like; counts of groups and samples."""

    group_size: int
    groups_per_batch: int
    limit: int
    total_steps: int


@dataclass
class RolloutCounts:
    """Since the start (`dropped`, samples by reason) and since the last batch (the rest)."""

    dropped: Counter[str] = field(default_factory=Counter)
    dropped_recently: int = 0
    sampled_tokens: int = 0
    since: float = field(default_factory=time.monotonic)


class Rollouts:
    """The groups that are not consumed yet. `paused`, or fewer than `min_replicas` engines serve: nothing new is started."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        environment: Environment,
        policy: Policy,
        lineage: Lineage,
        example_at: ExampleAt,
        on_drop: Callable[[DropReason, int, int], None],
    ) -> None:
        self.settings = settings
        self.min_replicas = 1
        self.cursor = Cursor()
        self.counts = RolloutCounts()
        self.attempt = 0
        self.consumed_step = 0
        self.paused = True
        self._environment = environment
        self._policy = policy
        self._lineage = lineage
        self._example_at = example_at
        self._on_drop = on_drop
        self._groups: dict[int, Group] = {}
        self._next_index = 0
        self._tries: Counter[int] = Counter()
        self._errors_in_a_row = 0
        self._last_error = ""
        self._changed = asyncio.Event()
        self._weights_due = 0.0

    @property
    def num_running(self) -> int:
        """Samples in flight."""
        return self.settings.group_size * sum(item.trajectories is None for item in self._groups.values())

    @property
    def num_queued(self) -> int:
        """Finished samples that wait for a batch."""
        return self.settings.group_size * sum(item.trajectories is not None for item in self._groups.values())

    def reset(self, cursor: Cursor, attempt: int, step: int) -> None:
        """Start over from a trainer's checkpoint: what is in flight or queued belongs to an abandoned attempt."""
        for group in tuple(self._groups.values()):
            self._drop(group, "lineage")
        self.cursor, self.attempt, self.consumed_step = cursor, attempt, step
        self._tries.clear()

    def pump(self) -> None:
        """Start groups while pacing and the engines' capacity allow it."""
        newest = self._lineage.newest
        dispatcher = self._policy.dispatcher
        serving = sum(item.serving for item in dispatcher.replicas.values())
        if self.paused or newest is None or newest.attempt != self.attempt or serving < self.min_replicas:
            return
        pace = Pace(
            consumed_step=self.consumed_step,
            published_step=newest.step,
            outstanding=len(self._groups),
            groups_per_batch=self.settings.groups_per_batch,
            limit=self.settings.limit,
            total_steps=self.settings.total_steps,
            late=time.monotonic() >= self._weights_due,
        )
        for _ in range(num_dispatchable(pace)):
            if self.num_running >= max(dispatcher.capacity, self.settings.group_size):
                return
            self._start(newest.step)

    def expect_weights(self) -> None:
        """New weights are on their way: rollouts wait for them, but not for ones that are late."""
        self._weights_due = time.monotonic() + LATE_SECONDS
        asyncio.get_running_loop().call_later(LATE_SECONDS, self.wake)

    def cancel_hopeless(self) -> None:
        """Before a sync: give up running groups that would be too old for the next batch; finished ones are judged when taken."""
        candidates = [self._candidate(group) for group in self._groups.values() if group.trajectories is None]
        for index in hopeless(candidates, self.consumed_step + 1, self.settings.limit):
            self._drop(self._groups[index], "stale")
        self._changed.set()

    async def take(self, step: int) -> list[Group]:
        """The groups of the batch of `step`, waited for.

        Raises:
            RolloutError: rollouts fail again and again.
        """
        while True:
            groups = self._choose(step)
            if groups is not None:
                self.consumed_step = step
                self.pump()
                return groups
            if self._errors_in_a_row >= MAX_ERRORS_IN_A_ROW:
                raise RolloutError(f"{self._errors_in_a_row} groups in a row failed, the last one: {self._last_error}")
            self.pump()
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Cancel everything in flight; an environment that does not let itself be cancelled is left behind."""
        self.paused = True
        tasks = [group.task for group in self._groups.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)

    def wake(self) -> None:
        """Something changed outside: a version, a replica, a pause."""
        self.pump()
        self._changed.set()

    def _choose(self, step: int) -> list[Group] | None:
        for group in [item for item in self._groups.values() if self._foreign(item)]:
            self._drop(group, "lineage")
        candidates = [self._candidate(group) for group in self._groups.values()]
        choice = choose(candidates, step, self.settings.groups_per_batch, self.settings.limit)
        for index, reason in choice.drop.items():
            self._drop(self._groups[index], reason)
        if choice.batch is None:
            return None
        groups = [self._groups.pop(index) for index in choice.batch]
        for group in groups:
            self.cursor.consume(group.position)
        return groups

    def _foreign(self, group: Group) -> bool:
        versions = {version for item in group.trajectories or [] for version, _ in item.spans}
        return any(self._lineage.step_of(version, self.attempt) is None for version in versions)

    def _candidate(self, group: Group) -> Candidate:
        steps = [
            step
            for item in group.trajectories or []
            for version, _ in item.spans
            if (step := self._lineage.step_of(version, self.attempt)) is not None
        ]
        oldest, newest = min(steps, default=group.started_step), max(steps, default=group.started_step)
        if group.trajectories is not None and steps:
            newest = oldest + max(self._span_steps(item) for item in group.trajectories)
        return Candidate(group.index, oldest, newest, group.trajectories is not None)

    def _span_steps(self, trajectory: Trajectory) -> int:
        steps = [self._lineage.step_of(version, self.attempt) or 0 for version, _ in trajectory.spans]
        return max(steps, default=0) - min(steps, default=0)

    def _start(self, step: int) -> None:
        position = self.cursor.take()
        group = Group(self._next_index, position, self._example_at(position), step)
        self._next_index += 1
        self._groups[group.index] = group
        group.task = asyncio.create_task(self._play(group))

    async def _play(self, group: Group) -> None:
        size = self.settings.group_size
        home = GroupHome(size)
        clients = [SampleClient(self._policy, group.position, sample, home) for sample in range(size)]
        played = await asyncio.gather(
            *(self._environment.rollout(client, group.example) for client in clients), return_exceptions=True
        )
        group.errors = [item for item in played if isinstance(item, BaseException)]
        if group.index not in self._groups:
            return
        if group.errors:
            self._failed(group)
        else:
            group.trajectories = [item for item in played if isinstance(item, Trajectory)]
            self._errors_in_a_row = 0
            self.counts.sampled_tokens += sum(sum(item.loss_mask) for item in group.trajectories)
        self._changed.set()
        self.pump()

    def _failed(self, group: Group) -> None:
        error = group.errors[0]
        self._errors_in_a_row += 1
        self._last_error = f"{type(error).__name__}: {error}"
        log.warning("prompt %s: %s", group.example.id, self._last_error, exc_info=error)
        self._drop(group, "error")

    def _drop(self, group: Group, reason: DropReason) -> None:
        del self._groups[group.index]
        if group.task is not None and not group.task.done() and group.task is not asyncio.current_task():
            group.task.cancel()
        self._tries[group.position] += 1
        if reason == "tooLong" or self._tries[group.position] >= MAX_TRIES:
            self.cursor.consume(group.position)
        else:
            self.cursor.give_back(group.position)
        size = self.settings.group_size
        self.count_dropped(reason, size, max((sum(item.loss_mask) for item in group.trajectories or []), default=0))

    def count_dropped(self, reason: DropReason, samples: int, tokens: int = 0) -> None:
        """Count dropped samples; `tokens`: length of the longest episode among them."""
        self.counts.dropped[reason] += samples
        self.counts.dropped_recently += samples
        self._on_drop(reason, samples, tokens)
