"""Tables of the Triton plans, decided in numpy on the host: which item, which tile, which keys, in which variant of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.digest import BASE, WORD, powers
from fp8rl_workers.weights.kernels.plans import CastItem, Piece

CAST_FIELDS = 16
MOVE_FIELDS = 10
SLOTS = 16
POWERS = 1 << 16
VECTOR = 16
NEAR = 1 << 23
"""Elements from row to row below which offsets within a tile fit 32 bits."""

LARGEST = 1 << 34
"""Bytes of one tensor whose positions the kernels can express: 2^32 words."""


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a kernel.

    Attributes:
        rows: of a tile.
        columns: of a tile, in elements; in words for digests and copies.
        warps: of a program.
        registers: most registers of a thread; None leaves it to the compiler.
    """

    rows: int
    columns: int
    warps: int
    registers: int | None = None


@dataclass
class Table:
    """Items of one launch.

    Attributes:
        tile: shape of the tiles.
        rows: fields of each item (the kernel's docstring has their order).
        counts: tiles of each item.
        programs: tiles of all items.
        steps: distinct distances, in words, from one row of a tensor to the next; an item's field points at its keys.
    """

    tile: Tile
    rows: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    programs: int = 0

    def step(self, words: int) -> int:
        """Index of the row keys for this distance."""
        return self.steps.setdefault(words, len(self.steps))

    def add(self, row: list[int], first_tile_field: int, count: int) -> None:
        """Append an item of `count` tiles."""
        row[first_tile_field] = self.programs
        self.rows.append(row)
        self.counts.append(count)
        self.programs += count

    def tile_records(self) -> NDArray[np.int32]:
        """Item, member, row and column of the tile of each program, int32 `[programs, 4]`; for casts."""
        items = self.tile_items()
        fields = self.fields().astype(np.int32)[:, 7:10][items] if self.rows else np.zeros((0, 3), np.int32)
        tall, wide, start = fields.T
        local = np.arange(self.programs, dtype=np.int32) - start
        member, rest = np.divmod(local, tall * wide)
        row, column = np.divmod(rest, wide)
        return np.stack([items, member, row, column], axis=1)

    def tile_items(self) -> NDArray[np.int32]:
        """Item of each program."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    def fields(self) -> NDArray[np.int64]:
        """Fields of all items, int64 `[items, fields]`."""
        return np.array(self.rows, dtype=np.int64)

    def row_keys(self) -> NDArray[np.int64]:
        """g^(step * r) for each distinct step and each row of a tile, int64 `[steps, rows]`."""
        keys = [powers(self.tile.rows, pow(BASE, step, 1 << 64)) for step in self.steps]
        return np.stack(keys or [powers(self.tile.rows)]).view(np.int64)


def key_powers() -> NDArray[np.int64]:
    """g^i, then g^(65536 i), 65536 of each."""
    return np.concatenate([powers(POWERS), powers(POWERS, pow(BASE, POWERS, 1 << 64))]).view(np.int64)


@dataclass(frozen=True)
class Grid:
    """A source seen as `[members, rows, columns]` with strides in elements."""

    members: int
    rows: int
    columns: int
    stack: int
    stride: int


def grid_of(item: CastItem, columns: int) -> Grid:
    """How an item is cut: as it is, or for bf16 as rows of `columns` where its members are contiguous."""
    source, members = item.source, len(item.names)
    inner = source.shape[1:] if members > 1 else source.shape
    stack = source.stride(0) if members > 1 else 0
    one = source[0] if members > 1 else source
    if item.wire != "bf16":
        return Grid(members, inner[-2], inner[-1], stack, one.stride(-2))
    if one.is_contiguous():
        width = columns if one.numel() % columns == 0 else one.numel()
        return Grid(members, one.numel() // max(width, 1), width, stack, width)
    try:
        flat = one.view(-1, one.shape[-1])
    except RuntimeError as error:
        raise InvalidModelError(
            f"{item.names[0]}: shape {list(source.shape)} with strides {list(source.stride())} is no matrix of rows one "
            "stride apart; pass a contiguous copy"
        ) from error
    return Grid(members, flat.shape[0], flat.shape[1], stack, flat.stride(0))


def is_aligned(item: CastItem, grid: Grid, tile: Tile) -> bool:
    """No edges, and every address and row in multiples of 16 bytes."""
    whole_rows = item.wire == "bf16" or grid.rows % tile.rows == 0
    strides = grid.stack % 8 == 0 and grid.stride % 8 == 0 and grid.stride < NEAR
    addresses = item.source.data_ptr() % VECTOR == 0 and item.outputs[0].data_ptr() % VECTOR == 0
    return whole_rows and grid.columns % tile.columns == 0 and strides and addresses


def cast_row(
    item: CastItem, grid: Grid, tile: Tile, *, aligned: bool, output: int, member: int
) -> tuple[list[int], int]:
    """Fields of an item and its number of tiles (steps and first tile are filled in by the caller)."""
    unit = VECTOR if aligned else 1
    elements = 8 if aligned else 1
    tall = -(-grid.rows // tile.rows)
    wide = 1 if item.wire == "channel" else -(-grid.columns // tile.columns)
    scales = item.outputs[1].data_ptr() if len(item.outputs) > 1 else 0
    row = [0] * CAST_FIELDS
    row[0:3] = [item.source.data_ptr() // unit, grid.stack // elements, grid.stride // elements]
    row[3:9] = [item.outputs[0].data_ptr(), scales, grid.rows, grid.columns, tall, wide]
    row[10:12] = [output, output + 1]
    row[14] = member
    return row, grid.members * tall * wide


def check_size(name: str, size: int) -> None:
    """Refuse a tensor that is longer than positions reach.

    Raises:
        InvalidModelError: more than 16 GiB.
    """
    if size > LARGEST:
        raise InvalidModelError(
            f"{name}: {size} bytes in one tensor, positions of digests reach {LARGEST}; split the tensor, or set "
            "weightSync.castBackend: torch"
        )


@dataclass(frozen=True)
class Run:
    """Rows of bytes: `address`, then for copies a second one, `rows` of `size` bytes, strides in bytes."""

    address: int
    other: int
    rows: int
    size: int
    stride: int
    other_stride: int


def unit_of(values: Sequence[int]) -> int:
    """The largest of 16, 4 and 1 that divides all values."""
    return next(unit for unit in (VECTOR, WORD, 1) if all(value % unit == 0 for value in values))


def flatten(run: Run, flat: bool, line: int) -> list[Run]:
    """One long row as lines of `line` bytes and what is left over; other runs as they are.

    `other` counts bytes (a second address, or positions in the tensor), so it moves along.
    """
    if not flat or run.rows * run.size <= line:
        return [run]
    lines, rest = divmod(run.rows * run.size, line)
    whole = Run(run.address, run.other, lines, line, line, line)
    done = lines * line
    return [whole] + ([Run(run.address + done, run.other + done, 1, rest, rest, rest)] if rest else [])


def bytes_of(view: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, rows, bytes of a row and bytes from row to row of a 2-D view.

    Raises:
        InvalidModelError: other dimensions, or elements of a row that are apart.
    """
    if view.dim() != 2 or (view.shape[1] > 1 and view.stride(1) != 1):
        raise InvalidModelError(
            f"a view of shape {list(view.shape)} with strides {list(view.stride())} is not 2-D with contiguous rows"
        )
    item = view.element_size()
    size = view.shape[1] * item
    stride = view.stride(0) * item if view.shape[0] > 1 else size
    return view.data_ptr(), view.shape[0], size, stride


def digest_runs(piece: Piece, line: int) -> list[Run]:
    """A piece as runs; `other` is the position and `other_stride` the step, in bytes."""
    address, rows, size, stride = bytes_of(piece.view)
    if not rows * size:
        return []
    step = piece.step if rows > 1 else size
    run = Run(address, piece.position, rows, size, stride, step)
    return [part for run in flatten(run, stride == size == step, line) for part in split_tail(run)]


def split_tail(run: Run) -> list[Run]:
    """A single row whose length is no multiple of 16 bytes as the multiple and the rest."""
    rest = run.size % VECTOR
    if run.rows > 1 or not rest or run.size == rest:
        return [run]
    done = run.size - rest
    return [
        Run(run.address, run.other, 1, done, done, done),
        Run(run.address + done, run.other + done, 1, rest, rest, rest),
    ]


def copy_runs(source: torch.Tensor, target: torch.Tensor, line: int) -> list[Run]:
    """A copy as runs; `other` is the target's address.

    Raises:
        InvalidModelError: the views differ in shape, dtype or device.
    """
    if source.shape != target.shape or source.dtype != target.dtype or source.device != target.device:
        raise InvalidModelError(
            f"cannot copy {source.dtype} {list(source.shape)} on {source.device} to {target.dtype} {list(target.shape)} on"
            f" {target.device}"
        )
    address, rows, size, stride = bytes_of(source)
    other, _, _, other_stride = bytes_of(target)
    if not rows * size:
        return []
    run = Run(address, other, rows, size, stride, other_stride)
    return [part for run in flatten(run, stride == size == other_stride, line) for part in split_tail(run)]


def move_row(run: Run, unit: int, tile: Tile, digest: bool) -> tuple[list[int], int]:
    """Fields of a run and its number of tiles (output, first tile and steps are filled in by the caller)."""
    width = run.size // (1 if unit == 1 else WORD)
    wide = -(-width // tile.columns)
    other_unit = unit if not digest else min(unit, WORD)
    row = [run.address // unit, run.other // other_unit, run.rows, run.size // unit, run.stride // unit]
    row += [run.other_stride // other_unit, wide, 0, 0, 0]
    return row, wide * -(-run.rows // tile.rows)
