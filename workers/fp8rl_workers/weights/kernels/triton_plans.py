"""The three plans by Triton: tables on the device, one launch per kind of tensor, sums read back behind an event.

`TILES` are the launch parameters, found by tests/gpu/tune_kernels.py on an H200. On the CPU the kernels run in Triton's interpreter
(TRITON_INTERPRET=1), which tests use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.weights.cast import check_finite
from fp8rl_workers.weights.cast_rounding import Rounding, rounding_key, signed
from fp8rl_workers.weights.digest import WORD
from fp8rl_workers.weights.kernels import triton_cast, triton_moves
from fp8rl_workers.weights.kernels.plans import CastItem, Piece, ScaleFormat, check_items, identity
from fp8rl_workers.weights.kernels.tables import (
    SLOTS,
    Run,
    Table,
    Tile,
    cast_row,
    check_size,
    copy_runs,
    digest_runs,
    grid_of,
    is_aligned,
    key_powers,
    move_row,
    unit_of,
)

TILES: Mapping[str, Tile] = {
    "blockwise": Tile(128, 128, 4, 96),
    "mxfp8": Tile(32, 256, 4),
    "channel": Tile(2, 2048, 4),
    "bf16": Tile(8, 512, 2),
    "digest": Tile(16, 1024, 4),
    "copy": Tile(8, 1024, 8),
}
MASKED: Mapping[str, Tile] = {
    "blockwise": Tile(128, 128, 8),
    "mxfp8": Tile(16, 128, 4),
    "channel": Tile(4, 512, 4),
    "bf16": Tile(2, 1024, 4),
}
"""Tiles of the masked casts, whose registers hold fewer elements."""


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel over a table, with its constants."""

    programs: int
    tiles: torch.Tensor
    table: torch.Tensor
    row_keys: torch.Tensor
    tile: Tile
    constants: Mapping[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """Constants and launch parameters, as a kernel takes them."""
        return {**self.constants, "num_warps": self.tile.warps, "maxnreg": self.tile.registers}

    def rounding_options(self, *, stochastic: bool) -> dict[str, Any]:
        """The same for a kernel that rounds; random bits take registers, so there are more warps."""
        if not stochastic:
            return {**self.options, "STOCHASTIC": False}
        return {**self.options, "STOCHASTIC": True, "num_warps": 2 * self.tile.warps, "maxnreg": 80}


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A numpy table on the device."""
    return torch.from_numpy(array).to(device)


def launch_of(table: Table, device: torch.device, constants: Mapping[str, Any], records: bool) -> Launch:
    """A table, ready to be launched; with `records` programs find row and column of their tile beside the item."""
    return Launch(
        table.programs,
        on_device(table.tile_records() if records else table.tile_items(), device),
        on_device(table.fields(), device),
        on_device(table.row_keys(), device),
        table.tile,
        constants,
    )


class Readback:
    """Sums that kernels add to and the host reads when they are done.

    `start` zeroes, `stop` enqueues the copy to the host, `wait` waits for that copy alone.
    """

    def __init__(self, device: torch.device, *sizes: int) -> None:
        self._cuda = device.type == "cuda"
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.parts = torch.split(self._all, list(sizes))
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=self._cuda)
        self._host_parts = torch.split(self._host, list(sizes))
        self._event: torch.cuda.Event | None = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Zero the sums on the current stream."""
        self._all.zero_()

    def stop(self) -> None:
        """Enqueue the copy to the host."""
        self._host.copy_(self._all, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[NDArray[np.uint64]]:
        """The sums, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy().view(np.uint64) for part in self._host_parts]


def totals(sums: NDArray[np.uint64]) -> list[int]:
    """Digest of each output from its slots."""
    found: list[int] = np.add.reduce(sums.reshape(-1, SLOTS), axis=1).tolist()
    return found


class TritonCastPlan:
    """`CastPlan` by the kernels of `triton_cast`."""

    def __init__(
        self,
        items: Sequence[CastItem],
        scale_format: ScaleFormat,
        tiles: Mapping[str, Tile] = TILES,
        masked: Mapping[str, Tile] = MASKED,
    ) -> None:
        check_items(items)
        self._items = tuple(items)
        self._identity = identity(items)
        self._names = [name for item in items for name in item.names]
        device = items[0].source.device if items else torch.device("cpu")
        self._hard = device.type == "cuda"
        self._pow2 = scale_format == "pow2"
        self._launches = self._plan(device, tiles, masked)
        self._outputs = sum(len(item.outputs) for item in items)
        self._read = Readback(device, self._outputs * SLOTS, len(self._names))
        self._powers = on_device(key_powers(), device)
        self._keys = torch.zeros(max(len(self._names), 1), dtype=torch.int64, pin_memory=self._hard)
        self._device_keys = self._keys.to(device)

    def _plan(
        self, device: torch.device, tiles: Mapping[str, Tile], masked: Mapping[str, Tile]
    ) -> list[tuple[str, Launch]]:
        tables: dict[tuple[str, bool, bool], Table] = {}
        output = member = 0
        for item in self._items:
            if item.source.numel():
                check_size(item.names[0], max(out.nbytes for out in item.outputs))
                form = "fp32" if item.outputs[0].dtype == torch.float32 else item.wire
                grid = grid_of(item, tiles[item.wire].columns)
                aligned = form != "fp32" and is_aligned(item, grid, tiles[item.wire])
                tile = (tiles if aligned else masked)[item.wire]
                kind = (form, item.source.dtype == torch.float32, aligned)
                table = tables.setdefault(kind, Table(tile))
                row, count = cast_row(item, grid, tile, aligned=aligned, output=output, member=member)
                row[13] = table.step(grid.columns // 128)
                row[12] = table.step(grid.columns * item.outputs[0].element_size() // WORD)
                table.add(row, 9, count)
            output += len(item.outputs)
            member += len(item.names)
        return [
            (wire, launch_of(table, device, self._constants(wire, table.tile, f32, aligned), records=True))
            for (wire, f32, aligned), table in tables.items()
        ]

    def _constants(self, wire: str, tile: Tile, f32: bool, aligned: bool) -> dict[str, Any]:
        constants: dict[str, Any] = {"F32": f32, "ALIGNED": aligned, "HARD": self._hard, "SLOTS": SLOTS}
        if wire == "blockwise":
            constants["POW2"] = self._pow2
        else:
            constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
        return constants

    def matches(self, items: Sequence[CastItem]) -> bool:
        """The plan was made for these names, formats and addresses."""
        return self._identity == identity(items)

    def run(self, rounding: Rounding | None = None) -> None:
        """Enqueue the casts and the digests of their outputs on the current stream."""
        self._read.start()
        if rounding is not None:
            self._write_keys(rounding)
        for wire, launch in self._launches:
            kernel = getattr(triton_cast, f"cast_{wire}")
            options = (
                launch.options if wire in ("bf16", "fp32") else launch.rounding_options(stochastic=rounding is not None)
            )
            kernel[(launch.programs,)](
                launch.tiles,
                launch.table,
                self._powers,
                launch.row_keys,
                self._device_keys,
                *self._read.parts,
                **options,
            )
        self._read.stop()

    def _write_keys(self, rounding: Rounding) -> None:
        keys = [signed(rounding_key(name, rounding)) for name in self._names]
        self._keys.copy_(torch.tensor(keys, dtype=torch.int64))
        self._device_keys.copy_(self._keys, non_blocking=True)

    def finish(self) -> list[int]:
        """Wait for `run`; digest of each output in the order of the items.

        Raises:
            NonFiniteError: names every tensor that holds NaN or Inf.
        """
        sums, flags = self._read.wait()
        if flags.any():
            raise NonFiniteError("; ".join(faults(self._items, flags)))
        return totals(sums)


def faults(items: Sequence[CastItem], flags: NDArray[np.uint64]) -> list[str]:
    """One text for each tensor that was flagged."""
    sources = [item.source[e] if len(item.names) > 1 else item.source for item in items for e in range(len(item.names))]
    names = [name for item in items for name in item.names]
    wide = [item.outputs[0].dtype == torch.float32 for item in items for _ in item.names]
    found = []
    for at in np.flatnonzero(flags).tolist():
        try:
            check_finite(names[at], sources[at] if wide[at] else sources[at].to(torch.bfloat16))
            found.append(f"{names[at]}: held values that are not finite when it was cast")
        except NonFiniteError as error:
            found.append(str(error))
    return found


class TritonDigestPlan:
    """`DigestPlan` by the kernel of `triton_moves`."""

    def __init__(self, tensors: Sequence[Sequence[Piece]], tile: Tile = TILES["digest"]) -> None:
        self._alive = [piece.view for pieces in tensors for piece in pieces]
        device = self._alive[0].device if self._alive else torch.device("cpu")
        tables: dict[int, Table] = {}
        for output, pieces in enumerate(tensors):
            for piece in pieces:
                for run in digest_runs(piece, tile.columns * WORD):
                    add_digest(tables, run, tile, output)
        self._launches = moves(tables, device)
        self._read = Readback(device, len(tensors) * SLOTS)
        self._powers = on_device(key_powers(), device)

    def run(self) -> None:
        """Enqueue the digests on the current stream."""
        self._read.start()
        for launch in self._launches:
            triton_moves.digest_pieces[(launch.programs,)](
                launch.tiles,
                launch.table,
                self._powers,
                launch.row_keys,
                *self._read.parts,
                **launch.options,
                SLOTS=SLOTS,
            )
        self._read.stop()

    def finish(self) -> list[int]:
        """Wait for `run`; digest per tensor."""
        return totals(self._read.wait()[0])


def add_digest(tables: dict[int, Table], run: Run, tile: Tile, output: int) -> None:
    """Put a run of a tensor's bytes into the table of its unit."""
    check_size("a piece of a digest", run.other + run.other_stride * run.rows)
    unit = unit_of((run.address, run.size, run.stride))
    if run.other % WORD or run.other_stride % WORD:
        unit = 1
    table = tables.setdefault(unit, Table(tile))
    row, count = move_row(run, unit, tile, digest=True)
    row[8:10] = [output, table.step(run.other_stride // WORD)]
    table.add(row, 7, count)


def moves(tables: Mapping[int, Table], device: torch.device) -> list[Launch]:
    """Launches of `triton_moves`, one per unit."""
    return [
        launch_of(table, device, {"UNIT": unit, "ROWS": table.tile.rows, "COLUMNS": table.tile.columns}, records=False)
        for unit, table in tables.items()
    ]


class TritonCopyPlan:
    """`CopyPlan` by the kernel of `triton_moves`."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], tile: Tile = TILES["copy"]) -> None:
        self._alive = [(source.detach(), target.detach()) for source, target in pairs]
        device = self._alive[0][0].device if self._alive else torch.device("cpu")
        tables: dict[int, Table] = {}
        for source, target in self._alive:
            for run in copy_runs(source, target, tile.columns * WORD):
                unit = unit_of((run.address, run.other, run.size, run.stride, run.other_stride))
                table = tables.setdefault(unit, Table(tile))
                row, count = move_row(run, unit, tile, digest=False)
                table.add(row, 7, count)
        self._launches = moves(tables, device)

    def run(self) -> None:
        """Enqueue the copies on the current stream."""
        for launch in self._launches:
            triton_moves.copy_pieces[(launch.programs,)](launch.tiles, launch.table, **launch.options)
