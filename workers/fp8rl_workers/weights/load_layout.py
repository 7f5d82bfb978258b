"""Where every element of every wire tensor ends in the engine's own storage: strided blocks (`load_learn` finds them)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

Inputs = Iterable[tuple[str, Tensor]]
Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Block:
    """`rows` runs of `cols` elements: flat positions in a tensor (`src`) and in a storage (`dst`), with their strides."""

    storage: int
    tensor: str
    src: int
    dst: int
    rows: int
    cols: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class Layout:
    """What was learned: blocks by tensor, and which storages they fill. Holds for inputs of this signature only."""

    signature: Signature
    blocks: dict[str, list[Block]]
    storages: tuple[int, ...]

    def pairs(self, name: str, tensor: Tensor, targets: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a contiguous tensor, each with the view of the flat `targets` where it belongs; both 2-D."""
        flat = tensor.view(-1)
        for block in self.blocks.get(name, []):
            yield (
                strided(flat, block.src, block.src_stride, block),
                strided(targets[block.storage], block.dst, block.dst_stride, block),
            )

    def write(self, name: str, tensor: Tensor, targets: list[Tensor]) -> None:
        """Copy one tensor into the flat `targets` (indexed by storage)."""
        for source, target in self.pairs(name, tensor.contiguous(), targets):
            target.copy_(source)

    def matches(self, name: str, tensor: Tensor, targets: list[Tensor]) -> bool:
        """Whether the flat `targets` hold this tensor, bit for bit after the conversion to their dtype."""
        pairs = self.pairs(name, tensor.contiguous(), targets)
        return all(same_bits(target, source.to(target)) for source, target in pairs)


class LearnError(Exception):
    """The layout cannot be learned; `reasons` says why, by tensor or parameter."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons


def signature_of(inputs: Inputs) -> Signature:
    """Names, dtypes and shapes, in order."""
    return tuple((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in inputs)


def storages_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every storage of the model's parameters and buffers once: a name that it has, and a flat view of all of it."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in found:
            continue
        count = storage.nbytes() // tensor.element_size()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
        found[storage.data_ptr()] = (name, flat)
    return list(found.values())


def strided(flat: Tensor, start: int, stride: int, block: Block) -> Tensor:
    """The block's `[rows, cols]` view of a flat tensor."""
    return flat.as_strided((block.rows, block.cols), (stride, 1), flat.storage_offset() + start)


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers of their size."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape are equal bit for bit."""
    return torch.equal(bits(left), bits(right))


def moved(block: Block, tensor: str, storage: int) -> Block:
    """The same block of another tensor and storage."""
    return replace(block, tensor=tensor, storage=storage)
