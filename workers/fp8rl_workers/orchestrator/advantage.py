"""Group-relative advantages (GRPO, arXiv 2402.03300, equation for outcome supervision). Pure.

`A_i = r_i - mean(r)`, and with `normalize="std"` divided by the group's population standard deviation. A group whose
rewards are all equal carries no signal: its advantages are 0 and it is kept (its prompt is consumed, its tokens still
enter the loss's KL term); the share of such groups is exported. Resampling would bias the prompts to the middle ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

STD_FLOOR = 1e-6


def group_advantages(rewards: Sequence[float], normalize: Literal["mean", "std"]) -> list[float]:
    """Advantages of one group's samples, in their order.

    Raises:
        ValueError: a reward is not finite, or the group is empty.
    """
    if not rewards or not all(map(math.isfinite, rewards)):
        raise ValueError(f"a group's rewards must be finite and at least one: got {list(rewards)}")
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    if deviation < STD_FLOOR:
        return [0.0] * len(centred)
    return centred if normalize == "mean" else [value / deviation for value in centred]


def has_signal(advantages: Sequence[float]) -> bool:
    """Whether any sample of a group has an advantage."""
    return any(value != 0.0 for value in advantages)
