"""What a plan is given and what it answers, whoever carries it out: items, pieces, pairs and the three protocols.

A plan is made once per epoch: it holds the addresses of its tensors (and keeps the tensors alive) and is run at each sync.
`run` enqueues on the current stream and never waits for the device; `finish` waits for what `run` enqueued, not for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.cast_blockwise import BLOCK
from fp8rl_workers.weights.cast_mxfp8 import GROUP

if TYPE_CHECKING:
    from fp8rl_workers.protocol import EngineWire
    from fp8rl_workers.weights.cast_rounding import Rounding

Backend = Literal["torch", "triton", "te", "auto"]
ScaleFormat = Literal["fp32", "pow2"]


@dataclass(frozen=True)
class CastItem:
    """One tensor or one stack of tensors to be cast.

    Attributes:
        names: HF names: one, or one per member of a stack; keys of stochastic rounding, words of errors.
        source: BF16 or fp32 (rounded to BF16 first) `[M, N]`, for a stack `[E, M, N]`, for bf16 any shape; the last dimension
            is contiguous, other strides are free.
        wire: format of this tensor.
        outputs: contiguous codes, then scales, in shapes and dtypes of the table in `cast` (a stack has a leading E). The one of
            bf16 may be fp32: the values as they are, for tensors that engines hold in fp32.
    """

    names: tuple[str, ...]
    source: torch.Tensor
    wire: EngineWire
    outputs: tuple[torch.Tensor, ...]


class Piece(NamedTuple):
    """Bytes of a tensor as they lie somewhere.

    Attributes:
        view: 2-D, any dtype, the last dimension contiguous.
        position: byte position of the view's first element in its tensor.
        step: bytes in the tensor from one row of the view to the next.
    """

    view: torch.Tensor
    position: int
    step: int


class CastPlan(Protocol):
    """Casts of many tensors."""

    def matches(self, items: Sequence[CastItem]) -> bool:
        """The plan was made for these names, formats and addresses."""
        ...

    def run(self, rounding: Rounding | None = None) -> None:
        """Enqueue the casts and the digests of their outputs on the current stream."""
        ...

    def finish(self) -> list[int]:
        """Wait for `run`; digest of each output in the order of the items.

        Raises:
            NonFiniteError: names every tensor that holds NaN or Inf.
        """
        ...


class DigestPlan(Protocol):
    """Digests of many tensors, each from its pieces."""

    def run(self) -> None:
        """Enqueue the digests on the current stream."""
        ...

    def finish(self) -> list[int]:
        """Wait for `run`; digest per tensor, equal to `digest.digest` of it."""
        ...


class CopyPlan(Protocol):
    """Copies of many views."""

    def run(self) -> None:
        """Enqueue the copies on the current stream."""
        ...


def whole(tensor: torch.Tensor) -> Piece:
    """The one piece of a contiguous tensor."""
    return Piece(tensor.detach().view(1, -1), 0, 0)


def part_shapes(shape: tuple[int, ...], wire: EngineWire) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each output of a source of this shape."""
    if wire == "bf16":
        return [(shape, torch.bfloat16)]
    *stack, rows, columns = shape
    scales: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "blockwise": ((*stack, -(-rows // BLOCK), -(-columns // BLOCK)), torch.float32),
        "mxfp8": ((*stack, rows, columns // GROUP), torch.uint8),
        "channel": ((*stack, rows, 1), torch.bfloat16),
    }
    return [(shape, torch.float8_e4m3fn), scales[wire]]


def check_items(items: Sequence[CastItem]) -> None:
    """Refuse what no backend casts.

    Raises:
        TypeError: a source that is neither BF16 nor fp32.
        InvalidModelError: a shape that the format cannot hold, or outputs that do not fit it.
    """
    for item in items:
        check_source(item)
        check_outputs(item)


def check_source(item: CastItem) -> None:
    """Refuse a source by dtype, shape or strides."""
    name, source = item.names[0], item.source
    if source.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{name}: the source of a cast is BF16 or an fp32 master, not {source.dtype}")
    if source.numel() and source.dim() and source.shape[-1] > 1 and source.stride(-1) != 1:
        raise InvalidModelError(
            f"{name}: the last dimension has stride {source.stride(-1)}, 1 is needed; pass a contiguous copy"
        )
    stack = source.shape[0] if source.dim() and len(item.names) > 1 else 1
    if stack != len(item.names):
        raise InvalidModelError(f"{name}: {len(item.names)} names for a source of shape {list(source.shape)}")
    if item.wire == "bf16":
        return
    if source.dim() != (3 if len(item.names) > 1 else 2) and not (source.dim() == 3 and source.shape[0] == 1):
        raise InvalidModelError(f"{name}: wire {item.wire} needs [M, N], or [E, M, N], not shape {list(source.shape)}")
    if item.wire == "mxfp8" and source.shape[-1] % GROUP:
        raise InvalidModelError(
            f"{name}: mxfp8 needs K % {GROUP} == 0, and {source.shape[-1]} % {GROUP} = {source.shape[-1] % GROUP}; "
            "add the layer to precision.ignoredLayers (it stays BF16) or choose wire: blockwise"
        )


def check_outputs(item: CastItem) -> None:
    """Refuse outputs by number, shape, dtype or layout."""
    wanted = part_shapes(tuple(item.source.shape), item.wire)
    found = [(tuple(out.shape), out.dtype) for out in item.outputs]
    if found != wanted and not (item.wire == "bf16" and found == [(wanted[0][0], torch.float32)]):
        raise InvalidModelError(f"{item.names[0]}: outputs are {found}, wire {item.wire} has {wanted}")
    for out in item.outputs:
        if not out.is_contiguous() or out.device != item.source.device:
            raise InvalidModelError(f"{item.names[0]}: outputs are contiguous and on {item.source.device}")


def identity(items: Sequence[CastItem]) -> tuple[tuple[object, ...], ...]:
    """What a plan's tables depend on."""
    return tuple(
        (
            item.names,
            item.wire,
            item.source.dtype,
            item.source.data_ptr(),
            tuple(item.source.shape),
            item.source.stride(),
            tuple(out.data_ptr() for out in item.outputs),
        )
        for item in items
    )
