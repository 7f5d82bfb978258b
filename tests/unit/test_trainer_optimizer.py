"""Schedules, the two optimizers and clipping, by exact values."""

import math

import pytest
import torch

from fp8rl_workers.config import OptimizerConfig
from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.trainer.optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
    ],
)
def test_learning_rates_of_six_steps_with_two_of_warm_up(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    assert [learning_rate(step, 6, config) for step in range(1, 7)] == pytest.approx(expected)


def test_signsgd_steps_by_the_learning_rate_and_decays_matrices_only() -> None:
    masters = {"matrix": torch.ones(2, 2), "vector": torch.ones(2)}
    optimizer = make_optimizer(masters, OptimizerConfig(name="signsgd", learning_rate=0.1, weight_decay=0.5))
    masters["matrix"].grad = torch.tensor([[3.0, -3.0], [0.0, 1.0]])
    masters["vector"].grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    assert torch.allclose(masters["matrix"], torch.tensor([[0.85, 1.05], [0.95, 0.85]]))
    assert torch.allclose(masters["vector"], torch.tensor([0.9, 1.1]))


def test_the_first_step_of_adamw_is_the_learning_rate_times_the_sign() -> None:
    masters = {"matrix": torch.zeros(1, 2)}
    optimizer = make_optimizer(masters, OptimizerConfig(learning_rate=0.1))
    masters["matrix"].grad = torch.tensor([[2.0, -0.5]])
    optimizer.step()
    assert torch.allclose(masters["matrix"], torch.tensor([[-0.1, 0.1]]), atol=1e-6)


def test_clipping_scales_to_the_limit_and_none_clips_nothing() -> None:
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    norm = gradient_norm(gradients)
    assert norm == 5.0
    clip_gradients(gradients, norm, None)
    assert gradients["a"].item() == 3.0
    clip_gradients(gradients, norm, 1.0)
    assert gradient_norm(gradients) == pytest.approx(1.0)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    with pytest.raises(NonFiniteError, match="the gradient of b is not finite"):
        gradient_norm({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
