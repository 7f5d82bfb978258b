"""Losses against values worked out by hand, and their gradients against autograd's definition."""

import math

import pytest
import torch

from fp8rl_workers.config import LossConfig
from fp8rl_workers.trainer.loss import (
    dppo_loss,
    grpo_loss,
    ipo_loss,
    mismatch_metrics,
    policy_loss,
    reference_kl,
)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_ipo_masks_by_the_difference_of_probabilities_and_charges_the_square_of_r_to_all_tokens() -> None:
    trainer, engine = logs(0.5, 0.5, 0.2), logs(0.45, 0.35, 0.25)
    advantages = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    tokens = ipo_loss(trainer, engine, advantages, LossConfig(ipo_threshold=0.1, adv_tau=0.5, kl_tau=0.01))
    r = [math.log(0.5 / 0.45), math.log(0.5 / 0.35), math.log(0.2 / 0.25)]
    expected = [-0.5 * 0.5 / 0.45 + 0.01 * r[0] ** 2, 0.01 * r[1] ** 2, 0.5 * 2 * 0.2 / 0.25 + 0.01 * r[2] ** 2]
    assert tokens.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert tokens.masked.tolist() == [False, True, False]


def test_dppo_masks_only_what_has_gone_further_than_the_advantage_asks_for() -> None:
    trainer, engine = logs(0.8, 0.8, 0.3, 0.3, 0.8, 0.3), logs(0.5, 0.5, 0.6, 0.6, 0.5, 0.6)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    tokens = dppo_loss(trainer, engine, advantages, LossConfig(dppo_mask_low=0.2, dppo_mask_high=0.2))
    assert tokens.masked.tolist() == [True, False, False, True, False, True]


def test_grpo_clips_the_ratio_to_the_engine_on_the_side_that_the_advantage_asks_for() -> None:
    config = LossConfig(name="grpo", grpo_clip_low=0.2, grpo_clip_high=0.3, tis_cap=2.0)
    trainer, engine = logs(0.5, 0.5, 0.3, 0.3, 0.33), logs(0.25, 0.4, 0.6, 0.6, 0.3)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -2.0], dtype=torch.float64)
    trainer.requires_grad_()
    tokens = grpo_loss(trainer, engine, advantages, config)
    assert tokens.loss.tolist() == pytest.approx([-1.3, -1.25, 0.8, -0.5, 2.2], abs=1e-12)
    assert tokens.masked.tolist() == [True, False, True, False, False]
    tokens.loss.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == pytest.approx([0.0, -1.25, 0.0, -0.5, 2.2], abs=1e-12)


def test_grpo_truncates_the_importance_weight_where_it_is_not_clipped() -> None:
    config = LossConfig(name="grpo", grpo_clip_high=9.0, tis_cap=2.0)
    trainer, engine = logs(0.5, 0.5, 0.5).requires_grad_(), logs(0.125, 0.125, 0.4)
    tokens = grpo_loss(trainer, engine, torch.tensor([1.0, -3.0, 1.0], dtype=torch.float64), config)
    assert tokens.loss.tolist() == pytest.approx([-2.0, 6.0, -1.25], abs=1e-12)
    assert tokens.masked.tolist() == [False, False, False]
    assert tokens.truncated.tolist() == [True, True, False]
    tokens.loss.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == pytest.approx([-2.0, 6.0, -1.25], abs=1e-12)


@pytest.mark.parametrize("name", ["ipo", "dppo", "grpo"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    config = LossConfig(name=name, ipo_threshold=1.0, kl_tau=0.1)
    engine = logs(0.3, 0.6, 0.2)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    trainer = logs(0.35, 0.5, 0.25).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda lp: policy_loss(lp, engine, advantages, config).loss, (trainer,), eps=1e-7, atol=1e-6
    )


def test_a_hopeless_log_ratio_stays_finite() -> None:
    tokens = ipo_loss(torch.tensor([-1.0]), torch.tensor([-500.0]), torch.tensor([1.0]), LossConfig(ipo_threshold=2.0))
    assert torch.isfinite(tokens.loss).all()


def test_kl_to_the_reference_is_zero_for_equal_policies_and_k3_otherwise() -> None:
    kl = reference_kl(logs(0.5, 0.5), logs(0.5, 0.25))
    assert kl.tolist() == pytest.approx([0.0, 0.5 - math.log(0.5) - 1])


def test_mismatch_metrics_have_their_published_values() -> None:
    trainer, engine = logs(0.5, 0.5, 0.9), logs(0.5, 0.25, 0.1)
    metrics = mismatch_metrics(trainer, engine)
    ratios = [1.0, 2.0, 9.0]
    kls = [q - math.log(q) - 1 for q in ratios]
    assert metrics["mismatch_kl"] == pytest.approx(sum(kls) / 3)
    assert metrics["mismatch_kl_max"] == pytest.approx(kls[2])
    assert metrics["logprob_diff_p50"] == pytest.approx(math.log(2))
    assert metrics["logprob_diff_p90"] == pytest.approx(math.log(2) + 0.8 * (math.log(9) - math.log(2)))
    assert metrics["logprob_diff_over_one"] == 1.0
    assert metrics["importance_ratio"] == pytest.approx(4.0)
    assert metrics["ratio_deviation"] == pytest.approx(3.0)
    assert metrics["token_mult_prob_error"] == pytest.approx(4.0)
