"""Digest: the formula, its independence of layout, and what it must notice."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_workers.weights.cast_rounding import Shard
from fp8rl_workers.weights.digest import BASE, MASK64, SPAN, digest, digest_numpy, digest_torch, joined, to_hex


def data(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8)


def by_definition(raw: bytes) -> int:
    raw += b"\0" * (-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    return sum(word * pow(BASE, p, 1 << 64) for p, word in enumerate(words)) & MASK64


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096, 4 * SPAN, 4 * SPAN + 4, 8 * SPAN + 7])
def test_numpy_and_torch_equal_the_definition(size):
    raw = data(size)
    expected = by_definition(raw.tobytes())
    assert digest_numpy(raw) == expected
    assert digest_torch(torch.from_numpy(raw)) == expected


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 600), cuts=st.lists(st.integers(0, 600), max_size=4), seed=st.integers(0, 99))
def test_pieces_at_any_byte_offset_add_up(size, cuts, seed):
    raw = data(size, seed)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    for implementation, source in ((digest_numpy, raw), (digest_torch, torch.from_numpy(raw))):
        parts = [implementation(source[a:b], a) for a, b in itertools.pairwise(edges)]
        assert sum(parts) & MASK64 == digest_numpy(raw)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cut", [(1, 3), (2, 8), (4, 16)])
def test_slices_of_rows_and_columns_add_up_for_every_dtype(dtype, cut):
    whole = torch.from_numpy(data(6 * 20 * 4)).view(-1)[: 6 * 20].clone().to(torch.float32).to(dtype).view(6, 20)
    row, column = cut
    total = 0
    for rows in (slice(0, row), slice(row, 6)):
        for columns in (slice(0, column), slice(column, 20)):
            total += digest(whole[rows, columns], Shard((rows.start, columns.start), (6, 20)))
    assert total & MASK64 == digest(whole)


def test_experts_of_a_stack_add_up():
    stack = torch.from_numpy(data(4 * 6 * 8)).view(4, 6, 8)
    parts = [digest(stack[e : e + 1, :, 4:], Shard((e, 0, 4), (4, 6, 8))) for e in range(4)]
    parts += [digest(stack[e : e + 1, :, :4], Shard((e, 0, 0), (4, 6, 8))) for e in range(4)]
    assert sum(parts) & MASK64 == digest(stack)


def test_long_rows_and_many_rows_of_a_slice_add_up():
    whole = torch.from_numpy(data(3 * 5 * SPAN)).view(3, 5 * SPAN)
    tall = torch.from_numpy(data((SPAN + 5) * 8)).view(SPAN + 5, 8)
    for tensor, at in ((whole, 4 * SPAN + 4), (tall, 4)):
        shape = tuple(tensor.shape)
        parts = [digest(tensor[:, :at], Shard((0, 0), shape)), digest(tensor[:, at:], Shard((0, at), shape))]
        assert sum(parts) & MASK64 == digest(tensor)


def test_the_layout_that_bytes_land_in_does_not_matter():
    x = torch.from_numpy(data(64 * 96)).view(64, 96)
    assert digest(x.t().contiguous().t()) == digest(x)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 5000), seed=st.integers(0, 99), flip=st.integers(1, 255), draw=st.data())
def test_one_changed_byte_is_noticed(size, seed, flip, draw):
    raw = data(size, seed)
    at = draw.draw(st.integers(0, size - 1))
    changed = raw.copy()
    changed[at] ^= flip
    assert digest_numpy(changed) != digest_numpy(raw)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 5000), seed=st.integers(0, 99), draw=st.data())
def test_two_unequal_bytes_that_change_places_are_noticed(size, seed, draw):
    raw = data(size, seed)
    one, two = draw.draw(st.integers(0, size - 1)), draw.draw(st.integers(0, size - 1))
    changed = raw.copy()
    changed[[one, two]] = changed[[two, one]]
    assert (digest_numpy(changed) != digest_numpy(raw)) == (raw[one] != raw[two])


def test_keys_differ_enough_for_the_worst_bytes_at_every_distance_of_a_power_of_two():
    for log_distance in range(31):
        difference = (pow(BASE, 1 << log_distance, 1 << 64) - 1) & MASK64
        trailing = (difference & -difference).bit_length() - 1
        assert trailing == 2 + log_distance
        assert (1 << 31) * difference & MASK64 != 0


def test_hex_has_sixteen_digits():
    assert to_hex(255) == "00000000000000ff"
    assert joined([255, MASK64]) == "00000000000000ff" + "f" * 16


def test_a_core_digests_well_over_a_fifth_of_a_gigabyte_a_second():
    raw = data(64 << 20)
    digest_numpy(raw)
    start = time.perf_counter()
    digest_numpy(raw)
    assert (64 << 20) / (time.perf_counter() - start) > 0.2e9
