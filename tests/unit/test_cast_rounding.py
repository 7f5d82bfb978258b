"""Stochastic rounding: where values go, how often, and that everybody draws the same bits."""

import pytest
import torch

from fp8rl_workers.weights.cast import Rounding, Shard, dequantize, fake_quantize, quantize
from fp8rl_workers.weights.cast_rounding import E4M3_MAX, nearest, random_24_bits, rounding_key, stochastic

ALL = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def test_every_value_of_the_grid_stays_under_any_bits():
    both = torch.cat([ALL, -ALL])
    for bits in (0, 1, 1 << 23, (1 << 24) - 1):
        out = stochastic(both, torch.full(both.shape, bits))
        assert torch.equal(out.view(torch.uint8), nearest(both).view(torch.uint8))


def test_a_value_goes_to_one_of_its_two_neighbours_by_its_distance():
    low, high = ALL[:-1], ALL[1:]
    for share in (0.25, 0.5, 0.75):
        value = low + (high - low) * share
        for sign in (1.0, -1.0):
            up = torch.full(low.shape, int(share * (1 << 24)) - 1)
            assert torch.equal(stochastic(sign * value, up).to(torch.float32), sign * high)
            assert torch.equal(stochastic(sign * value, up + 1).to(torch.float32), sign * low)


def test_values_beyond_the_range_are_clamped():
    big = torch.tensor([449.0, -1e30])
    assert stochastic(big, torch.zeros(2, dtype=torch.int64)).to(torch.float32).tolist() == [E4M3_MAX, -E4M3_MAX]


def test_the_mean_of_many_versions_is_the_value_itself():
    x = torch.full((64, 64), 1.05, dtype=torch.bfloat16)
    x[0, 0] = 448.0
    total = sum(fake_quantize("w", x, "blockwise", rounding=Rounding(v)).to(torch.float32) for v in range(64))
    mean = (total / 64).flatten()[1:].mean().item()
    exact = x[1, 1].item()
    deviation = 0.125 * 0.5 / (64 * 4095) ** 0.5
    assert abs(mean - exact) < 5 * deviation
    assert fake_quantize("w", x, "blockwise")[1, 1].item() == 1.0


def test_small_steps_that_nearest_rounding_swallows_reach_the_policy_in_the_mean():
    x = torch.full((128, 128), 1.0, dtype=torch.bfloat16)
    x[0, 0] = 448.0
    moved = x.clone()
    moved[1:] = 1.0078125
    assert torch.equal(fake_quantize("w", moved, "blockwise"), fake_quantize("w", x, "blockwise"))
    share = (fake_quantize("w", moved, "blockwise", rounding=Rounding(1))[1:] > 1.0).float().mean().item()
    assert share == pytest.approx(0.0078125 / 0.125, abs=0.01)


def test_bits_depend_on_version_tensor_index_and_seed_and_on_nothing_else():
    index = torch.arange(1000)
    base = random_24_bits(rounding_key("a", Rounding(1)), index)
    assert torch.equal(base, random_24_bits(rounding_key("a", Rounding(1)), index))
    for key in (("a", Rounding(2)), ("b", Rounding(1)), ("a", Rounding(1, seed=1))):
        assert (random_24_bits(rounding_key(*key), index) != base).float().mean() > 0.99
    assert base.unique().numel() > 990


def test_bits_are_those_of_splitmix64():
    mask = (1 << 64) - 1
    key = rounding_key("w", Rounding(7, seed=3))
    for index in (0, 1, 12345, 1 << 33):
        z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        assert random_24_bits(key, torch.tensor([index])).item() == (z ^ (z >> 31)) >> 40


@pytest.mark.parametrize(
    ("wire", "rows", "columns"),
    [("blockwise", slice(128, 256), slice(0, 384)), ("blockwise", slice(0, 300), slice(128, 384)),
     ("mxfp8", slice(5, 40), slice(64, 96)), ("channel", slice(7, 9), slice(0, 384))],
)  # fmt: skip
def test_a_shard_on_the_formats_blocks_gives_the_bits_of_the_whole(wire, rows, columns):
    x = (torch.randn(300, 384, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    whole = quantize("w", x, wire, rounding=Rounding(5))
    shard = Shard((rows.start, columns.start), (300, 384))
    part = quantize("w", x[rows, columns], wire, rounding=Rounding(5), shard=shard)
    assert torch.equal(part[""].view(torch.uint8), whole[""][rows, columns].contiguous().view(torch.uint8))
    assert torch.equal(dequantize(part, wire), dequantize(whole, wire)[rows, columns])
