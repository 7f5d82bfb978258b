"""Numbers inside the Triton kernels: BF16 in, e4m3 codes out, keys of digests and bits of stochastic rounding.

`HARD` is the way of a CUDA device: conversions by its instructions, four codes at once into the word that is stored and digested.
Without it everything is integer arithmetic with the same bits; Triton's interpreter on the CPU, whose own conversions do not
round to even, takes that way, and so do tensors whose rows are no multiple of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
POWERS = tl.constexpr(65536)
TWO_HALVES = tl.constexpr("{ cvt.rn.bf16x2.f32 $0, $3, $2; mov.b32 $1, $0; }")
LARGER_HALVES = tl.constexpr("max.u16x2 $0, $1, $2;")
QUOTIENT = tl.constexpr(
    "{ .reg .f32 e, q, r; mul.rn.f32 q, $1, $3; neg.f32 e, $1; fma.rn.f32 r, q, $2, e; neg.f32 r, r;"
    " fma.rn.f32 $0, r, $3, q; }"
)

_UNPACK = """{ .reg .f32 a, b, c, d, e; .reg .b32 t; .reg .b16 low, high;
    shl.b32 t, $2, 16; mov.b32 a, t; and.b32 t, $2, 0xffff0000; mov.b32 b, t;
    shl.b32 t, $3, 16; mov.b32 c, t; and.b32 t, $3, 0xffff0000; mov.b32 d, t;
"""
_PACK = """cvt.rn.satfinite.e4m3x2.f32 low, b, a; cvt.rn.satfinite.e4m3x2.f32 high, d, c;
    mov.b32 $0, {low, high}; mov.b32 $1, $0; }"""
_DIVIDE = """.reg .f32 q, r; """ + "".join(
    f"mul.rn.f32 q, {x}, $4; neg.f32 e, {x}; fma.rn.f32 r, q, $6, e; neg.f32 r, r; fma.rn.f32 {x}, r, $4, q; "
    for x in "abcd"
)
_LIFT = "".join(f"mul.rn.f32 {x}, {x}, $8; " for x in "abcd")
_ROUND = """.reg .b32 u, v; cvt.rn.bf16x2.f32 u, b, a; cvt.rn.bf16x2.f32 v, d, c;
    shl.b32 t, u, 16; mov.b32 a, t; and.b32 t, u, 0xffff0000; mov.b32 b, t;
    shl.b32 t, v, 16; mov.b32 c, t; and.b32 t, v, 0xffff0000; mov.b32 d, t;
""" + "".join(f"add.rn.f32 {x}, {x}, 0f00000000; " for x in "abcd")
MULTIPLIED = tl.constexpr(_UNPACK + "".join(f"mul.rn.f32 {x}, {x}, $4; " for x in "abcd") + _PACK)
DIVIDED = tl.constexpr(_UNPACK + _DIVIDE + _PACK)
ROUNDED = tl.constexpr(_UNPACK + _LIFT + _DIVIDE + _ROUND + _PACK)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Bits of the largest magnitude of fp32 values along an axis; NaN and Inf are 0x7F800000 and above."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def first(a, b):  # noqa: ARG001
    """One of several equal values that a thread holds."""
    return a


@triton.jit
def power(powers, position):
    """g^position modulo 2^64 for positions below 2^32: `powers` holds g^i, then g^(65536 i), 65536 of each."""
    low = tl.load(powers + (position & 0xFFFF))
    high = tl.load(powers + POWERS + (position >> 16))
    return low * high


@triton.jit
def pointer(address, TYPE: tl.constexpr, BYTES: tl.constexpr):
    """An address (int64) as a pointer of which the compiler knows that it is a multiple of `BYTES`."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), [BYTES])


@triton.jit
def unsigned(words):
    """32-bit words as non-negative int64."""
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def round_to_bf16(x, HARD: tl.constexpr):
    """fp32 rounded to BF16 (ties to even), as fp32."""
    if HARD:
        return x.to(tl.bfloat16).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def load_source(address, offsets, mask, F32: tl.constexpr, HARD: tl.constexpr):
    """BF16 values of a source as fp32; fp32 sources are rounded to BF16."""
    if F32:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0)
        return round_to_bf16(found, HARD)
    found = tl.load(address.to(tl.pointer_type(tl.int16)) + offsets, mask=mask, other=0)
    return (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, scale, reciprocal, HARD: tl.constexpr):
    """`x / scale` exactly rounded, for scales that are 1/448 of a BF16 number (or of 1e-10) or BF16 numbers themselves.

    One Newton step from the rounded reciprocal is enough: `tests/unit/test_kernels_numbers.py` goes through all mantissas. Signs are such that -0 stays -0
    (Triton's own minus is 0 - x, which would lose it).
    """
    if HARD:
        return tl.inline_asm_elementwise(
            QUOTIENT, "=f,f,f,f", [x, scale, reciprocal], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.div_rn(x, scale)


@triton.jit
def nearest_codes(scaled):
    """e4m3 codes 0..255 (int32) of fp32 values of magnitude below 464, ties to even, by integer arithmetic."""
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, tl.minimum(normal, 0x7E))
    return code | ((bits >> 24) & 0x80)


@triton.jit
def stochastic_codes(scaled, random):
    """e4m3 codes (int32); `random` int32 in [0, 2^24): the same as `cast_rounding.stochastic`.

    `fixed` is the code with its fraction in 24 bits, rounded up below that, for `random < fraction` of an integer is that of the
    fraction rounded up.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    normal = (magnitude.to(tl.int32, bitcast=True) - 0x3C000000) << 4
    small = tl.ceil(tl.minimum(magnitude, 0.015625) * 8589934592.0).to(tl.int32)
    fixed = tl.where(magnitude < 0.015625, small, normal)
    return ((fixed + (random ^ 0xFFFFFF)) >> 24) | ((bits >> 24) & 0x80)


@triton.jit
def random_bits(key, rows, columns, width):
    """int32 `[rows, columns]`: top 24 bits of splitmix64 of `key + (index + 1) * golden`, index `row * width + column`.

    The last step of splitmix64 (z ^ z >> 31) does not reach these bits.
    """
    down = key.to(tl.uint64, bitcast=True) + (rows.to(tl.int64) * width + 1).to(tl.uint64, bitcast=True) * GOLDEN
    across = columns.to(tl.uint64) * GOLDEN
    z = down[:, None] + across[None, :]
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return (z >> 40).to(tl.int32)


@triton.jit
def pack_codes(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """int32 codes `[ROWS, COLUMNS]` as little-endian words `[ROWS, COLUMNS / 4]`."""
    four = tl.reshape(codes, [ROWS, COLUMNS // 4, 4])
    return tl.sum(four << (tl.arange(0, 4) * 8)[None, None, :], axis=2)


@triton.jit
def pack_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARD: tl.constexpr):
    """Words `[ROWS, COLUMNS / 2]` of fp32 values rounded to BF16."""
    if HARD:
        same = tl.inline_asm_elementwise(TWO_HALVES, "=r,=r,r,r", [x], dtype=tl.int32, is_pure=True, pack=2)
        return tl.reduce(tl.reshape(same, [ROWS, COLUMNS // 2, 2]), 2, first)
    bits = (round_to_bf16(x, HARD).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    two = tl.reshape(bits, [ROWS, COLUMNS // 2, 2])
    return tl.sum(two << (tl.arange(0, 2) * 16)[None, None, :], axis=2)


@triton.jit
def unpack_halves(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 `[ROWS, COLUMNS]` of the BF16 values in words `[ROWS, COLUMNS / 2]`."""
    pairs = tl.join(words << 16, words & -65536)
    return tl.reshape(pairs, [ROWS, COLUMNS]).to(tl.float32, bitcast=True)


@triton.jit
def larger_halves(a, b):
    """Maximum of each unsigned half of two words."""
    return tl.inline_asm_elementwise(LARGER_HALVES, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def magnitudes(words, AXIS: tl.constexpr, HARD: tl.constexpr):
    """Largest magnitude along an axis, of low and of high halves apart, as BF16 bits; NaN and Inf are 0x7F80 and above."""
    if HARD:
        return tl.reduce(words & 0x7FFF7FFF, AXIS, larger_halves)
    return tl.max(words & 0x7FFF, AXIS) | tl.max(words & 0x7FFF0000, AXIS)


@triton.jit
def both_halves(words):
    """Bits in fp32 of the larger half of each word."""
    return tl.maximum(words & 0xFFFF, words >> 16) << 16


@triton.jit
def nearest_words(  # noqa: PLR0917
    words,
    inverse,
    scale,
    lift,
    WAY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARD: tl.constexpr,
):
    """Words of codes `[ROWS, COLUMNS / 4]` of BF16 words `[ROWS, COLUMNS / 2]`; the other arguments have one value for a word.

    `WAY`: `multiply` by the inverse, `divide` by the scale, or `round` the quotient to BF16 first (lifted by a power of two).
    """
    if HARD:
        if WAY == "multiply":
            same = tl.inline_asm_elementwise(
                MULTIPLIED, "=r,=r,r,r,f,f", [words, inverse], dtype=tl.int32, is_pure=True, pack=2
            )
        elif WAY == "divide":
            same = tl.inline_asm_elementwise(
                DIVIDED, "=r,=r,r,r,f,f,f,f", [words, inverse, scale], dtype=tl.int32, is_pure=True, pack=2
            )
        else:
            same = tl.inline_asm_elementwise(
                ROUNDED, "=r,=r,r,r,f,f,f,f,f,f", [words, inverse, scale, lift], dtype=tl.int32, is_pure=True, pack=2
            )
        return tl.reduce(tl.reshape(same, [ROWS, COLUMNS // 4, 2]), 2, first)
    return pack_codes(nearest_codes(scaled_words(words, inverse, scale, lift, WAY, ROWS, COLUMNS, HARD)), ROWS, COLUMNS)


@triton.jit
def scaled_words(  # noqa: PLR0917
    words,
    inverse,
    scale,
    lift,
    WAY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARD: tl.constexpr,
):
    """fp32 `[ROWS, COLUMNS]` that are to become codes; arguments as of `nearest_words`."""
    x = unpack_halves(words, ROWS, COLUMNS)
    twice = tl.broadcast_to(inverse, [ROWS, COLUMNS // 2])
    inverse = tl.reshape(tl.join(twice, twice), [ROWS, COLUMNS])
    if WAY == "multiply":
        return x * inverse
    twice = tl.broadcast_to(scale, [ROWS, COLUMNS // 2])
    scale = tl.reshape(tl.join(twice, twice), [ROWS, COLUMNS])
    if WAY == "divide":
        return quotient(x, scale, inverse, HARD)
    twice = tl.broadcast_to(lift, [ROWS, COLUMNS // 2])
    lift = tl.reshape(tl.join(twice, twice), [ROWS, COLUMNS])
    return without_sign(round_to_bf16(quotient(x * lift, scale, inverse, HARD), HARD))


@triton.jit
def without_sign(x):
    """-0 as +0."""
    return tl.where(x == 0, 0.0, x)


@triton.jit
def digest_words(words, row_keys, powers, position, COLUMNS: tl.constexpr):
    """Contribution of words `[rows, COLUMNS]`; `row_keys` g^(rows' distance), `position` the first word's (int64)."""
    sums = tl.sum(unsigned(words) * row_keys[:, None], axis=0)
    keys = tl.load(powers + tl.arange(0, COLUMNS))
    return tl.sum(sums * keys, axis=0) * power(powers, position)


@triton.jit
def digest_elements(values, index, mask, powers, SIZE: tl.constexpr):
    """Contribution of unsigned values (int64) of `SIZE` bytes at element `index` (int64) of their tensor."""
    byte = index * SIZE
    keys = power(powers, tl.where(mask, byte >> 2, 0))
    return tl.sum(tl.where(mask, (values << ((byte & 3) * 8)) * keys, 0))
