"""Finished groups -> the trainer's samples and the step's figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl_workers.orchestrator.advantage import group_advantages, has_signal
from fp8rl_workers.orchestrator.environments import Trajectory
from fp8rl_workers.orchestrator.lineage import Lineage
from fp8rl_workers.orchestrator.rollouts import Group
from fp8rl_workers.orchestrator.staleness import age
from fp8rl_workers.protocol import Sample


@dataclass(frozen=True)
class Batch:
    """A step's samples with the trajectories that they come from, in the same order."""

    step: int
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    metrics: dict[str, float]


def build_batch(
    step: int, groups: Sequence[Group], lineage: Lineage, attempt: int, normalize: Literal["mean", "std"]
) -> Batch:
    """Samples with their advantages and ages at `step`, and `metrics.ORCHESTRATOR_METRICS` of the batch.

    Raises:
        ValueError: a reward is not finite.
    """
    samples: list[Sample] = []
    rewards: list[float] = []
    flat = 0
    for group in groups:
        trajectories = group.trajectories or []
        advantages = group_advantages([item.reward for item in trajectories], normalize)
        flat += not has_signal(advantages)
        rewards += [item.reward for item in trajectories]
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            oldest = min(lineage.step_of(version, attempt) or 0 for version, _ in trajectory.spans)
            samples.append(to_sample(trajectory, advantage, age(step, oldest)))
    metrics = batch_metrics(samples, rewards) | {"zero_variance_ratio": flat / max(len(groups), 1)}
    return Batch(step, tuple(groups), tuple(samples), tuple(rewards), metrics)


def to_sample(trajectory: Trajectory, advantage: float, steps_old: int) -> Sample:
    """One trajectory as the trainer gets it."""
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        advantage=advantage,
        version_min=trajectory.version_min,
        version_max=trajectory.version_max,
        age=steps_old,
    )


def batch_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
    """Figures of a batch, keys of `metrics.ORCHESTRATOR_METRICS`."""
    mean = math.fsum(rewards) / len(rewards)
    return {
        "reward": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "spanning_ratio": sum(item.version_min != item.version_max for item in samples) / len(samples),
        "completion_tokens": sum(sum(item.loss_mask) for item in samples) / len(samples),
    } | age_metrics(samples)


def age_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The part of `batch_metrics` that the posted samples alone tell: of a batch whose rollouts died with an orchestrator."""
    ages = [sample.age for sample in samples]
    return {"off_policy_mean": sum(ages) / len(ages), "off_policy_max": float(max(ages))}


def dump_lines(batch: Batch, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Lines of `rollouts.jsonl`: text, reward, advantage, versions, age and mask of each sample."""
    trajectories = [item for group in batch.groups for item in group.trajectories or []]
    places = [(group, number) for group in batch.groups for number in range(len(group.trajectories or []))]
    return [
        {
            "step": batch.step,
            "position": group.position,
            "id": group.example.id,
            "sample": number,
            "prompt": group.example.prompt,
            "text": decode([token for token, mask in zip(item.tokens, item.loss_mask, strict=True) if mask]),
            "answer": group.example.answer,
            "reward": trajectory.reward,
            "advantage": item.advantage,
            "versions": trajectory.spans,
            "age": item.age,
            "mask": item.loss_mask,
            "metrics": trajectory.metrics,
        }
        for (group, number), trajectory, item in zip(places, trajectories, batch.samples, strict=True)
    ]
