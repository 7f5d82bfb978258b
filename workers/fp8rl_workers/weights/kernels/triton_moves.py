"""Kernels over bytes as they lie: digests of pieces, and copies.

A program takes `ROWS` x `COLUMNS` units of one piece. `UNIT` 16, 4 or 1: addresses, rows and strides are multiples of so many
bytes, and the table holds them divided by it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8rl_workers.weights.kernels.triton_numbers import digest_elements, digest_words, pointer

FIELDS = tl.constexpr(10)


@triton.jit
def words_in(units, UNIT: tl.constexpr):
    """A length of the table in words (bytes where `UNIT` is 1), as a multiple that the compiler sees."""
    if UNIT == 16:
        return units * 4
    return units


@triton.jit
def address_in(units, UNIT: tl.constexpr):
    """An address of the table in bytes, as a multiple that the compiler sees."""
    return units * UNIT


@triton.jit
def digest_pieces(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,
    sums,
    SLOTS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Contribution of a tile to its tensor's digest."""
    program = tl.program_id(0)
    fields = table + tl.load(tiles + program) * FIELDS
    tall = tl.load(fields + 2)
    width = words_in(tl.load(fields + 3), UNIT)
    stride = words_in(tl.load(fields + 4), UNIT)
    wide = tl.load(fields + 6).to(tl.int32)
    local = program - tl.load(fields + 7).to(tl.int32)
    row = local // wide
    rows = row * ROWS + tl.arange(0, ROWS)
    first_column = (local - row * wide) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    mask = (rows < tall)[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + columns.to(tl.int64)[None, :]
    address = address_in(tl.load(fields), UNIT)
    position = tl.load(fields + 1)
    step = tl.load(fields + 5)
    if UNIT == 1:
        found = tl.load(address.to(tl.pointer_type(tl.uint8)) + offsets, mask=mask, other=0).to(tl.int64)
        index = position + rows.to(tl.int64)[:, None] * step + columns.to(tl.int64)[None, :]
        value = digest_elements(found, index, mask, powers, 1)
    else:
        words = tl.load(pointer(address, tl.int32, UNIT) + offsets, mask=mask, other=0)
        keys = tl.load(row_keys + tl.load(fields + 9) * ROWS + tl.arange(0, ROWS))
        start = position + (row * ROWS).to(tl.int64) * step + first_column
        value = digest_words(words, keys, powers, start, COLUMNS)
    tl.atomic_add(sums + tl.load(fields + 8) * SLOTS + program % SLOTS, value, sem="relaxed")


@triton.jit
def copy_pieces(tiles, table, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy of a tile."""
    program = tl.program_id(0)
    fields = table + tl.load(tiles + program) * FIELDS
    tall = tl.load(fields + 2)
    width = words_in(tl.load(fields + 3), UNIT)
    wide = tl.load(fields + 6).to(tl.int32)
    local = program - tl.load(fields + 7).to(tl.int32)
    row = local // wide
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = (local - row * wide) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tall)[:, None] & (columns < width)[None, :]
    near = rows.to(tl.int64)[:, None] * words_in(tl.load(fields + 4), UNIT) + columns.to(tl.int64)[None, :]
    far = rows.to(tl.int64)[:, None] * words_in(tl.load(fields + 5), UNIT) + columns.to(tl.int64)[None, :]
    source = address_in(tl.load(fields), UNIT)
    target = address_in(tl.load(fields + 1), UNIT)
    if UNIT == 1:
        found = tl.load(source.to(tl.pointer_type(tl.uint8)) + near, mask=mask, other=0)
        tl.store(target.to(tl.pointer_type(tl.uint8)) + far, found, mask=mask)
    else:
        words = tl.load(pointer(source, tl.int32, UNIT) + near, mask=mask, other=0)
        tl.store(pointer(target, tl.int32, UNIT) + far, words, mask=mask)
