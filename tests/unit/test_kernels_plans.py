"""Plans in plain torch, and the tables that the Triton plans launch from."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import item, values

from fp8rl_workers.errors import InvalidInputError, InvalidModelError, NonFiniteError
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.digest import BASE, digest
from fp8rl_workers.weights.kernels import CastItem, Piece, cast_plan, copy_plan, digest_plan
from fp8rl_workers.weights.kernels.tables import (
    Run,
    Table,
    Tile,
    copy_runs,
    digest_runs,
    grid_of,
    is_aligned,
    key_powers,
    move_row,
    unit_of,
)


@pytest.mark.parametrize("wire", ["blockwise", "mxfp8", "channel", "bf16"])
@pytest.mark.parametrize("rounding", [None, Rounding(2)])
def test_a_stack_is_cast_like_its_members_and_digested_as_one(wire, rounding):
    source = values(3, 40, 96)[:, :, 32:]
    one = item(("a", "b", "c"), source, wire)
    plan = cast_plan([one], "fp32")
    plan.run(rounding)
    digests = plan.finish()
    for e, name in enumerate(one.names):
        parts = quantize(name, source[e], wire, scale_format="fp32", rounding=rounding)
        for out, part in zip(one.outputs, parts.values(), strict=True):
            assert torch.equal(out[e].reshape(-1).view(torch.uint8), part.reshape(-1).view(torch.uint8))
    assert digests == [digest(out) for out in one.outputs]


def test_an_fp32_source_is_rounded_to_bf16_first_unless_its_output_is_fp32():
    source = torch.tensor([[1.0, 1.0 + 2.0**-9]])
    plain, wide = item(("w",), source, "bf16"), item(("w",), source, "fp32")
    plan = cast_plan([plain, wide], "pow2")
    plan.run()
    assert plan.finish() == [digest(source.to(torch.bfloat16)), digest(source)]
    assert plain.outputs[0].tolist() == [[1.0, 1.0]]
    assert wide.outputs[0].tolist() == [[1.0, 1.0 + 2.0**-9]]


def test_all_tensors_that_are_not_finite_are_named_and_the_others_cast():
    bad = torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16)
    items = [item(("a",), bad, "bf16"), item(("b",), torch.ones(2, 2), "channel"), item(("c",), -1 / (bad - 1), "bf16")]
    plan = cast_plan(items, "pow2")
    plan.run()
    with pytest.raises(NonFiniteError, match=r"^a: 1 of 2 .* is nan; .*; c: 2 of 2 .* is -inf;"):
        plan.finish()
    assert items[1].outputs[0].to(torch.float32).tolist() == [[448.0, 448.0], [448.0, 448.0]]


def test_a_plan_matches_only_what_it_was_made_for():
    source = values(4, 32)
    one = item(("w",), source, "channel")
    plan = cast_plan([one], "pow2")
    assert plan.matches([CastItem(("w",), source, "channel", one.outputs)])
    assert not plan.matches([CastItem(("w",), source.clone(), "channel", one.outputs)])
    assert not plan.matches([CastItem(("v",), source, "channel", one.outputs)])
    assert not plan.matches([])


ONES = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("error", "text", "names", "source", "wire"),
    [
        (
            TypeError,
            r"^w: the source of a cast is BF16 or an fp32 master, not torch.float16$",
            "w",
            ONES.half(),
            "bf16",
        ),
        (InvalidModelError, r"^w: the last dimension has stride 32, 1 is needed", "w", ONES.t(), "bf16"),
        (InvalidModelError, r"^a: 3 names for a source of shape \[4, 32\]$", "abc", ONES, "bf16"),
        (
            InvalidModelError,
            r"^w: wire channel needs \[M, N\], or \[E, M, N\], not shape \[32\]",
            "w",
            ONES[0],
            "channel",
        ),
        (InvalidModelError, r"^w: mxfp8 needs K % 32 == 0, and 31 % 32 = 31; add", "w", ONES[:, :31], "mxfp8"),
        (InvalidModelError, r"^w: outputs are \[.*\], wire blockwise has \[", "w", ONES, "blockwise"),
    ],
)
def test_items_that_cannot_be_cast_are_refused_by_name(error, text, names, source, wire):
    one = CastItem(tuple(names), source, wire, item(tuple(names), source, "bf16").outputs)
    with pytest.raises(error, match=text):
        cast_plan([one], "pow2")


def test_a_backend_that_does_not_run_here_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        InvalidInputError, match=r"^weightSync.castBackend: value triton: runs on CUDA, and the weights are on cpu"
    ):
        cast_plan([item(("w",), torch.ones(1, 32), "channel")], "pow2", "triton")


def test_powers_reach_over_two_tables():
    powers = key_powers().view(np.uint64)
    at = 65536 * 3 + 17
    assert int(powers[17]) * int(powers[65536 + 3]) % (1 << 64) == pow(BASE, at, 1 << 64)


@given(st.integers(1, 9), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_tensor_cut_into_columns_at_any_byte_has_its_digest(rows, size, data):
    tensor = torch.from_numpy(np.random.default_rng(rows * 41 + size).integers(0, 256, (rows, size), dtype=np.uint8))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    pieces = [Piece(tensor[:, a:b], a, size) for a, b in pairwise(cuts)]
    plan = digest_plan([pieces])
    plan.run()
    assert plan.finish() == [digest(tensor)]


def bytes_at(run: Run) -> dict[int, int]:
    """Where each byte of a run lies, and its position or its second address."""
    return {
        run.address + run.stride * r + c: run.other + run.other_stride * r + c
        for r in range(run.rows)
        for c in range(run.size)
    }


@given(st.integers(1, 6), st.integers(1, 90), st.integers(0, 20), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_runs_of_a_digest_are_the_bytes_of_its_piece(rows, size, gap, position):
    memory = torch.zeros(rows, size + gap, dtype=torch.uint8)
    view = memory[:, :size]
    runs = digest_runs(Piece(view, position, size), 32)
    found = {}
    for run in runs:
        assert not found.keys() & bytes_at(run).keys()
        found |= bytes_at(run)
    base, stride = view.data_ptr(), view.stride(0)
    assert found == {base + stride * r + c: position + size * r + c for r in range(rows) for c in range(size)}


@given(st.integers(1, 6), st.integers(1, 90), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_runs_of_a_copy_are_the_bytes_of_its_views(rows, size, near, far):
    source = torch.zeros(rows, size + near, dtype=torch.uint8)[:, :size]
    target = torch.zeros(rows, size + far, dtype=torch.uint8)[:, far:]
    found = {}
    for run in copy_runs(source, target, 32):
        found |= bytes_at(run)
    a, b = source.data_ptr(), target.data_ptr()
    assert found == {
        a + source.stride(0) * r + c: b + target.stride(0) * r + c for r in range(rows) for c in range(size)
    }
    copy_plan([(source, target)]).run()


def test_a_table_has_one_program_for_each_tile_of_each_member():
    table = Table(Tile(2, 4, 1))
    for members, tall, wide in ((1, 2, 3), (2, 1, 2)):
        row = [0] * 16
        row[7:9] = [tall, wide]
        table.add(row, 9, members * tall * wide)
    assert table.programs == 10
    assert table.tile_records().tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 2],
        [1, 0, 0, 0],
        [1, 0, 0, 1],
        [1, 1, 0, 0],
        [1, 1, 0, 1],
    ]


def test_bytes_move_in_the_largest_unit_that_divides_all():
    assert [unit_of(numbers) for numbers in ((32, 48), (32, 20), (32, 21))] == [16, 4, 1]
    assert move_row(Run(160, 64, 2, 32, 48, 80), 16, Tile(2, 4, 1), digest=True) == (
        [10, 16, 2, 2, 3, 20, 2, 0, 0, 0],
        2,
    )
    assert move_row(Run(160, 64, 2, 32, 48, 80), 16, Tile(2, 4, 1), digest=False) == (
        [10, 4, 2, 2, 3, 5, 2, 0, 0, 0],
        2,
    )


def test_edges_and_odd_strides_take_the_masked_kernel():
    tile = Tile(128, 128, 4)
    whole, edge = values(128, 256), values(130, 256)
    grids = [(x, grid_of(item(("w",), x, "blockwise"), 128)) for x in (whole, edge, values(128, 257)[:, :256])]
    aligned = [is_aligned(item(("w",), x, "blockwise"), grid, tile) for x, grid in grids]
    assert aligned[1:] == [False, False]
    assert aligned[0] == (whole.data_ptr() % 16 == 0)
