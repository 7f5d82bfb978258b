"""Casts, digests and copies that every backend is compared on: random values, edges, zeros, subnormals, stacks, strides."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8rl_workers.weights.kernels import CastItem, Piece, whole
from fp8rl_workers.weights.kernels.plans import part_shapes
from fp8rl_workers.weights.kernels.tables import Tile

SMALL: Mapping[str, Tile] = {
    "blockwise": Tile(128, 128, 4),
    "mxfp8": Tile(64, 128, 4),
    "channel": Tile(64, 128, 4),
    "bf16": Tile(32, 128, 4),
    "digest": Tile(16, 256, 4),
    "copy": Tile(16, 128, 4),
}
"""Tiles small enough for small cases to have several, and for the interpreter, whose time goes by programs."""

SMALL_MASKED: Mapping[str, Tile] = {
    "blockwise": Tile(128, 128, 8),
    "mxfp8": Tile(64, 64, 4),
    "channel": Tile(64, 128, 4),
    "bf16": Tile(32, 64, 4),
}


def item(names: tuple[str, ...], source: torch.Tensor, wire: str) -> CastItem:
    """An item with outputs of its own; wire `fp32` is bf16 with an output in fp32."""
    if wire == "fp32":
        return CastItem(names, source, "bf16", (torch.full(source.shape, 7.0, device=source.device),))
    shapes = part_shapes(tuple(source.shape), wire)
    outputs = tuple(torch.full(shape, 7, dtype=torch.uint8, device=source.device).to(dtype) for shape, dtype in shapes)
    return CastItem(names, source, wire, outputs)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes: normal times powers of two, a row of zeros, subnormals, one row of exact ties."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator)
    x = x * torch.exp2(torch.randint(-24, 3, shape, generator=generator).float())
    flat = x.view(-1, shape[-1])
    flat[0] = 0
    if len(flat) > 3:
        flat[1] = torch.randint(-127, 128, flat[1].shape, generator=generator).float() * 2.0**-133
        flat[2] = torch.randint(-480, 481, flat[2].shape, generator=generator).float() * 0.5
        flat[3, 0] = -0.0
    return x.to(dtype).to(device)


def cast_cases(device: str = "cpu", seed: int = 0) -> list[tuple[tuple[str, ...], torch.Tensor, str]]:
    """Names, sources and wires."""

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return values(*shape, dtype=dtype, device=device, seed=seed)

    fp32 = torch.float32
    zeros = torch.zeros(128, 256, dtype=torch.bfloat16, device=device)
    zeros[:, 128:] = 1e-12
    found = [
        (("bf.flat",), of(64, 128), "bf16"),
        (("bf.five",), of(5), "bf16"),
        (("bf.master",), of(33, 128, dtype=fp32), "bf16"),
        (("bf.columns",), of(33, 256, dtype=fp32)[:, 128:], "bf16"),
        (("bf.odd",), of(33, 129, dtype=fp32)[:, 64:], "bf16"),
        (("bf.a", "bf.b"), of(2, 7, 64)[:, :5], "bf16"),
        (("bf.conv",), of(12, 1, 4), "bf16"),
        (("wide.master",), of(7, 9, dtype=fp32), "fp32"),
        (("wide.bf16",), of(300), "fp32"),
    ]
    for wire in ("blockwise", "mxfp8", "channel"):
        found += [
            ((f"{wire}.even",), of(256, 128), wire),
            ((f"{wire}.edge",), of(130, 160), wire),
            ((f"{wire}.thin",), of(3, 32), wire),
            ((f"{wire}.zeros",), zeros, wire),
            ((f"{wire}.master",), of(128, 256, dtype=fp32), wire),
            ((f"{wire}.master_edge",), of(65, 96, dtype=fp32), wire),
            ((f"{wire}.a", f"{wire}.b"), of(2, 128, 256)[:, :, 128:], wire),
            ((f"{wire}.c", f"{wire}.d", f"{wire}.e"), of(3, 40, 96), wire),
            ((f"{wire}.only",), of(1, 16, 128), wire),
        ]
    found += [
        (("blockwise.square",), of(128, 128), "blockwise"),
        (("blockwise.ragged",), of(130, 71), "blockwise"),
        (("channel.ragged",), of(9, 71), "channel"),
        (("channel.f", "channel.g"), of(2, 5, 71), "channel"),
    ]
    return found


def digest_cases(device: str = "cpu") -> list[list[Piece]]:
    """Pieces of tensors: whole, columns side by side, at any byte, long with a tail."""
    table = torch.randn(64, 96, device=device)
    raw = table.view(torch.uint8)
    return [
        [whole(table)],
        [Piece(table[:, :48], 0, 384), Piece(table[:, 48:], 192, 384)],
        [Piece(table[:, :50], 0, 384), Piece(table[:, 50:], 200, 384)],
        [Piece(raw[:, :51], 0, 384), Piece(raw[:, 51:], 51, 384)],
        [whole(raw.flatten()[3:77])],
        [whole(torch.randn(70000, device=device))],
        [whole(torch.randint(0, 255, (40007,), dtype=torch.uint8, device=device))],
        [whole(torch.zeros(0, device=device))],
    ]


def copy_cases(device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sources and targets: contiguous, strided on either side, at any byte."""
    table = torch.randn(64, 96, device=device)
    raw = table.view(torch.uint8)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return [
        (table, empty(64, 96)),
        (table[:, :48], empty(64, 96)[:, 48:]),
        (table[:, :50], empty(64, 99)[:, 7:57]),
        (raw[:, 3:77], empty(64, 80, dtype=torch.uint8)[:, 1:75]),
        (raw.view(1, -1)[:, :20007], empty(1, 20007, dtype=torch.uint8)),
    ]
