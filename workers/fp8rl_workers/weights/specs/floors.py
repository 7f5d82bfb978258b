"""The shapes that the FP8 kernels take, per wire, after tensor parallelism has cut the weight. Pure.

    blockwise   local rows and columns multiples of 128 (whole blocks on every rank, and in every shard of a fused layer)
    mxfp8       local columns a multiple of 32; local rows of the engine's module at least 128
    channel     local rows and columns multiples of 16 (scaled matrix products of FP8)

They hold on the CPU too, though nothing breaks there: the same job must quantize the same layers everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.specs.family import TensorSpec


@dataclass(frozen=True)
class KernelFloor:
    """What a kernel asks of a local shard `[rows, columns]`; `min_rows` is asked of the whole fused module."""

    row_multiple: int = 1
    column_multiple: int = 1
    min_rows: int = 1


FLOORS: dict[EngineWire, KernelFloor] = {
    "blockwise": KernelFloor(row_multiple=128, column_multiple=128),
    "mxfp8": KernelFloor(column_multiple=32, min_rows=128),
    "channel": KernelFloor(row_multiple=16, column_multiple=16),
    "bf16": KernelFloor(),
}


def local_shape(spec: TensorSpec, ranks: int) -> tuple[int, int]:
    """Rows and columns that one of `ranks` tensor-parallel ranks holds.

    Raises:
        InvalidModelError: the dimension cannot be cut in whole units.
    """
    rows, columns = spec.shape
    if ranks == 1 or spec.split == "none":
        return rows, columns
    size = rows if spec.split == "rows" else columns
    units = size // spec.unit
    if spec.replicable and ranks % units == 0:
        local = spec.unit
    elif units % ranks == 0:
        local = size // ranks
    else:
        what = f"{units} units of {spec.unit}" if spec.unit > 1 else f"{size} {spec.split}"
        raise InvalidModelError(
            f"inference.parallelism.tensor: {spec.module} has {what}, which {ranks} ranks cannot share ({units} % {ranks} = "
            f"{units % ranks}); choose a divisor of {units}"
        )
    return (local, columns) if spec.split == "rows" else (rows, local)


def _text(spec: TensorSpec, which: int, value: int, ranks: int) -> str:
    """`768 rows` or `192 rows (768 over 4 ranks)`."""
    word = ("rows", "columns")[which]
    whole = spec.shape[which]
    return f"{value} {word}" if value == whole else f"{value} {word} ({whole} over {ranks} ranks)"


def floor_fault(specs: Sequence[TensorSpec], ranks: int, wire: EngineWire, floor: KernelFloor) -> str:
    """Why the module made of `specs` (the shards of one fused layer, or one linear) must stay in BF16; "" if it need not.

    Raises:
        InvalidModelError: see `local_shape`.
    """
    total_rows = 0
    for spec in specs:
        rows, columns = local_shape(spec, ranks)
        total_rows += rows
        for which, value, multiple in ((0, rows, floor.row_multiple), (1, columns, floor.column_multiple)):
            if value % multiple:
                return (
                    f"{wire} needs multiples of {multiple}, {spec.module} has {_text(spec, which, value, ranks)}: "
                    f"{value} = {multiple} * {value // multiple} + {value % multiple}"
                )
    if total_rows < floor.min_rows:
        return f"{wire} needs at least {floor.min_rows} rows, {specs[0].fused or specs[0].module} has {total_rows} on one rank"
    return ""


TRAINER_MULTIPLES: dict[EngineWire, int] = {"blockwise": 16, "mxfp8": 32}
"""What Transformer Engine asks of both dimensions of a local weight, whose gradient is a product over its rows."""


def trainer_fault(module: str, specs: Sequence[TensorSpec], ranks: int, wire: EngineWire) -> str:
    """Why the trainer cannot compute `specs`, one linear of its own, in FP8 on `ranks` tensor-parallel ranks; "" if it can.

    Such a linear cannot be left in BF16 by itself: some of its rows are quantized in the engine.
    """
    multiple = TRAINER_MULTIPLES.get(wire, 1)
    rows = sum(spec.shape[0] for spec in specs)
    if rows % (multiple * ranks) == 0:
        return ""
    units, rest = divmod(rows, multiple)
    whole = f"{rows} = {multiple} * {units}" + (f" + {rest}" if rest else "")
    names = ", ".join(spec.module.rpartition(".")[2] for spec in specs)
    return (
        f"trainer.parallelism.tensor: {module} has {rows} rows ({names}), {wire} needs a multiple of {multiple} on each of "
        f"{ranks} ranks: {whole}, {units} % {ranks} = {units % ranks}; choose a divisor of {units}, or leave it in BF16 whole "
        f"(precision.ignoredLayers: {specs[0].fused.rpartition('.')[2]!r})"
    )
