"""Optimizers over fp32 master weights: `adamw` and `signsgd`, learning-rate schedules, gradient clipping.

The model's parameters are what it computes with (BF16, or the dequantized codes of the BF16 weight); the masters are fp32 and
live here. A gradient of a parameter is taken as the gradient of its master (straight-through), in fp32 whatever the
parameter's dtype.
Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8rl_workers.config import OptimizerConfig
from fp8rl_workers.errors import NonFiniteError


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of `step` (1-based): linear warm-up, then constant, or linearly or by a cosine to 0 one step after the last."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps - 1) / max(1, total_steps - config.warmup_steps))
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * share


class SignSGD(torch.optim.Optimizer):
    """w <- w - lr * (sign(momentum) + decay * w), momentum <- beta * momentum + (1 - beta) * gradient."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - the base class's signature
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["beta"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(momentum.sign(), alpha=-group["lr"])


def make_optimizer(masters: Mapping[str, Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.name` says, over fp32 masters by name."""
    matrices = [master for master in masters.values() if master.dim() > 1]
    vectors = [master for master in masters.values() if master.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, foreach=True)
    return SignSGD(groups, config.learning_rate, config.betas[0], config.weight_decay)


def gradient_norm(gradients: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all gradients.

    Raises:
        NonFiniteError: names the first gradient that is NaN or infinite.
    """
    norms = torch._foreach_norm(list(gradients.values()))  # noqa: SLF001 - torch's own clip_grad_norm_ calls it too
    total = float(torch.linalg.vector_norm(torch.stack(norms)))
    if not math.isfinite(total):
        odd = next(name for name, norm in zip(gradients, norms, strict=True) if not torch.isfinite(norm))
        raise NonFiniteError(
            f"the gradient of {odd} is not finite; the step is not taken. Lower trainer.optimizer.learningRate or set gradClip"
        )
    return total


def clip_gradients(gradients: Mapping[str, Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients in place so that their norm is at most `limit`; None clips nothing."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / norm)
