"""Blockwise 128x128: one fp32 scale per block of 128 rows and 128 columns, edge blocks smaller (any shape is accepted).

`scale = max(amax, 1e-10) / 448`, codes `clamp(x / scale, ±448)` to e4m3fn; on the wire `<weight>` float8_e4m3fn of the
weight's shape and `<weight>_scale_inv` fp32 `[..., ceil(M/128), ceil(N/128)]`. With `pow2` the scale is rounded up to a
power of two, before the codes: the same bits as Transformer Engine, SkyRL and vLLM's online cast (reference 0 and 6).
All-zero blocks get scale 1e-10/448 (pow2: 2^-42) and codes 0. Divisions are by tensors on the device, since torch turns a
division by a Python number on CUDA into a multiplication by its reciprocal.
"""

from __future__ import annotations

from typing import Literal

import torch

from fp8rl_workers.weights.cast_rounding import E4M3_MAX, Rounding, Shard, round_codes

BLOCK = 128
AMAX_FLOOR = 1e-10


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= scale; fp32, positive and normal."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def block_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each 128x128 block of `[..., M, N]`: fp32 `[..., ceil(M/128), ceil(N/128)]`."""
    rows, columns = x.shape[-2:]
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(x.abs(), pad) if any(pad) else x.abs()
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    blocks = padded.reshape(*x.shape[:-2], tall, BLOCK, wide, BLOCK)
    return blocks.amax(dim=(-3, -1)).to(torch.float32)


def expand_blocks(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """One value per element from one per block, cropped to `[..., rows, columns]`."""
    tall = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(BLOCK, dim=-1)[..., :columns]


def quantize_blockwise(
    name: str,
    x: torch.Tensor,
    scale_format: Literal["fp32", "pow2"],
    rounding: Rounding | None,
    shard: Shard | None,
) -> dict[str, torch.Tensor]:
    """`{"": codes, "_scale_inv": scales}` of BF16 `[..., M, N]`."""
    amax = block_amax(x)
    scale = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)
    if scale_format == "pow2":
        scale = round_up_to_power_of_two(scale)
    scaled = x.to(torch.float32) / expand_blocks(scale, x.shape[-2], x.shape[-1])
    return {"": round_codes(scaled, name, rounding, shard), "_scale_inv": scale}


def dequantize_blockwise(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """BF16 `codes * scale` (product in fp32)."""
    codes = parts[""].to(torch.float32)
    scale = expand_blocks(parts["_scale_inv"], codes.shape[-2], codes.shape[-1])
    return (codes * scale).to(torch.bfloat16)
