"""MXFP8 1x32: one power-of-two scale per 32 consecutive elements of a row; K must be a multiple of 32.

`e = ceil(log2(amax / 448))`, scale byte `e + 127` (E8M0), codes `clamp(x / 2^e, ±448)`. On the wire `<weight>`
float8_e4m3fn and `<weight>_scale` uint8 `[..., rows, K/32]`: never padded, never float8_e8m0fnu.

Byte 0 never occurs, since MoE kernels refuse it (2^-127 is subnormal): `e` is clamped to [-126, 127], and an all-zero group
gets byte 127 (scale 1), because dead experts with tiny scales gave NaN in others. Transformer Engine writes byte 0 for both:
its zero groups differ from ours in the scale byte only, its groups with `0 < amax <= 448 * 2^-127` in code and byte.
The exponent is taken from the bits of amax (448 = 0.875 * 2^9), not through log2, so that every device agrees.
"""

from __future__ import annotations

import torch

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.cast_rounding import Rounding, Shard, round_codes

GROUP = 32
BIAS = 127
ZERO_GROUP_BYTE = 127
SMALLEST_EXPONENT = -126


def group_exponents(amax: torch.Tensor) -> torch.Tensor:
    """`ceil(log2(amax / 448))` clamped to [-126, 127], 0 for amax 0; int32 of amax's shape (fp32, finite, >= 0)."""
    mantissa, exponent = torch.frexp(amax)
    needed = exponent - 9 + (mantissa > 0.875).to(torch.int32)
    return torch.where(amax > 0, needed.clamp(SMALLEST_EXPONENT, 127), ZERO_GROUP_BYTE - BIAS)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 `2^exponent` for int32 exponents in [-126, 127]."""
    return ((exponent + BIAS) << 23).to(torch.int32).view(torch.float32)


def quantize_mxfp8(
    name: str, x: torch.Tensor, rounding: Rounding | None, shard: Shard | None
) -> dict[str, torch.Tensor]:
    """`{"": codes, "_scale": bytes}` of BF16 `[..., rows, K]`.

    Raises:
        InvalidModelError: K is no multiple of 32.
    """
    columns = x.shape[-1]
    if columns % GROUP:
        raise InvalidModelError(
            f"{name}: mxfp8 needs K % 32 == 0, but K = {columns} = 32 * {columns // GROUP} + {columns % GROUP}; "
            "add the layer to precision.ignoredLayers (it stays BF16) or choose wire: blockwise"
        )
    groups = x.to(torch.float32).reshape(*x.shape[:-1], columns // GROUP, GROUP)
    exponent = group_exponents(groups.abs().amax(dim=-1))
    scaled = (groups * power_of_two(-exponent).unsqueeze(-1)).flatten(-2)
    return {"": round_codes(scaled, name, rounding, shard), "_scale": (exponent + BIAS).to(torch.uint8)}


def dequantize_mxfp8(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """BF16 `codes * 2^(byte - 127)`."""
    scale = power_of_two(parts["_scale"].to(torch.int32) - BIAS)
    codes = parts[""].to(torch.float32).reshape(*scale.shape, GROUP)
    return (codes * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
