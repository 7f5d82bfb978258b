"""What all cast kernels do with a tile: find it, load it, round, store and digest it.

Fields of an item: 0 address of the source, 1 and 2 its strides from member to member and row to row in elements (these three in
units of 16 bytes and 8 elements where aligned), 3 and 4 addresses of codes and scales, 5 and 6 rows and columns, 7 and 8 tiles down
and across, 9 first program, 10 and 11 outputs, 12 and 13 row keys of codes and of MXFP8 scales, 14 first member.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8rl_workers.weights.kernels.triton_numbers import (
    digest_elements,
    digest_words,
    load_source,
    nearest_codes,
    nearest_words,
    pack_codes,
    pack_halves,
    pointer,
    random_bits,
    scaled_words,
    stochastic_codes,
)

FIELDS = tl.constexpr(16)


@triton.jit
def place(tiles, table):
    """Fields of the program's item, member of the stack, row and column of the tile in tiles."""
    record = tiles + tl.program_id(0) * 4
    return table + tl.load(record) * FIELDS, tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)


@triton.jit
def add(sums, index, value, SLOTS: tl.constexpr):
    """Add to one of the slots of an output's digest."""
    tl.atomic_add(sums + index * SLOTS + tl.program_id(0) % SLOTS, value, sem="relaxed")


@triton.jit
def flag(flags, fields, member, amax):
    """Note that a tensor holds NaN or Inf, by the bits of its largest magnitude."""
    tl.atomic_add(flags + tl.load(fields + 14) + member, 1, mask=amax >= 0x7F800000, sem="relaxed")


@triton.jit
def load_words(  # noqa: PLR0917
    fields,
    member,
    first_row,
    first_column,
    F32: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARD: tl.constexpr,
):
    """Words of two BF16 values each, `[ROWS, COLUMNS / 2]`, of an aligned item; unless `FULL`, rows outside are 0.

    Offsets within a tile are 32-bit: strides of aligned items are below 2^23 elements.
    """
    stack = tl.load(fields + 1) * 8
    stride = tl.load(fields + 2) * 8
    start = member.to(tl.int64) * stack + first_row.to(tl.int64) * stride + first_column
    inner = tl.arange(0, ROWS) * stride.to(tl.int32)
    inside = (first_row + tl.arange(0, ROWS) < tl.load(fields + 5).to(tl.int32))[:, None]
    address = tl.load(fields) * 16
    if F32:
        source = pointer(address + start * 4, tl.float32, 16)
        offsets = inner[:, None] + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(source + offsets) if FULL else tl.load(source + offsets, mask=inside, other=0)
        return pack_halves(x, ROWS, COLUMNS, HARD)
    source = pointer(address + start * 2, tl.int32, 16)
    offsets = (inner // 2)[:, None] + tl.arange(0, COLUMNS // 2)[None, :]
    return tl.load(source + offsets) if FULL else tl.load(source + offsets, mask=inside, other=0)


@triton.jit
def emit_words(  # noqa: PLR0917
    fields,
    words,
    member,
    first_row,
    first_word,
    across,
    powers,
    row_keys,
    sums,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Store and digest words `[ROWS, COLUMNS]` of rows that have `across` words; rows outside hold zeros."""
    tall = tl.load(fields + 5)
    start = (member.to(tl.int64) * tall + first_row) * across + first_word
    keys = tl.load(row_keys + tl.load(fields + 12) * ROWS + tl.arange(0, ROWS))
    offsets = (tl.arange(0, ROWS) * across.to(tl.int32))[:, None] + tl.arange(0, COLUMNS)[None, :]
    target = pointer(tl.load(fields + 3) + start * 4, tl.int32, BYTES)
    if FULL:
        tl.store(target + offsets, words)
    else:
        tl.store(target + offsets, words, mask=(first_row + tl.arange(0, ROWS) < tall.to(tl.int32))[:, None])
    add(sums, tl.load(fields + 10), digest_words(words, keys, powers, start, COLUMNS), SLOTS)


@triton.jit
def emit_aligned(  # noqa: PLR0917
    fields,
    words,
    inverse,
    scale,
    lift,
    member,
    first_row,
    first_column,
    powers,
    row_keys,
    member_keys,
    sums,
    WAY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARD: tl.constexpr,
):
    """Round, store and digest a tile of words of two BF16 values."""
    width = tl.load(fields + 6)
    if STOCHASTIC:
        rows = first_row + tl.arange(0, ROWS)
        columns = first_column + tl.arange(0, COLUMNS)
        random = random_bits(tl.load(member_keys + tl.load(fields + 14) + member), rows, columns, width)
        scaled = scaled_words(words, inverse, scale, lift, WAY, ROWS, COLUMNS, HARD)
        out = pack_codes(stochastic_codes(scaled, random), ROWS, COLUMNS)
    else:
        out = nearest_words(words, inverse, scale, lift, WAY, ROWS, COLUMNS, HARD)
    emit_words(
        fields,
        out,
        member,
        first_row,
        first_column // 4,
        (width // 16) * 4,
        powers,
        row_keys,
        sums,
        True,
        ROWS,
        COLUMNS // 4,
        SLOTS,
        8,
    )


@triton.jit
def emit_masked(  # noqa: PLR0917
    fields,
    scaled,
    member,
    rows,
    columns,
    powers,
    member_keys,
    sums,
    SLOTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Round, store and digest the codes of a tile with edges."""
    tall = tl.load(fields + 5)
    width = tl.load(fields + 6)
    inner = rows.to(tl.int64)[:, None] * width + columns.to(tl.int64)[None, :]
    if STOCHASTIC:
        key = tl.load(member_keys + tl.load(fields + 14) + member)
        codes = stochastic_codes(scaled, random_bits(key, rows, columns, width))
    else:
        codes = nearest_codes(scaled)
    mask = (rows < tall)[:, None] & (columns < width)[None, :]
    index = member.to(tl.int64) * tall * width + inner
    tl.store(tl.load(fields + 3).to(tl.pointer_type(tl.uint8)) + index, codes.to(tl.uint8), mask=mask)
    add(sums, tl.load(fields + 10), digest_elements(codes.to(tl.int64), index, mask, powers, 1), SLOTS)


@triton.jit
def load_masked(  # noqa: PLR0917
    fields, member, rows, columns, F32: tl.constexpr, HARD: tl.constexpr
):
    """BF16 values of some rows and columns as fp32; zeros outside."""
    mask = (rows < tl.load(fields + 5))[:, None] & (columns < tl.load(fields + 6))[None, :]
    start = member.to(tl.int64) * tl.load(fields + 1)
    offsets = (start + rows.to(tl.int64) * tl.load(fields + 2))[:, None] + columns.to(tl.int64)[None, :]
    return load_source(tl.load(fields), offsets, mask, F32, HARD)
