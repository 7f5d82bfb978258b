"""Where every element of every wire tensor ends in the engine's own storage, learned by watching vLLM's reload.

The engine fuses, slices and transposes what it loads. Instead of knowing how, `learn` loads tags: first all ones, then all
twos, which shows the elements that arrive unchanged; then the position of each element, one digit per reload, in digits
that every dtype holds exactly (0..15 where one-byte floats travel, else 0..255). Runs of consecutive positions become
strided blocks. Then the layout is tried: the real weights and their negatives, whose bytes differ in every element, are
reloaded, and the layout must predict each byte of storage. What does not arrive unchanged, or not as predicted, is
reported by tensor with its reason; then nothing is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = Iterable[tuple[str, Tensor]]
Reload = Callable[[Inputs], None]
Signature = tuple[tuple[str, str, tuple[int, ...]], ...]

MAX_RUNS_SHARE = 1 / 16
"""A storage whose elements land in more runs than this share of them is repacked, not laid out."""
MIN_RUNS = 1024


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

    def write(self, name: str, tensor: Tensor, targets: list[Tensor]) -> None:
        """Copy one tensor into the flat `targets` (indexed by storage)."""
        flat = tensor.contiguous().view(-1)
        for block in self.blocks.get(name, []):
            _strided(targets[block.storage], block.dst, block.dst_stride, block).copy_(
                _strided(flat, block.src, block.src_stride, block)
            )

    def matches(self, name: str, tensor: Tensor, targets: list[Tensor]) -> bool:
        """Whether the flat `targets` hold this tensor, bit for bit after the conversion to their dtype."""
        flat = tensor.contiguous().view(-1)
        return all(
            _same_bits(
                _strided(targets[block.storage], block.dst, block.dst_stride, block),
                _strided(flat, block.src, block.src_stride, block).to(targets[block.storage]),
            )
            for block in self.blocks.get(name, [])
        )


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


def learn(model: nn.Module, reload: Reload, inputs: Callable[[], Inputs], *, whole: bool) -> Layout:
    """Learn the layout of inputs like these; leaves the real inputs loaded.

    Args:
        model: The engine's model; its storages must stay where they are across reloads.
        reload: Loads a whole set of inputs as vLLM does.
        inputs: Yields the real inputs, each time anew.
        whole: Whether this rank holds all of every tensor (no tensor or expert parallelism).

    Raises:
        LearnError: something does not land unchanged; the real inputs are loaded all the same.
    """
    signature = signature_of(inputs())
    flats = [flat for _, flat in storages_of(model)]
    names = [name for name, _ in storages_of(model)]
    covered = _covered(reload, signature, flats)
    positions = _positions(reload, signature, flats, covered)
    try:
        blocks = _blocks(signature, names, positions, covered)
        if whole:
            _check_coverage(signature, blocks)
        layout = Layout(signature, blocks, tuple(sorted({b.storage for bs in blocks.values() for b in bs})))
        reload((name, _negative(tensor)) for name, tensor in inputs())
        negative = [flat.clone() for flat in flats]
        _check_prediction(layout, names, ((n, _negative(t)) for n, t in inputs()), negative)
    except LearnError:
        reload(inputs())
        raise
    reload(inputs())
    _check_prediction(layout, names, inputs(), flats)
    _check_rest(names, flats, negative, covered)
    return layout


def _strided(flat: Tensor, start: int, stride: int, block: Block) -> Tensor:
    return flat.as_strided((block.rows, block.cols), (stride, 1), flat.storage_offset() + start)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(_bits(left), _bits(right))


def _negative(tensor: Tensor) -> Tensor:
    """Another input of the same kind whose bytes differ in every element: the top bit flipped."""
    bits = _bits(tensor)
    top = 0x80 if bits.dtype == torch.uint8 else torch.iinfo(bits.dtype).min
    return (bits ^ top).view(tensor.dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _filled(signature: Signature, value: int) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape in signature:
        yield name, torch.full(shape, float(value)).to(_dtype(dtype))


def _digits(signature: Signature, place: int, base: int) -> Iterator[tuple[str, Tensor]]:
    """Each element's number in the whole set of inputs, its digit at `place`."""
    start = 0
    for name, dtype, shape in signature:
        count = torch.Size(shape).numel()
        number = torch.arange(start, start + count) // base**place % base
        yield name, number.to(torch.float32).to(_dtype(dtype)).reshape(shape)
        start += count


def _covered(reload: Reload, signature: Signature, flats: list[Tensor]) -> list[Tensor]:
    """Per storage, the elements that took both a one and a two from the inputs."""
    reload(_filled(signature, 1))
    ones = [flat.to(torch.float32) == 1 for flat in flats]
    reload(_filled(signature, 2))
    return [one & (flat.to(torch.float32) == 2) for one, flat in zip(ones, flats, strict=True)]


def _positions(reload: Reload, signature: Signature, flats: list[Tensor], covered: list[Tensor]) -> list[Tensor]:
    """Per storage, the number of the input element that each covered element took."""
    total = sum(torch.Size(shape).numel() for _, _, shape in signature)
    base = 16 if any(_dtype(dtype).itemsize == 1 for _, dtype, _ in signature) else 256
    positions = [torch.zeros(int(mask.sum()), dtype=torch.int64, device=mask.device) for mask in covered]
    place = 0
    while base**place < total:
        reload(_digits(signature, place, base))
        for position, flat, mask in zip(positions, flats, covered, strict=True):
            position.add_(flat[mask].to(torch.int64) * base**place)
        place += 1
    return positions


def _blocks(
    signature: Signature, names: list[str], positions: list[Tensor], covered: list[Tensor]
) -> dict[str, list[Block]]:
    """Strided blocks by tensor.

    Raises:
        LearnError: storages whose elements come in too many runs.
    """
    sizes = [torch.Size(shape).numel() for _, _, shape in signature]
    ends = torch.tensor(sizes).cumsum(0)
    tensors = [name for name, _, _ in signature]
    blocks: dict[str, list[Block]] = {name: [] for name in tensors}
    scattered = {}
    for storage, (position, mask) in enumerate(zip(positions, covered, strict=True)):
        source, target = position.cpu(), mask.nonzero().view(-1).cpu()
        owner = torch.bucketize(source, ends, right=True)
        runs = _runs(source, target, owner)
        if len(runs) > max(MIN_RUNS, len(source) * MAX_RUNS_SHARE):
            scattered[names[storage]] = f"its {len(source)} elements come in {len(runs)} runs: the engine repacks it"
            continue
        for index, src, dst, rows, cols, src_stride, dst_stride in _merge(runs):
            start = int(ends[index]) - sizes[index]
            blocks[tensors[index]].append(
                Block(storage, tensors[index], src - start, dst, rows, cols, src_stride, dst_stride)
            )
    if scattered:
        raise LearnError(scattered)
    return blocks


def _runs(source: Tensor, target: Tensor, owner: Tensor) -> list[tuple[int, int, int, int]]:
    """(tensor, source, target, length) of maximal runs in which both positions grow by one."""
    if not len(source):
        return []
    breaks = (source.diff() != 1) | (target.diff() != 1) | (owner.diff() != 0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), breaks.nonzero().view(-1) + 1])
    lengths = torch.cat([starts[1:], torch.tensor([len(source)])]) - starts
    columns = (owner[starts], source[starts], target[starts], lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _merge(runs: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Join runs of equal length at equal strides: (tensor, source, target, rows, cols, strides)."""
    i = 0
    while i < len(runs):
        tensor, src, dst, cols = runs[i]
        rows, src_stride, dst_stride = 1, cols, cols
        while i + rows < len(runs):
            other, next_src, next_dst, length = runs[i + rows]
            step = (next_src - runs[i + rows - 1][1], next_dst - runs[i + rows - 1][2])
            if other != tensor or length != cols or step[0] <= 0 or (rows > 1 and step != (src_stride, dst_stride)):
                break
            src_stride, dst_stride = step
            rows += 1
        yield tensor, src, dst, rows, cols, src_stride, dst_stride
        i += rows


def _check_coverage(signature: Signature, blocks: dict[str, list[Block]]) -> None:
    short = {}
    for name, _, shape in signature:
        count = torch.Size(shape).numel()
        reached = sum(block.rows * block.cols for block in blocks[name])
        if reached < count:
            short[name] = (
                f"{count - reached} of {count} elements reach no parameter unchanged: the engine transforms it"
            )
    if short:
        raise LearnError(short)


def _check_prediction(layout: Layout, names: list[str], inputs: Inputs, flats: list[Tensor]) -> None:
    wrong = {
        name: f"the learned layout does not reproduce what the reload stores ({_places(layout, name, names)})"
        for name, tensor in inputs
        if not layout.matches(name, tensor, flats)
    }
    if wrong:
        raise LearnError(wrong)


def _check_rest(names: list[str], flats: list[Tensor], negative: list[Tensor], covered: list[Tensor]) -> None:
    """What no input reaches must not depend on the inputs."""
    moved = {
        name: "some of its elements depend on the weights, but hold none of them unchanged"
        for name, flat, other, mask in zip(names, flats, negative, covered, strict=True)
        if not _same_bits(flat[~mask], other[~mask])
    }
    if moved:
        raise LearnError(moved)


def _places(layout: Layout, name: str, names: list[str]) -> str:
    return ", ".join(sorted({names[block.storage] for block in layout.blocks[name]})) or "nowhere"
