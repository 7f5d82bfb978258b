"""Policy losses and mismatch metrics: pure functions of per-token tensors, all of shape [tokens], fp32.

r = trainer - inference log-probability of the sampled token, clamped to ±20; ratio = e^r; p = probability; A = advantage of
the token's sequence. A loss is a sum over tokens; the caller divides by the number of loss tokens of the whole batch, so
micro-batches add up. A kept token costs `-adv_tau * A * ratio`, every token `kl_tau * r^2` (arXiv 2602.02276).

    ipo    keeps |p_trainer - p_inference| <= ipo_threshold
    dppo   drops A > 0 and p_trainer - p_inference > dppo_mask_high, A <= 0 and p_trainer - p_inference < -dppo_mask_low
           (arXiv 2602.04879)
    grpo   -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A): a token that has gone further than the advantage
           asks for has no gradient. The batch is stepped on once, so the ratio is against the engine, which sampled it.
           Where it is not clipped the ratio is truncated (TIS): value and gradient have the weight min(ratio, tis_cap)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl_workers.config import LossConfig

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token (with gradient), whether the loss masked it, and whether its importance weight was truncated."""

    loss: Tensor
    masked: Tensor
    truncated: Tensor


def log_ratio(logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """Log ratio r = trainer - inference, clamped to ±20 so that its exponential stays finite."""
    return (logprobs - inference_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def masked_loss(
    keep: Tensor, logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, config: LossConfig
) -> TokenLoss:
    """The common half of ipo and dppo: the kept tokens' ratio-weighted advantage, and kl_tau * r^2 of all tokens."""
    r = log_ratio(logprobs, inference_logprobs)
    policy = -(keep * config.adv_tau * advantages * r.exp())
    truncated = r.detach().exp() > config.tis_cap
    return TokenLoss(policy + config.kl_tau * r.square(), ~keep, truncated)


def ipo_loss(logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """Symmetric mask on the difference of probabilities."""
    difference = logprobs.detach().exp() - inference_logprobs.exp()
    return masked_loss(difference.abs() <= config.ipo_threshold, logprobs, inference_logprobs, advantages, config)


def dppo_loss(logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """Mask on the difference of probabilities, only where it has gone further than the advantage asks for."""
    difference = logprobs.detach().exp() - inference_logprobs.exp()
    too_high = (advantages > 0) & (difference > config.dppo_mask_high)
    too_low = (advantages <= 0) & (difference < -config.dppo_mask_low)
    return masked_loss(~(too_high | too_low), logprobs, inference_logprobs, advantages, config)


def grpo_loss(logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """Clipped surrogate against the policy that sampled, with truncated importance weights where it is not clipped."""
    ratio = log_ratio(logprobs, inference_logprobs).exp()
    clipped = ratio.detach().clamp(1 - config.grpo_clip_low, 1 + config.grpo_clip_high)
    masked = clipped * advantages < ratio.detach() * advantages
    truncated = ratio.detach() > config.tis_cap
    weight = ratio * (config.tis_cap / ratio.detach()).clamp(max=1.0)
    return TokenLoss(-torch.where(masked, clipped, weight) * advantages, masked, truncated)


def policy_loss(logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """The loss that `config.name` says."""
    losses = {"ipo": ipo_loss, "dppo": dppo_loss, "grpo": grpo_loss}
    return losses[config.name](logprobs, inference_logprobs, advantages, config)


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(trainer || reference) of each token: e^d - d - 1, d = reference - trainer log-probability."""
    d = log_ratio(reference_logprobs, logprobs)
    return d.exp() - d - 1


def mismatch_metrics(logprobs: Tensor, inference_logprobs: Tensor) -> dict[str, float]:
    """How far trainer and engines are apart over a batch's loss tokens; keys of `metrics.TRAINER_METRICS`.

    `mismatch_kl` is the k3 estimate e^r - r - 1; percentiles are of |r|, not clamped.
    """
    difference = (logprobs - inference_logprobs).detach().double()
    r = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    kl = r.exp() - r - 1
    size = difference.abs()
    p50, p90, p99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)).tolist()
    ratio = r.exp().mean().item()
    return {
        "mismatch_kl": kl.mean().item(),
        "mismatch_kl_max": kl.max().item(),
        "logprob_diff_p50": p50,
        "logprob_diff_p90": p90,
        "logprob_diff_p99": p99,
        "logprob_diff_over_one": float((size > 1).sum().item()),
        "importance_ratio": ratio,
        "ratio_deviation": abs(ratio - 1),
        "token_mult_prob_error": r.abs().exp().mean().item(),
    }
