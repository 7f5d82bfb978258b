"""Samples to micro-batches: pure, on lists and CPU tensors.

Samples are sorted by length and cut into micro-batches whose rows times longest row is at most `tokens_per_micro_batch`;
rows are padded on the right. Under causal attention no token sees what is right of it, so padding needs no mask, keeps
positions 0, 1, 2, ..., and takes part in nothing: `index` names the positions whose next token was sampled by an engine, and
only those reach loss and metrics. (Measured on the demo's model, 128 samples of 30 tokens, two threads: 0.17 s for forward and
backward in this form, 0.27 s packed into one row with a block-diagonal mask.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.protocol import Sample

PAD = 0


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass. T loss tokens, in row-major order of their positions.

    tokens: int64 [rows, length], padded with 0 on the right.
    index: int64 [T], flat positions (row * length + t) whose successor at t + 1 is a loss token.
    targets: int64 [T], that successor. logprobs: fp32 [T], the engine's. advantages: fp32 [T].
    """

    tokens: Tensor
    index: Tensor
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor
    num_tokens: int

    @property
    def num_computed(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.tokens.numel()


def check_samples(samples: Sequence[Sample], tokens_per_micro_batch: int, vocabulary: int) -> None:
    """Refuse what cannot be trained on, all faults at once.

    Raises:
        InvalidInputError: names the sample, the field and the arithmetic.
    """
    faults = [
        fault
        for i, sample in enumerate(samples)
        for fault in sample_faults(i, sample, tokens_per_micro_batch, vocabulary)
    ]
    if not any(any(sample.loss_mask) for sample in samples):
        faults.append(f"samples: none of the {len(samples)} samples has a loss token; there is nothing to train on")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise InvalidInputError("; ".join(faults[:5]) + more)


def sample_faults(i: int, sample: Sample, tokens_per_micro_batch: int, vocabulary: int) -> list[str]:
    """What is wrong with one sample."""
    length = len(sample.tokens)
    faults = []
    if not length == len(sample.loss_mask) == len(sample.logprobs):
        faults.append(
            f"samples[{i}]: {length} tokens, {len(sample.loss_mask)} loss_mask, {len(sample.logprobs)} logprobs; they must be equal"
        )
    if length > tokens_per_micro_batch:
        faults.append(
            f"samples[{i}]: {length} tokens > trainer.tokensPerMicroBatch {tokens_per_micro_batch}; raise it or lower rollout.maxTokens"
        )
    if sample.loss_mask and sample.loss_mask[0]:
        faults.append(f"samples[{i}].loss_mask[0]: the first token has no predecessor, so it cannot be a loss token")
    if any(not 0 <= token < vocabulary for token in sample.tokens):
        odd = next(token for token in sample.tokens if not 0 <= token < vocabulary)
        faults.append(f"samples[{i}].tokens: {odd} is outside the model's vocabulary of {vocabulary}")
    if not math.isfinite(sample.advantage) or not all(map(math.isfinite, sample.logprobs)):
        faults.append(
            f"samples[{i}]: advantage and logprobs must be finite; the orchestrator drops such samples (nonFinite)"
        )
    return faults


def pack(samples: Sequence[Sample], tokens_per_micro_batch: int) -> list[MicroBatch]:
    """Micro-batches of all samples that have a loss token, shortest first; the order is a function of the lengths only."""
    kept = sorted((sample for sample in samples if any(sample.loss_mask)), key=lambda sample: len(sample.tokens))
    batches: list[MicroBatch] = []
    rows: list[Sample] = []
    for sample in kept:
        if rows and (len(rows) + 1) * len(sample.tokens) > tokens_per_micro_batch:
            batches.append(make_micro_batch(rows))
            rows = []
        rows.append(sample)
    if rows:
        batches.append(make_micro_batch(rows))
    return batches


def make_micro_batch(rows: Sequence[Sample]) -> MicroBatch:
    """One micro-batch of `rows`, padded to the longest."""
    length = max(len(sample.tokens) for sample in rows)
    tokens = torch.full((len(rows), length), PAD, dtype=torch.int64)
    index: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for row, sample in enumerate(rows):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        places = [t for t, flag in enumerate(sample.loss_mask) if flag]
        index += [row * length + t - 1 for t in places]
        targets += [sample.tokens[t] for t in places]
        logprobs += [sample.logprobs[t] for t in places]
        advantages += [sample.advantage] * len(places)
    return MicroBatch(
        tokens=tokens,
        index=torch.tensor(index),
        targets=torch.tensor(targets),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        num_tokens=sum(len(sample.tokens) for sample in rows),
    )
