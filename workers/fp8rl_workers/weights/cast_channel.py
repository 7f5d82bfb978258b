"""Per channel: one BF16 scale per output row, the codes and scales of compressed-tensors' dynamic FP8, bit for bit.

compressed-tensors computes in the weight's own dtype: `scale = amax / 448` rounded to BF16 (0 becomes the BF16 epsilon
2^-7), the quotient `x / scale` rounded to BF16, then e4m3. The double rounding is theirs and is kept: a release that their
tools read must be the one that they would have written. On the wire `<weight>` float8_e4m3fn and `<weight>_scale` bfloat16
`[..., rows, 1]`. Their symmetric zero point is added as 0, which turns -0 into +0.

The scale has 8 bits, so `codes * scale` is not exact in BF16: dequantized weights give the same codes again, but the scale may
move by its last bit, and an engine that multiplies codes natively sees the unrounded product.
"""

from __future__ import annotations

import torch

from fp8rl_workers.weights.cast_rounding import E4M3_MAX, Rounding, Shard, round_codes


def quantize_channel(
    name: str, x: torch.Tensor, rounding: Rounding | None, shard: Shard | None
) -> dict[str, torch.Tensor]:
    """`{"": codes, "_scale": scales}` of BF16 `[..., rows, K]`."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.bfloat16).eps), scale)
    scaled = (x / scale + torch.zeros_like(scale)).to(torch.float32)
    return {"": round_codes(scaled, name, rounding, shard), "_scale": scale}


def dequantize_channel(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """BF16 `codes * scale` (product in fp32)."""
    return (parts[""].to(torch.float32) * parts["_scale"].to(torch.float32)).to(torch.bfloat16)
