"""The plans in plain torch, for any device: the reference of `cast` and `digest`, one tensor after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.weights.cast import check_finite, quantize
from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.digest import MASK64, digest, digest_rows
from fp8rl_workers.weights.kernels.plans import CastItem, Piece, ScaleFormat, check_items, identity


class TorchCastPlan:
    """`CastPlan` by `cast.quantize`."""

    def __init__(self, items: Sequence[CastItem], scale_format: ScaleFormat) -> None:
        check_items(items)
        self._items = tuple(items)
        self._scale_format = scale_format
        self._identity = identity(items)
        self._faults: list[str] = []

    def matches(self, items: Sequence[CastItem]) -> bool:
        """The plan was made for these names, formats and addresses."""
        return self._identity == identity(items)

    def run(self, rounding: Rounding | None = None) -> None:
        """Cast all tensors; those that are not finite are left out and named by `finish`."""
        self._faults = []
        for item in self._items:
            for name, source, outputs in members(item):
                self._cast(name, source, item, outputs, rounding)

    def _cast(
        self,
        name: str,
        source: torch.Tensor,
        item: CastItem,
        outputs: Sequence[torch.Tensor],
        rounding: Rounding | None,
    ) -> None:
        try:
            if outputs[0].dtype == torch.float32:
                check_finite(name, source.detach())
                outputs[0].copy_(source.detach())
                return
            weight = source.detach().to(torch.bfloat16)
            parts = quantize(name, weight, item.wire, scale_format=self._scale_format, rounding=rounding)
        except NonFiniteError as error:
            self._faults.append(str(error))
            return
        for out, part in zip(outputs, parts.values(), strict=True):
            out.copy_(part)

    def finish(self) -> list[int]:
        """Digest of each output in the order of the items.

        Raises:
            NonFiniteError: names every tensor that holds NaN or Inf.
        """
        if self._faults:
            raise NonFiniteError("; ".join(self._faults))
        return [digest(out) for item in self._items for out in item.outputs]


def members(item: CastItem) -> list[tuple[str, torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Name, source and outputs of each tensor of an item."""
    if len(item.names) == 1:
        return [(item.names[0], item.source, item.outputs)]
    return [(name, item.source[e], tuple(out[e] for out in item.outputs)) for e, name in enumerate(item.names)]


class TorchDigestPlan:
    """`DigestPlan` by `digest.digest_rows`."""

    def __init__(self, tensors: Sequence[Sequence[Piece]]) -> None:
        self._tensors = [list(pieces) for pieces in tensors]
        self._found: list[int] = []

    def run(self) -> None:
        """Digest all tensors."""
        self._found = [
            sum(digest_rows(piece.view, piece.position, piece.step) for piece in pieces) & MASK64
            for pieces in self._tensors
        ]

    def finish(self) -> list[int]:
        """Digest per tensor."""
        return self._found


class TorchCopyPlan:
    """`CopyPlan` by `copy_`."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = [(source.detach(), target.detach()) for source, target in pairs]

    def run(self) -> None:
        """Copy each source to its target."""
        for source, target in self._pairs:
            target.copy_(source)
