"""Group-relative advantages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_workers.orchestrator.advantage import group_advantages, has_signal


def test_mean_advantages_are_the_reward_minus_the_groups_mean() -> None:
    assert group_advantages([0.0, 1.0, 1.0, 0.0], "mean") == [-0.5, 0.5, 0.5, -0.5]


def test_std_advantages_are_divided_by_the_groups_standard_deviation() -> None:
    assert group_advantages([0.0, 1.0, 1.0, 0.0], "std") == [-1.0, 1.0, 1.0, -1.0]
    assert group_advantages([1.0, 2.0, 3.0], "std") == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)])


@pytest.mark.parametrize("rewards", [[0.3], [0.7, 0.7, 0.7], [0.1 + 0.2, 0.3]])
def test_a_group_of_equal_rewards_has_no_signal_and_is_kept(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, "std")
    assert advantages == [0.0] * len(rewards)
    assert not has_signal(advantages)


@pytest.mark.parametrize("rewards", [[], [math.nan, 1.0], [math.inf]])
def test_rewards_that_are_not_finite_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(rewards, "mean")


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=32))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, "std")
    assert abs(sum(advantages)) < 1e-6
    if has_signal(advantages):
        best = rewards.index(max(rewards))
        assert advantages[best] == max(advantages)
