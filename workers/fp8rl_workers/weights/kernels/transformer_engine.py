"""`CastPlan` by Transformer Engine's quantizers: `castBackend: te`, for the day that the kernels go wrong.

TE casts blockwise with power-of-two scales and, on Blackwell, MXFP8, a whole matrix per call; all else goes to Triton. Its padding is trimmed. Its
MXFP8 writes scale byte 0 for groups of zeros and for groups under 448 * 2^-127, which MoE kernels refuse: a matrix with such
a byte is cast by the reference. Digests are taken from the outputs afterwards, by `TritonDigestPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8rl_workers.errors import InvalidInputError, NonFiniteError
from fp8rl_workers.weights.cast import check_finite
from fp8rl_workers.weights.cast_blockwise import AMAX_FLOOR, BLOCK
from fp8rl_workers.weights.cast_mxfp8 import GROUP, quantize_mxfp8
from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.kernels.plain import members
from fp8rl_workers.weights.kernels.plans import CastItem, ScaleFormat, check_items, identity, whole
from fp8rl_workers.weights.kernels.triton_plans import TritonCastPlan, TritonDigestPlan

MXFP8_CAPABILITY = (10, 0)
"""Below it TE's MXFP8 quantizer writes nothing and says nothing (seen with 2.12 on Hopper)."""


def quantizers() -> tuple[Any, Any]:
    """TE's quantizers of 128x128 blocks with power-of-two scales, and of MXFP8.

    Raises:
        InvalidInputError: Transformer Engine is not installed.
    """
    try:
        import transformer_engine.pytorch as te  # noqa: F401
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    except ImportError as error:
        raise InvalidInputError(
            "weightSync.castBackend: value te: Transformer Engine is not installed here; set castBackend: auto (the same bits)"
        ) from error
    e4m3 = tex.DType.kFloat8E4M3
    blocks = Float8BlockQuantizer(
        e4m3, rowwise=True, columnwise=False, amax_epsilon=AMAX_FLOOR, force_pow_2_scales=True, block_scaling_dim=2
    )
    return blocks, MXFP8Quantizer(e4m3, rowwise=True, columnwise=False)


def taken(item: CastItem, scale_format: ScaleFormat) -> bool:
    """TE casts this item: its kernels want rows and columns in whole blocks."""
    if item.wire == "blockwise":
        return scale_format == "pow2" and not (item.source.shape[-2] % BLOCK or item.source.shape[-1] % BLOCK)
    capability = torch.cuda.get_device_capability(item.source.device)
    return item.wire == "mxfp8" and capability >= MXFP8_CAPABILITY and item.source.shape[-2] % GROUP == 0


def parts(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and padded scales of what a quantizer gives; TE has no public names for them."""
    return found._rowwise_data, found._rowwise_scale_inv  # noqa: SLF001


def cast_blocks(quantizer: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales of a BF16 matrix, padding trimmed."""
    found = quantizer(weight)
    codes, scales = parts(found)
    return codes, scales[: weight.shape[0] // BLOCK, : weight.shape[1] // BLOCK]


def cast_groups(quantizer: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scale bytes of a BF16 matrix, padding trimmed; by the reference where a byte would be 0."""
    found = quantizer(weight)
    codes, scales = parts(found)
    scales = scales.view(torch.uint8)[: weight.shape[0], : weight.shape[1] // GROUP]
    if bool((scales == 0).any()):
        codes, scales = quantize_mxfp8("", weight, None, None).values()
        return codes.view(torch.uint8), scales
    return codes, scales


class EngineCastPlan:
    """`CastPlan` by Transformer Engine where it has a cast, by Triton elsewhere and for stochastic rounding."""

    def __init__(self, items: Sequence[CastItem], scale_format: ScaleFormat) -> None:
        check_items(items)
        self._blocks, self._groups = quantizers()
        self._identity = identity(items)
        self._mine = [item for item in items if taken(item, scale_format)]
        self._all = TritonCastPlan(items, scale_format)
        self._rest = TritonCastPlan([item for item in items if not taken(item, scale_format)], scale_format)
        self._digests = TritonDigestPlan([[whole(out)] for item in items for out in item.outputs])
        self._rounding: Rounding | None = None

    def matches(self, items: Sequence[CastItem]) -> bool:
        """The plan was made for these names, formats and addresses."""
        return self._identity == identity(items)

    def run(self, rounding: Rounding | None = None) -> None:
        """Cast all tensors on the current stream."""
        self._rounding = rounding
        if rounding is not None:
            self._all.run(rounding)
            return
        self._rest.run()
        for item in self._mine:
            for _, source, (codes, scales) in members(item):
                self._cast(item, source, codes, scales)
        self._digests.run()

    def _cast(self, item: CastItem, source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        weight = source.detach().to(torch.bfloat16).contiguous().view(source.shape[-2:])
        cast, quantizer = (cast_blocks, self._blocks) if item.wire == "blockwise" else (cast_groups, self._groups)
        found = cast(quantizer, weight)
        codes.view(torch.uint8).view(found[0].shape).copy_(found[0])
        scales.view(found[1].shape).copy_(found[1])

    def finish(self) -> list[int]:
        """Wait for `run`; digest of each output in the order of the items.

        Raises:
            NonFiniteError: names every tensor that holds NaN or Inf.
        """
        if self._rounding is not None:
            return self._all.finish()
        faults = []
        for check in (self._rest.finish, self._check):
            try:
                check()
            except NonFiniteError as error:
                faults.append(str(error))
        if faults:
            raise NonFiniteError("; ".join(faults))
        return self._digests.finish()

    def _check(self) -> None:
        found = []
        for item in self._mine:
            for name, source, _ in members(item):
                try:
                    check_finite(name, source.detach().to(torch.bfloat16))
                except NonFiniteError as error:
                    found.append(str(error))
        if found:
            raise NonFiniteError("; ".join(found))
