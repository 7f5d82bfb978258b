"""Digest of a tensor's bytes as they stand on the wire: 64 bits, keyed by position, additive over pieces.

    digest = sum over 32-bit words w(p) of the tensor:  w(p) * g^p  mod 2^64,   g = 0x9E3779B97F4A7C15

p is the word's position in the whole tensor, row-major, little-endian, zero-padded to whole words. The sum is linear in each
byte, so a piece at any byte offset contributes its own positions and the contributions of pieces add up, in any order and
whatever layout the bytes have landed in.

g is 5 modulo 8, so g^p is odd and g^i - g^j has at most 2 + log2(i - j) trailing zero bits. Hence one changed byte, or two
unequal bytes or words that change places, always change the digest of a tensor of up to 8 GiB; other damage is missed with a
probability of about 2^-32 at worst (it touches top bytes only), 2^-64 in general. It is no defence against an attacker: that
is the token's and the network policy's part.

numpy does about 4 GB/s on one core; torch is for devices, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp8rl_workers.errors import InvalidModelError

if TYPE_CHECKING:
    import torch

    from fp8rl_workers.weights.cast_rounding import Shard

WORD = 4
SPAN = 1 << 15
BASE = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1

_SPANS_AT_ONCE = 64


@cache
def powers(count: int, base: int = BASE) -> NDArray[np.uint64]:
    """base^0 to base^(count - 1) modulo 2^64."""
    found = np.ones(1, dtype=np.uint64)
    while len(found) < count:
        found = np.concatenate([found, found * np.uint64(pow(base, len(found), 1 << 64))])
    return found[:count]


def _whole_words(data: NDArray[np.uint8], offset: int) -> NDArray[np.uint32]:
    """`data` as words, after zeros for the bytes between the word that holds `offset` and `offset` itself."""
    lead = offset % WORD
    size = lead + len(data)
    if size % WORD or lead:
        padded = np.zeros(size + -size % WORD, dtype=np.uint8)
        padded[lead:size] = data
        data = padded
    return data.view(np.uint32)


def digest_numpy(data: NDArray[np.uint8], offset: int = 0) -> int:
    """Contribution of `data` (uint8, one dimension, contiguous) that stands at byte `offset` of its tensor."""
    words = _whole_words(data, offset)
    buffer = np.empty(min(SPAN, len(words)), dtype=np.uint64)
    total = 0
    for start in range(0, len(words), SPAN):
        piece = words[start : start + SPAN]
        out = buffer[: len(piece)]
        np.copyto(out, piece)
        np.multiply(out, powers(SPAN)[: len(piece)], out=out)
        total += int(np.add.reduce(out)) * pow(BASE, start, 1 << 64)
    return total * pow(BASE, offset // WORD, 1 << 64) & MASK64


def digest_torch(data: torch.Tensor, offset: int = 0) -> int:
    """As `digest_numpy`, for uint8 of one dimension on any device."""
    import torch

    if not data.numel():
        return 0
    lead = offset % WORD
    tail = -(lead + data.numel()) % WORD
    if lead or tail or data.storage_offset() % WORD:
        data = torch.nn.functional.pad(data, (lead, tail)).clone()
    words = data.view(torch.int32)
    keys = torch.from_numpy(powers(SPAN).view(np.int64)).to(data.device)
    sums = []
    for start in range(0, words.numel(), _SPANS_AT_ONCE * SPAN):
        piece = words[start : start + _SPANS_AT_ONCE * SPAN].to(torch.int64) & 0xFFFFFFFF
        rows = torch.nn.functional.pad(piece, (0, -piece.numel() % SPAN)).view(-1, SPAN)
        sums.append((rows * keys).sum(dim=1))
    spans: list[int] = torch.cat(sums).tolist()
    total = sum(value * pow(BASE, offset // WORD + SPAN * i, 1 << 64) for i, value in enumerate(spans))
    return int(total) & MASK64


def _runs(shape: tuple[int, ...], shard: Shard) -> tuple[NDArray[np.int64], int]:
    """Element offsets, in the whole tensor, of the contiguous runs of a piece, and the elements of each run."""
    axis = len(shape) - 1
    while axis > 0 and shape[axis] == shard.full_shape[axis]:
        axis -= 1
    stride = [math.prod(shard.full_shape[a + 1 :]) for a in range(len(shape))]
    starts = np.array([shard.start[axis] * stride[axis]] if shape else [0], dtype=np.int64)
    for a in reversed(range(axis)):
        rows = (np.arange(shape[a], dtype=np.int64) + shard.start[a]) * stride[a]
        starts = (rows[:, None] + starts[None, :]).reshape(-1)
    return starts, math.prod(shape[max(axis, 0) :])


def digest_shard_numpy(data: NDArray[np.uint8], shape: tuple[int, ...], shard: Shard, itemsize: int) -> int:
    """Contribution of a piece: `data` its bytes (uint8, one dimension), `shape` in elements of `itemsize` bytes."""
    starts, _ = _runs(shape, shard)
    offsets = starts * itemsize
    if len(offsets) == 1:
        return digest_numpy(data, int(offsets[0]))
    return _digest_runs(data.reshape(len(offsets), -1), offsets)


def _digest_runs(runs: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
    """Contribution of equally long runs `[runs, bytes]` (rows contiguous) that stand at these byte offsets of their tensor."""
    if runs.shape[1] % WORD or (offsets % WORD).any() or any(stride % WORD for stride in runs.strides[:-1]):
        pieces = (np.ascontiguousarray(run) for run in runs)
        return sum(digest_numpy(piece, int(at)) for piece, at in zip(pieces, offsets, strict=True)) & MASK64
    words = runs.view(np.uint32)
    first = int(offsets.min()) // WORD
    total = 0
    for start in range(0, len(offsets), SPAN):
        keys = _keys((offsets[start : start + SPAN] // WORD - first).astype(np.uint64))
        inner = words[start : start + SPAN]
        total += int(np.add.reduce(_row_sums(inner) * keys))
    return total * pow(BASE, first, 1 << 64) & MASK64


def digest_rows(view: torch.Tensor, position: int, step: int) -> int:
    """Contribution of a piece as it lies, rows apart in memory and in its tensor.

    Args:
        view: 2-D of any dtype and device, the last dimension contiguous.
        position: byte position of its first element in its tensor.
        step: bytes in the tensor from one row of the view to the next.
    """
    import torch

    if not view.numel():
        return 0
    data = view.detach().view(torch.uint8)
    rows, size = data.shape
    if step == size or rows == 1:
        flat = data.contiguous().view(-1)
        if flat.device.type == "cpu":
            return digest_numpy(flat.numpy(), position)
        return digest_torch(flat, position)
    if data.device.type == "cpu":
        return _digest_runs(data.numpy(), position + step * np.arange(rows, dtype=np.int64))
    return sum(digest_torch(row.contiguous(), position + step * i) for i, row in enumerate(data)) & MASK64


def _keys(position: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """g^position for each position."""
    outer = powers(int(position.max()) // SPAN + 1, pow(BASE, SPAN, 1 << 64))
    keys: NDArray[np.uint64] = powers(SPAN)[position % np.uint64(SPAN)] * outer[position // np.uint64(SPAN)]
    return keys


def _row_sums(words: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Sum over each row of `word * g^column`."""
    total = np.zeros(len(words), dtype=np.uint64)
    for start in range(0, words.shape[1], SPAN):
        piece = words[:, start : start + SPAN]
        keys = powers(SPAN)[: piece.shape[1]]
        sums = np.array([np.dot(row.astype(np.uint64), keys) for row in piece], dtype=np.uint64)
        total += sums * np.uint64(pow(BASE, start, 1 << 64))
    return total


def digest(tensor: torch.Tensor, shard: Shard | None = None) -> int:
    """Digest of a tensor of any dtype and device, or the contribution of a piece of one.

    Args:
        tensor: the values; non-contiguous input is copied.
        shard: where the piece stands in its tensor; None for the whole.
    """
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    shape = tuple(tensor.shape)
    whole = shard is None or shape == shard.full_shape
    if data.device.type == "cpu":
        array: NDArray[Any] = data.numpy()
        if shard is None or whole:
            return digest_numpy(array)
        return digest_shard_numpy(array, shape, shard, tensor.element_size())
    if shard is None or whole:
        return digest_torch(data)
    starts, run = _runs(shape, shard)
    size = run * tensor.element_size()
    pieces = (
        digest_torch(data[i * size : (i + 1) * size], int(s) * tensor.element_size()) for i, s in enumerate(starts)
    )
    return sum(pieces) & MASK64


def to_hex(value: int) -> str:
    """16 hexadecimal digits."""
    return f"{value & MASK64:016x}"


def of_stack(digests: Sequence[int], nbytes: int) -> int:
    """Digest of members that stand one after the other, each `nbytes` long, from theirs.

    Raises:
        InvalidModelError: they do not begin on words, so that their digests say nothing about the whole.
    """
    if nbytes % WORD and len(digests) > 1:
        raise InvalidModelError(
            f"{len(digests)} experts of {nbytes} bytes each, and {nbytes} % {WORD} = {nbytes % WORD}: held one by one they cannot "
            "travel as a stack; hold them in one parameter"
        )
    return sum(value * pow(BASE, e * nbytes // WORD, 1 << 64) for e, value in enumerate(digests)) & MASK64


def joined(values: Sequence[int]) -> str:
    """16 hexadecimal digits for each digest."""
    return np.array(values, dtype=">u8").tobytes().hex()
