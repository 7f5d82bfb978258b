"""Casts, digests and copies of all tensors of a model in a few launches, planned once and run at every sync.

    plans               what a plan is given and answers: CastItem, Piece, the protocols CastPlan, DigestPlan, CopyPlan
    plain               the three in plain torch, for any device
    tables              what a launch of many tensors is told: items, tiles, keys (pure)
    triton_plans        the three by Triton; `triton_cast` (on `triton_tiles`) and `triton_moves` are the kernels,
                        `triton_numbers` their arithmetic
    transformer_engine  casts by TE's quantizers, where it has them

All backends give the same bits; plain torch, which is `cast` and `digest`, decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.weights.kernels.plain import TorchCastPlan, TorchCopyPlan, TorchDigestPlan
from fp8rl_workers.weights.kernels.plans import (
    Backend,
    CastItem,
    CastPlan,
    CopyPlan,
    DigestPlan,
    Piece,
    ScaleFormat,
    whole,
)

__all__ = [
    "Backend",
    "CastItem",
    "CastPlan",
    "CopyPlan",
    "DigestPlan",
    "Piece",
    "cast_plan",
    "copy_plan",
    "digest_plan",
    "whole",
]


def resolve(backend: Backend, device: torch.device) -> Backend:
    """The backend that `auto` stands for on a device: triton on CUDA, torch elsewhere.

    Raises:
        InvalidInputError: a backend that does not run there.
    """
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend != "torch" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidInputError(
            f"weightSync.castBackend: value {backend}: runs on CUDA, and the weights are on {device}; set castBackend: auto"
        )
    return backend


def cast_plan(items: Sequence[CastItem], scale_format: ScaleFormat, backend: Backend = "auto") -> CastPlan:
    """Plan casts of many tensors of one device.

    Args:
        items: what to cast and where to.
        scale_format: scales of blockwise; the other formats have one kind.
        backend: who casts; all give the same bits.

    Raises:
        InvalidInputError: a backend that does not run on this device, or is not installed.
        InvalidModelError: an item that its format cannot hold.
    """
    chosen = resolve(backend, items[0].source.device if items else torch.device("cpu"))
    if chosen == "torch":
        return TorchCastPlan(items, scale_format)
    if chosen == "te":
        from fp8rl_workers.weights.kernels.transformer_engine import EngineCastPlan

        return EngineCastPlan(items, scale_format)
    from fp8rl_workers.weights.kernels.triton_plans import TritonCastPlan

    return TritonCastPlan(items, scale_format)


def digest_plan(tensors: Sequence[Sequence[Piece]], backend: Backend = "auto") -> DigestPlan:
    """Plan digests of many tensors of one device, each given as its pieces."""
    device = next((piece.view.device for pieces in tensors for piece in pieces), torch.device("cpu"))
    if resolve(backend, device) == "torch":
        return TorchDigestPlan(tensors)
    from fp8rl_workers.weights.kernels.triton_plans import TritonDigestPlan

    return TritonDigestPlan(tensors)


def copy_plan(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], backend: Backend = "auto") -> CopyPlan:
    """Plan copies of 2-D views (source, target) of the same shape and dtype, all on one device."""
    if resolve(backend, pairs[0][0].device if pairs else torch.device("cpu")) == "torch":
        return TorchCopyPlan(pairs)
    from fp8rl_workers.weights.kernels.triton_plans import TritonCopyPlan

    return TritonCopyPlan(pairs)
