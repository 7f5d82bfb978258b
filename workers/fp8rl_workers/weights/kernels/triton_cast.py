"""The cast kernels: a program takes one tile of one tensor, which it finds by `tiles[program]` in the table of items.

A tile is rounded, stored and digested from the same registers. `ALIGNED` items have rows, tiles and addresses in multiples of
16 bytes and no edges; all others go through the masked form of the same kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8rl_workers.weights.kernels.triton_numbers import (
    both_halves,
    digest_elements,
    largest,
    magnitudes,
    power,
    quotient,
    round_to_bf16,
    unsigned,
    without_sign,
)
from fp8rl_workers.weights.kernels.triton_tiles import (
    add,
    emit_aligned,
    emit_masked,
    emit_words,
    flag,
    load_masked,
    load_words,
    place,
)


@triton.jit
def cast_blockwise(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,
    member_keys,
    sums,
    flags,
    SLOTS: tl.constexpr,
    F32: tl.constexpr,
    POW2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARD: tl.constexpr,
):
    """One block of 128 x 128: one scale, 16,384 codes; the masked form reads it twice, 32 rows at a time."""
    SIDE: tl.constexpr = 128
    CHUNK: tl.constexpr = 32
    fields, member, tile_row, tile_column = place(tiles, table)
    if ALIGNED:
        words = load_words(fields, member, tile_row * SIDE, tile_column * SIDE, F32, True, SIDE, SIDE, HARD)
        amax = both_halves(magnitudes(magnitudes(words, 0, HARD), 0, HARD))
    else:
        columns = tile_column * SIDE + tl.arange(0, SIDE)
        amax = 0
        for chunk in range(0, SIDE, CHUNK):
            x = load_masked(fields, member, tile_row * SIDE + chunk + tl.arange(0, CHUNK), columns, F32, HARD)
            amax = tl.maximum(amax, tl.max(largest(x, 0), 0))
    flag(flags, fields, member, amax)
    top = tl.maximum(amax.to(tl.float32, bitcast=True), 1e-10)
    scale = tl.div_rn(top, tl.full([], 448.0, tl.float32))
    bits = scale.to(tl.int32, bitcast=True)
    if POW2:
        bits = (bits + 0x7FFFFF) & -8388608
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
    spot = (member * tl.load(fields + 7) + tile_row) * tl.load(fields + 8) + tile_column
    tl.store(tl.load(fields + 4).to(tl.pointer_type(tl.int32)) + spot, bits)
    add(sums, tl.load(fields + 11), bits.to(tl.int64) * power(powers, spot), SLOTS)
    if ALIGNED:
        WAY: tl.constexpr = "multiply" if POW2 else "divide"
        emit_aligned(
            fields,
            words,
            inverse,
            scale,
            scale,
            member,
            tile_row * SIDE,
            tile_column * SIDE,
            powers,
            row_keys,
            member_keys,
            sums,
            WAY,
            SIDE,
            SIDE,
            SLOTS,
            STOCHASTIC,
            HARD,
        )
    else:
        for chunk in range(0, SIDE, CHUNK):
            rows = tile_row * SIDE + chunk + tl.arange(0, CHUNK)
            x = load_masked(fields, member, rows, columns, F32, HARD)
            scaled = x * inverse if POW2 else quotient(x, scale, inverse, HARD)
            emit_masked(fields, scaled, member, rows, columns, powers, member_keys, sums, SLOTS, STOCHASTIC)


@triton.jit
def cast_mxfp8(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,
    member_keys,
    sums,
    flags,
    SLOTS: tl.constexpr,
    F32: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`ROWS` x `COLUMNS` elements in groups of 32 along a row, one byte of scale for each."""
    GROUPS: tl.constexpr = COLUMNS // 32
    fields, member, tile_row, tile_column = place(tiles, table)
    tall = tl.load(fields + 5)
    width = tl.load(fields + 6)
    rows = tile_row * ROWS + tl.arange(0, ROWS)
    if ALIGNED:
        words = load_words(fields, member, tile_row * ROWS, tile_column * COLUMNS, F32, True, ROWS, COLUMNS, HARD)
        bits = both_halves(magnitudes(tl.reshape(words, [ROWS, GROUPS, 16]), 2, HARD))
    else:
        columns = tile_column * COLUMNS + tl.arange(0, COLUMNS)
        grouped = tl.reshape(load_masked(fields, member, rows, columns, F32, HARD), [ROWS, GROUPS, 32])
        bits = largest(grouped, 2)
    flag(flags, fields, member, tl.max(tl.max(bits, 0), 0))
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    byte = tl.where(bits == 0, 127, tl.maximum(byte, 1))
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    groups = tile_column * GROUPS + tl.arange(0, GROUPS)
    inside = (rows < tall)[:, None] & (groups < width // 32)[None, :]
    index = (member.to(tl.int64) * tall + rows)[:, None] * (width // 32) + groups[None, :]
    tl.store(tl.load(fields + 4).to(tl.pointer_type(tl.uint8)) + index, byte.to(tl.uint8), mask=inside)
    if ALIGNED:
        keys = tl.load(row_keys + tl.load(fields + 13) * ROWS + tl.arange(0, ROWS))
        shifted = byte.to(tl.int64) << ((tl.arange(0, GROUPS) & 3) * 8)[None, :]
        column_keys = tl.load(powers + tl.arange(0, GROUPS) // 4)
        start = (member.to(tl.int64) * tall + tile_row * ROWS) * (width // 128) + tile_column * (COLUMNS // 128)
        value = tl.sum(tl.sum(shifted * keys[:, None], axis=0) * column_keys, axis=0) * power(powers, start)
        add(sums, tl.load(fields + 11), value, SLOTS)
        spread = tl.reshape(tl.broadcast_to(inverse[:, :, None], [ROWS, GROUPS, 16]), [ROWS, COLUMNS // 2])
        emit_aligned(
            fields,
            words,
            spread,
            spread,
            spread,
            member,
            tile_row * ROWS,
            tile_column * COLUMNS,
            powers,
            row_keys,
            member_keys,
            sums,
            "multiply",
            ROWS,
            COLUMNS,
            SLOTS,
            STOCHASTIC,
            HARD,
        )
    else:
        add(sums, tl.load(fields + 11), digest_elements(byte.to(tl.int64), index, inside, powers, 1), SLOTS)
        scaled = tl.reshape(grouped * inverse[:, :, None], [ROWS, COLUMNS])
        emit_masked(fields, scaled, member, rows, columns, powers, member_keys, sums, SLOTS, STOCHASTIC)


@triton.jit
def cast_channel(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,
    member_keys,
    sums,
    flags,
    SLOTS: tl.constexpr,
    F32: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`ROWS` whole rows, read twice (the second time from the cache): one BF16 scale a row, quotients rounded to BF16.

    Tiny rows are lifted by 2^100 with their scale, which keeps quotients and lets reciprocals and remainders be normal numbers.
    """
    fields, member, tile_row, _ = place(tiles, table)
    tall = tl.load(fields + 5)
    width = tl.load(fields + 6)
    rows = tile_row * ROWS + tl.arange(0, ROWS)
    amax = tl.zeros([ROWS], tl.int32)
    for start in range(0, width.to(tl.int32), COLUMNS):
        if ALIGNED:
            words = load_words(fields, member, tile_row * ROWS, start, F32, True, ROWS, COLUMNS, HARD)
            amax = tl.maximum(amax, both_halves(magnitudes(words, 1, HARD)))
        else:
            x = load_masked(fields, member, rows, start + tl.arange(0, COLUMNS), F32, HARD)
            amax = tl.maximum(amax, largest(x, 1))
    flag(flags, fields, member, tl.max(amax, 0))
    scale = round_to_bf16(tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full([ROWS], 448.0, tl.float32)), HARD)
    scale = tl.where(scale == 0, 0.0078125, scale)
    index = member.to(tl.int64) * tall + rows
    half = (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    tl.store(tl.load(fields + 4).to(tl.pointer_type(tl.int16)) + index, half.to(tl.int16), mask=rows < tall)
    add(sums, tl.load(fields + 11), digest_elements(half.to(tl.int64), index, rows < tall, powers, 2), SLOTS)
    lift = tl.where(scale < 1e-12, 1.2676506002282294e30, 1.0)[:, None]
    scale = scale[:, None] * lift
    inverse = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), scale)
    for start in range(0, width.to(tl.int32), COLUMNS):
        if ALIGNED:
            words = load_words(fields, member, tile_row * ROWS, start, F32, True, ROWS, COLUMNS, HARD)
            emit_aligned(
                fields,
                words,
                inverse,
                scale,
                lift,
                member,
                tile_row * ROWS,
                start,
                powers,
                row_keys,
                member_keys,
                sums,
                "round",
                ROWS,
                COLUMNS,
                SLOTS,
                STOCHASTIC,
                HARD,
            )
        else:
            columns = start + tl.arange(0, COLUMNS)
            x = load_masked(fields, member, rows, columns, F32, HARD)
            scaled = without_sign(round_to_bf16(quotient(x * lift, scale, inverse, HARD), HARD))
            emit_masked(fields, scaled, member, rows, columns, powers, member_keys, sums, SLOTS, STOCHASTIC)


@triton.jit
def cast_bf16(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,
    member_keys,  # noqa: ARG001
    sums,
    flags,
    SLOTS: tl.constexpr,
    F32: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`ROWS` x `COLUMNS` elements of a copy in BF16."""
    fields, member, tile_row, tile_column = place(tiles, table)
    tall = tl.load(fields + 5)
    width = tl.load(fields + 6)
    rows = tile_row * ROWS + tl.arange(0, ROWS)
    if ALIGNED:
        words = load_words(fields, member, tile_row * ROWS, tile_column * COLUMNS, F32, False, ROWS, COLUMNS, HARD)
        emit_words(
            fields,
            words,
            member,
            tile_row * ROWS,
            tile_column * (COLUMNS // 2),
            (width // 8) * 4,
            powers,
            row_keys,
            sums,
            False,
            ROWS,
            COLUMNS // 2,
            SLOTS,
            16,
        )
        amax = both_halves(magnitudes(magnitudes(words, 0, HARD), 0, HARD))
    else:
        columns = tile_column * COLUMNS + tl.arange(0, COLUMNS)
        mask = (rows < tall)[:, None] & (columns < width)[None, :]
        x = load_masked(fields, member, rows, columns, F32, HARD)
        half = (x.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        index = (member.to(tl.int64) * tall + rows)[:, None] * width + columns[None, :]
        tl.store(tl.load(fields + 3).to(tl.pointer_type(tl.int16)) + index, half.to(tl.int16), mask=mask)
        add(sums, tl.load(fields + 10), digest_elements(half.to(tl.int64), index, mask, powers, 2), SLOTS)
        amax = tl.max(largest(x, 0), 0)
    flag(flags, fields, member, amax)


@triton.jit
def cast_fp32(  # noqa: PLR0917
    tiles,
    table,
    powers,
    row_keys,  # noqa: ARG001
    member_keys,  # noqa: ARG001
    sums,
    flags,
    SLOTS: tl.constexpr,
    F32: tl.constexpr,
    ALIGNED: tl.constexpr,  # noqa: ARG001
    HARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`ROWS` x `COLUMNS` elements of a copy in fp32; these tensors are few and small, so there is the masked form only."""
    fields, member, tile_row, tile_column = place(tiles, table)
    tall = tl.load(fields + 5)
    width = tl.load(fields + 6)
    rows = tile_row * ROWS + tl.arange(0, ROWS)
    columns = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tall)[:, None] & (columns < width)[None, :]
    if F32:
        start = member.to(tl.int64) * tl.load(fields + 1)
        offsets = (start + rows.to(tl.int64) * tl.load(fields + 2))[:, None] + columns.to(tl.int64)[None, :]
        x = tl.load(tl.load(fields).to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0)
    else:
        x = load_masked(fields, member, rows, columns, F32, HARD)
    bits = x.to(tl.int32, bitcast=True)
    index = (member.to(tl.int64) * tall + rows)[:, None] * width + columns[None, :]
    tl.store(tl.load(fields + 3).to(tl.pointer_type(tl.int32)) + index, bits, mask=mask)
    add(sums, tl.load(fields + 10), digest_elements(unsigned(bits), index, mask, powers, 4), SLOTS)
    flag(flags, fields, member, tl.max(largest(x, 0), 0))
