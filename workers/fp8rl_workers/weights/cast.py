"""BF16 weights to the wire's parts and back: the reference in plain torch that every fast path must equal bit for bit.

`quantize(name, weight, wire)` gives a dict from suffix to tensor; the wire name of a part is the HF name plus the suffix:

    blockwise   ""  float8_e4m3fn [.., M, N]    "_scale_inv"  float32  [.., ceil(M/128), ceil(N/128)]
    mxfp8       ""  float8_e4m3fn [.., M, K]    "_scale"      uint8    [.., M, K/32]
    channel     ""  float8_e4m3fn [.., M, K]    "_scale"      bfloat16 [.., M, 1]
    bf16        ""  bfloat16      (any shape)

(`q_proj.weight` becomes `q_proj.weight` and `q_proj.weight_scale_inv`.) Leading dimensions are stacks: experts [E, N, K] in
one call, equal to E calls. The source is the BF16 weight that the trainer computes with, never the fp32 master (2.3 % of the
codes would differ), so other dtypes are refused. Non-contiguous input is accepted; results are contiguous.
NaN and Inf are refused with the tensor's name. `dequantize` gives the BF16 weight that trainer and engine both compute with.

A shard casts like its part of the whole when its cuts fall on the format's blocks (128 rows and columns, 32 columns, whole
rows); that is the caller's to check. With stochastic rounding it says where it stands (`Shard`).
The fast paths (Triton, Transformer Engine) of many tensors per launch are in `kernels`, under `weightSync.castBackend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from fp8rl_workers.errors import InvalidModelError, NonFiniteError
from fp8rl_workers.weights.cast_blockwise import dequantize_blockwise, quantize_blockwise
from fp8rl_workers.weights.cast_channel import dequantize_channel, quantize_channel
from fp8rl_workers.weights.cast_mxfp8 import dequantize_mxfp8, quantize_mxfp8
from fp8rl_workers.weights.cast_rounding import Rounding, Shard

if TYPE_CHECKING:
    from fp8rl_workers.protocol import EngineWire

__all__ = ["Rounding", "Shard", "check_finite", "dequantize", "fake_quantize", "quantize"]


def check_source(name: str, weight: torch.Tensor) -> None:
    """Refuse what no cast starts from.

    Raises:
        TypeError: the weight is not BF16.
        NonFiniteError: NaN or Inf.
    """
    if weight.dtype != torch.bfloat16:
        raise TypeError(
            f"{name}: the source of a cast is the BF16 weight that the trainer computes with, not {weight.dtype}"
        )
    check_finite(name, weight)


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Refuse NaN and Inf.

    Raises:
        NonFiniteError: says the tensor, how many values, and where the first one is.
    """
    bad = ~torch.isfinite(weight)
    count = int(bad.sum())
    if count:
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"{name}: {count} of {weight.numel()} values are not finite, the first at {list(first)} is "
            f"{float(weight[first])}; the step that made it has diverged, resume from an earlier checkpoint"
        )


def quantize(
    name: str,
    weight: torch.Tensor,
    wire: EngineWire,
    *,
    scale_format: Literal["fp32", "pow2"] = "pow2",
    rounding: Rounding | None = None,
    shard: Shard | None = None,
) -> dict[str, torch.Tensor]:
    """Parts of one weight on the wire, by suffix (table in the module's docstring).

    Args:
        name: HF name; in errors, and the key of stochastic rounding.
        weight: BF16 of any device; at least two dimensions unless `wire` is bf16.
        wire: format.
        scale_format: scales of blockwise; the other formats have one kind.
        rounding: stochastic under this key; None rounds to the nearest.
        shard: where `weight` stands in its tensor, for stochastic rounding of a piece.

    Raises:
        TypeError: the weight is not BF16.
        NonFiniteError: NaN or Inf.
        InvalidModelError: a shape that the format cannot hold.
    """
    weight = weight.detach()
    check_source(name, weight)
    if wire == "bf16":
        return {"": weight.contiguous()}
    if weight.dim() < 2:
        raise InvalidModelError(
            f"{name}: wire {wire} needs a matrix or a stack of them, not shape {list(weight.shape)}"
        )
    if wire == "blockwise":
        parts = quantize_blockwise(name, weight, scale_format, rounding, shard)
    elif wire == "mxfp8":
        parts = quantize_mxfp8(name, weight, rounding, shard)
    else:
        parts = quantize_channel(name, weight, rounding, shard)
    return {suffix: part.contiguous() for suffix, part in parts.items()}


def dequantize(parts: dict[str, torch.Tensor], wire: EngineWire) -> torch.Tensor:
    """The BF16 weight that the parts stand for."""
    if wire == "blockwise":
        return dequantize_blockwise(parts)
    if wire == "mxfp8":
        return dequantize_mxfp8(parts)
    if wire == "channel":
        return dequantize_channel(parts)
    return parts[""]


def fake_quantize(
    name: str,
    weight: torch.Tensor,
    wire: EngineWire,
    *,
    scale_format: Literal["fp32", "pow2"] = "pow2",
    rounding: Rounding | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
    """`dequantize(quantize(weight))`: what the engine will compute with. Same arguments and errors as `quantize`."""
    return dequantize(quantize(name, weight, wire, scale_format=scale_format, rounding=rounding, shard=shard), wire)
