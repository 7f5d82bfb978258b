"""Held-out greedy evaluation: the same examples every time, temperature 0, one sample each."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence

from fp8rl_workers.errors import WorkerError
from fp8rl_workers.orchestrator.environments import Environment, Example, Trajectory
from fp8rl_workers.orchestrator.policy import GroupHome, Policy, SampleClient

log = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.1


class EvaluationError(WorkerError):
    """Raised when too many examples of an evaluation could not be played."""

    reason = "EvaluationFails"


def greedy(policy: Policy) -> Policy:
    """The same policy without randomness."""
    return dataclasses.replace(policy, options=dataclasses.replace(policy.options, temperature=0.0, top_p=1.0))


async def evaluate(environment: Environment, policy: Policy, examples: Sequence[Example]) -> dict[str, float]:
    """Mean reward over the examples that could be played, and the environment's own figures as `eval_<name>`.

    Raises:
        EvaluationError: more than a tenth of the examples failed: the mean of the others says little about the policy.
    """
    clients = [SampleClient(greedy(policy), -1 - index, 0, GroupHome(0)) for index in range(len(examples))]
    played = await asyncio.gather(
        *(environment.rollout(client, example) for client, example in zip(clients, examples, strict=True)),
        return_exceptions=True,
    )
    done = [item for item in played if isinstance(item, Trajectory)]
    failed = [item for item in played if isinstance(item, BaseException)]
    for error in failed:
        log.warning("evaluation: %s: %s", type(error).__name__, error)
    if len(failed) > MAX_FAILED_SHARE * len(examples):
        raise EvaluationError(
            f"{len(failed)} of {len(examples)} examples failed, over {MAX_FAILED_SHARE:.0%}; the first with {failed[0]!r}"
        )
    names = {name for item in done for name in item.metrics}
    figures = {
        f"eval_{name}": math.fsum(item.metrics.get(name, 0.0) for item in done) / len(done) for name in sorted(names)
    }
    reward = math.fsum(item.reward for item in done) / len(done)
    return figures | {"reward_heldout": reward, "eval_samples": float(len(done)), "eval_failed": float(len(failed))}
