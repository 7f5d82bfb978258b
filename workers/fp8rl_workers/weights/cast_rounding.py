"""From scaled values to e4m3 codes: to the nearest, or stochastically with bits that both sides can compute.

e4m3fn has values up to 448, no infinity, and 8 values per binade down to 2^-6, below which the step is 2^-9. Codes of one
sign are ordered like their values, so the neighbour of a code is the code plus or minus one.

Stochastic rounding goes to the far neighbour with probability equal to the distance from the near one, in steps of that
gap: the expectation is the value itself, and a value on the grid never moves. Its bits come from a counter, not from a
state: splitmix64 of (key + element index), key = BLAKE2b of (seed, version, tensor name). Trainer and wire, CPU and GPU, a
whole tensor and its shards therefore draw the same bits. All steps are exact in fp32 or wrap in 64 bits: no device differs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

E4M3_MAX = 448.0

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class Rounding:
    """Key of stochastic rounding: the job's seed and the version of the weights that are rounded."""

    version: int
    seed: int = 0


@dataclass(frozen=True)
class Shard:
    """Where a piece stands in its whole tensor: the index of its first element in each dimension, and the whole shape."""

    start: tuple[int, ...]
    full_shape: tuple[int, ...]


def signed(value: int) -> int:
    """The 64-bit pattern `value` as torch's int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def rounding_key(name: str, rounding: Rounding) -> int:
    """64-bit key of a tensor under (seed, version)."""
    text = f"{rounding.seed}/{rounding.version}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def element_indices(shape: tuple[int, ...], shard: Shard | None, device: torch.device) -> torch.Tensor:
    """Row-major index in the whole tensor of each element of the piece, int64 of the piece's shape."""
    if shard is None:
        return torch.arange(math.prod(shape), device=device).view(shape)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (length, start, full) in enumerate(zip(shape, shard.start, shard.full_shape, strict=True)):
        positions = torch.arange(start, start + length, device=device)
        index = index * full + positions.view([-1 if a == axis else 1 for a in range(len(shape))])
    return index


def splitmix64(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser of each int64 (64-bit wrapping arithmetic)."""
    z = (z ^ _shift(z, 30)) * signed(_MIX1)
    z = (z ^ _shift(z, 27)) * signed(_MIX2)
    return z ^ _shift(z, 31)


def random_24_bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of `key + (index + 1) * golden`, its top 24 bits; int64 in [0, 2^24) of the index's shape."""
    return _shift(splitmix64((index + 1) * signed(_GOLDEN) + signed(key)), 40)


def nearest(scaled: torch.Tensor) -> torch.Tensor:
    """fp32 values to float8_e4m3fn, clamped to ±448, ties to even."""
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def stochastic(scaled: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 values to float8_e4m3fn, clamped to ±448; `random` int64 in [0, 2^24), of the same shape."""
    magnitude = scaled.abs().clamp(max=E4M3_MAX)
    code = magnitude.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    code = code - (_value(code) > magnitude).to(torch.int16)
    low = _value(code)
    gap = _value((code + 1).clamp(max=0x7E)) - low
    share = torch.where(gap > 0, (magnitude - low) / gap, torch.zeros_like(gap))
    code = code + (random.to(torch.float32) < share * float(1 << 24)).to(torch.int16)
    sign = torch.signbit(scaled).to(torch.int16) << 7
    return (code | sign).to(torch.uint8).view(torch.float8_e4m3fn)


def _value(code: torch.Tensor) -> torch.Tensor:
    """fp32 value of non-negative e4m3 codes."""
    return code.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def round_codes(scaled: torch.Tensor, name: str, rounding: Rounding | None, shard: Shard | None) -> torch.Tensor:
    """float8_e4m3fn codes of `scaled` (fp32): nearest without `rounding`, else stochastic."""
    if rounding is None:
        return nearest(scaled)
    index = element_indices(tuple(scaled.shape), shard, scaled.device)
    return stochastic(scaled, random_24_bits(rounding_key(name, rounding), index))
