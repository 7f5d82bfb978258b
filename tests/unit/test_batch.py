"""Micro-batches: what is in them, what is refused, and that packing changes no log-probability."""

import pytest
import torch
from trainer_kit import make_module, make_sample, make_samples

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.protocol import Sample
from fp8rl_workers.trainer.batch import check_samples, pack
from fp8rl_workers.trainer.model import token_logprobs


def test_samples_are_sorted_by_length_and_cut_at_the_token_limit() -> None:
    samples = [make_sample(i, 2, length - 2) for i, length in enumerate([10, 4, 7, 5, 10])]
    batches = pack(samples, 20)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 5), (2, 10), (1, 10)]
    assert [batch.num_tokens for batch in batches] == [9, 17, 10]


def test_index_and_targets_name_the_sampled_tokens_of_every_turn() -> None:
    sample = Sample(
        tokens=[5, 6, 7, 8, 9],
        loss_mask=[0, 1, 0, 0, 1],
        logprobs=[0.0, -1.0, 0.0, 0.0, -2.0],
        advantage=0.5,
        version_min=1,
        version_max=1,
    )
    (batch,) = pack([sample, sample], 100)
    assert batch.index.tolist() == [0, 3, 5, 8]
    assert batch.targets.tolist() == [6, 9, 6, 9]
    assert batch.logprobs.tolist() == [-1.0, -2.0, -1.0, -2.0]
    assert batch.advantages.tolist() == [0.5] * 4


def test_packed_log_probabilities_equal_those_of_each_sample_alone() -> None:
    module = make_module()
    samples = make_samples(9)
    for batch in pack(samples, 64):
        logprobs, entropies = token_logprobs(module, batch, 0.7)
        at = 0
        for row in range(batch.tokens.shape[0]):
            length = batch.tokens.shape[1]
            mine = [i for i in batch.index.tolist() if row * length <= i < (row + 1) * length]
            alone = module(input_ids=batch.tokens[row : row + 1]).logits[0] / 0.7
            places = torch.tensor([i - row * length for i in mine])
            expected = alone.log_softmax(-1)[places, batch.targets[at : at + len(mine)]]
            assert torch.allclose(logprobs[at : at + len(mine)], expected, atol=2e-5)
            entropy = torch.distributions.Categorical(logits=alone[places]).entropy()
            assert torch.allclose(entropies[at : at + len(mine)], entropy, atol=2e-5)
            at += len(mine)


def test_padding_changes_no_log_probability() -> None:
    module = make_module()
    short, long = make_sample(1, 3, 3), make_sample(2, 10, 20)
    (alone,) = pack([short], 1000)
    (padded,) = pack([short, long], 1000)
    a, _ = token_logprobs(module, alone, 1.0)
    b, _ = token_logprobs(module, padded, 1.0)
    assert torch.allclose(a, b[:3], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": [0.0]}, r"samples\[0\]: 10 tokens, 10 loss_mask, 1 logprobs; they must be equal"),
        ({"advantage": float("nan")}, "must be finite"),
        ({"loss_mask": [1] * 10}, r"samples\[0\].loss_mask\[0\]: the first token has no predecessor"),
        ({"tokens": [64] * 10}, "64 is outside the model's vocabulary of 64"),
        ({"loss_mask": [0] * 10}, "none of the 1 samples has a loss token"),
    ],
)
def test_a_bad_sample_is_refused_by_name(changes: dict[str, object], text: str) -> None:
    sample = make_sample().model_copy(update=changes)
    with pytest.raises(InvalidInputError, match=text):
        check_samples([sample], 64, 64)


def test_a_sample_longer_than_a_micro_batch_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(InvalidInputError, match=r"samples\[0\]: 10 tokens > trainer.tokensPerMicroBatch 8; raise it"):
        check_samples([make_sample()], 8, 64)
