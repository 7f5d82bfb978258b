"""One step: samples to micro-batches, forward and backward, clip, optimizer, new parameters. Nothing else.

Weights change only in `TorchTrainer.apply`, under `weights_lock`; who casts them for a sync holds that lock while it does, so
a sync may run while the forward and backward of the next step do. All sums are over the whole batch and divided by its number
of loss tokens, so neither padding nor the cut into micro-batches changes loss or metrics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl_workers.config import TrainerConfig
from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.protocol import ResolvedPrecision, Sample
from fp8rl_workers.trainer.batch import MicroBatch, check_samples, pack
from fp8rl_workers.trainer.loss import mismatch_metrics, policy_loss, reference_kl
from fp8rl_workers.trainer.memory import estimate, is_out_of_memory, out_of_memory, peak_memory_bytes
from fp8rl_workers.trainer.model import Policy, token_logprobs
from fp8rl_workers.trainer.optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer
from fp8rl_workers.weights.cast import Rounding

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GB200": 2.5e15, "B200": 2.25e15, "A100": 312e12}


@dataclass
class BatchTotals:
    """What the micro-batches of one step add up to; tensors are per loss token, fp32 on the CPU."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    inference_logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    masked: int = 0
    truncated: int = 0

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's gradients."""
        for name, gradient in gradients.items():
            if name in self.gradients:
                self.gradients[name].add_(gradient)
            else:
                self.gradients[name] = gradient


class TorchTrainer:
    """The trainer's backend for one process. `step`: the last finished one; `expected`: the memory that a step should need."""

    def __init__(
        self,
        module: nn.Module,
        reference: nn.Module | None,
        model: Mapping[str, Any],
        config: TrainerConfig,
        resolved: ResolvedPrecision,
    ) -> None:
        """Take over an fp32 module and, for `loss.kl_to_reference`, a frozen one to stay close to."""
        torch.manual_seed(config.seed)
        self.config = config
        self.step = 0
        self.weights_lock = threading.Lock()
        self.policy = Policy(module, model, config, resolved)
        self.policy.refresh(0)
        self._reference = reference
        self._vocabulary = int(model["vocab_size"])
        self._masters = {name: m for name, m in self.policy.masters.items() if name not in self.policy.frozen}
        self._optimizer = make_optimizer(self._masters, config.optimizer)
        parameters, trained = (sum(m.numel() for m in group.values()) for group in (self.policy.masters, self._masters))
        self.expected = estimate(parameters, trained, model, config)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and BF16 weight of each tensor, in the order in which they travel. Hold `weights_lock`."""
        return self.policy.weights()

    def sources(self) -> Iterator[tuple[str, Tensor]]:
        """The same tensors as they are held, for the casts of a sync (`publish.WeightSource`). Hold `weights_lock`."""
        return self.policy.held()

    def rounding(self) -> Rounding | None:
        """Key of stochastic rounding of the weights as they are."""
        return self.policy.rounding(self.step)

    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse a batch before anything is computed; see `batch.check_samples`."""
        check_samples(samples, self.config.tokens_per_micro_batch, self._vocabulary)

    def train(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step; keys of the result are those of `metrics.TRAINER_METRICS`.

        Raises:
            InvalidInputError: a sample cannot be used; nothing has changed.
            NonFiniteError: loss, gradient or a new weight is NaN or infinite.
            OutOfMemoryError: the device has no memory left.
        """
        self.check(samples)
        start = time.monotonic()
        batches = pack(samples, self.config.tokens_per_micro_batch)
        num_loss = sum(batch.index.numel() for batch in batches)
        try:
            totals = self._forward_backward(batches, num_loss)
            computed = time.monotonic()
            timing = self.apply(step, totals.gradients)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(f"step {step}", error, self.config, self.expected) from error
        metrics = batch_metrics(batches, totals, num_loss) | timing
        metrics["forward_backward_seconds"] = computed - start
        metrics["train_seconds"] = time.monotonic() - start
        metrics["peak_memory_bytes"] = peak_memory_bytes()
        metrics["estimated_memory_bytes"] = float(self.expected.total)
        return metrics | self._utilization(metrics)

    def apply(self, step: int, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """Clip, step the masters and write the parameters; the only place where weights change."""
        norm = gradient_norm(gradients)
        clip_gradients(gradients, norm, self.config.optimizer.grad_clip)
        rate = learning_rate(step, self.config.steps, self.config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient
        with self.weights_lock:
            start = time.monotonic()
            self._optimizer.step()
            stepped = time.monotonic()
            self.policy.refresh(step)
            self.step = step
            cast = time.monotonic()
        self._optimizer.zero_grad()
        return {
            "grad_norm": norm,
            "learning_rate": rate,
            "optimizer_seconds": stepped - start,
            "cast_seconds": cast - stepped,
        }

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, for a checkpoint."""
        return {
            "step": self.step,
            "masters": self.policy.masters,
            "optimizer": self._optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` was taken from, bit for bit."""
        with self.weights_lock:
            for name, master in self.policy.masters.items():
                master.copy_(state["masters"][name])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"].cpu())
            if state["cuda_rng"]:
                torch.cuda.set_rng_state_all(state["cuda_rng"])
            self.step = int(state["step"])
            self.policy.refresh(self.step)

    def _forward_backward(self, batches: Sequence[MicroBatch], num_loss: int) -> BatchTotals:
        totals = BatchTotals()
        for batch in batches:
            logprobs, entropies = token_logprobs(self.policy.module, batch, self.config.temperature)
            inference = batch.logprobs.to(logprobs.device)
            advantages = batch.advantages.to(logprobs.device)
            tokens = policy_loss(logprobs, inference, advantages, self.config.loss)
            loss = (tokens.loss + self._reference_term(batch, logprobs)).sum() / num_loss
            if not torch.isfinite(loss):
                raise NonFiniteError(f"the loss of a micro-batch is {loss.item()}; the step is not taken")
            loss.backward()  # type: ignore[no-untyped-call]
            totals.add_gradients(self.policy.gradients())
            totals.loss += loss.item()
            totals.logprobs.append(logprobs.detach().cpu())
            totals.inference_logprobs.append(batch.logprobs)
            totals.entropies.append(entropies.cpu())
            totals.masked += int(tokens.masked.sum())
            totals.truncated += int(tokens.truncated.sum())
        return totals

    def _reference_term(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        if self._reference is None:
            return torch.zeros_like(logprobs)
        with torch.no_grad():
            reference, _ = token_logprobs(self._reference, batch, self.config.temperature)
        return self.config.loss.kl_to_reference * reference_kl(logprobs, reference)

    def _utilization(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Model FLOPs utilization, 6 FLOPs a parameter and token, where the device's peak is known."""
        peak = peak_flops()
        if peak is None:
            return {}
        parameters = sum(master.numel() for master in self.policy.masters.values())
        return {"mfu": 6 * parameters * metrics["train_tokens"] / metrics["train_seconds"] / peak}


def batch_metrics(batches: Sequence[MicroBatch], totals: BatchTotals, num_loss: int) -> dict[str, float]:
    """Metrics of a batch over its loss tokens; padding is in none of them but `padding_ratio`."""
    tokens = sum(batch.num_tokens for batch in batches)
    computed = sum(batch.num_computed for batch in batches)
    return {
        "loss": totals.loss,
        "entropy": torch.cat(totals.entropies).mean().item(),
        "train_tokens": float(tokens),
        "loss_tokens": float(num_loss),
        "masked_ratio": totals.masked / num_loss,
        "tis_truncated": totals.truncated / num_loss,
        "padding_ratio": 1 - tokens / computed,
    } | mismatch_metrics(torch.cat(totals.logprobs), torch.cat(totals.inference_logprobs))


def peak_flops() -> float | None:
    """Dense BF16 FLOPs per second of the device, None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
