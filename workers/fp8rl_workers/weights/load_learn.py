"""Learning a layout by watching vLLM's reload, one layer of each kind.

The engine fuses, slices and transposes what it loads. Instead of knowing how, `learn` loads tags: first all ones, then all
twos, which shows the elements that arrive unchanged; then the position of each element, one digit per reload, in digits
that every dtype holds exactly (0..15 where one-byte floats travel, else 0..255). Runs of consecutive positions become
strided blocks.

Tags are loaded into one part of the model at a time (a decoder layer, an embedding), and of parts that are alike in the names,
dtypes and sizes of their tensors and storages only into the first: its blocks are taken for the others. Then the whole layout is
tried: the real weights with all top bits flipped, and the real weights, are reloaded, and the layout must predict each byte of
storage both times. What does not arrive unchanged, or not as predicted, is reported by tensor with its reason; then nothing
is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8rl_workers.weights.load_layout import Block, Inputs, Layout, Signature, bits, moved, same_bits

Reload = Callable[[Inputs], None]
PartReload = Callable[[str], tuple[nn.Module, Reload] | None]

MAX_RUNS_SHARE = 1 / 16
"""A storage whose elements land in more runs than this share of them is repacked, not laid out."""
MIN_RUNS = 1024
CHUNK = 1 << 26
"""Elements looked at together: bounds the memory of learning."""


class LearnError(Exception):
    """The layout cannot be learned; `reasons` says why, by tensor or parameter."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True)
class Part:
    """Tensors that are learned together. `prefix`: of their names; `storages`: index by relative name."""

    prefix: str
    signature: Signature
    storages: dict[str, int]
    reload: Reload

    def kind(self, flats: list[Tensor]) -> tuple[object, ...]:
        """What must be equal in parts that are alike."""
        tensors = tuple((name.removeprefix(self.prefix), dtype, shape) for name, dtype, shape in self.signature)
        held = tuple((name, flats[i].dtype, flats[i].numel()) for name, i in sorted(self.storages.items()))
        return tensors, held


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


def learn(
    model: nn.Module,
    reload: Reload,
    inputs: Callable[[], Inputs],
    *,
    whole: bool,
    part_reload: PartReload | None = None,
) -> Layout:
    """Learn the layout of inputs like these; leaves the real inputs loaded.

    Args:
        model: The engine's model; its storages must stay where they are across reloads.
        reload: Loads a whole set of inputs as vLLM does.
        inputs: Yields the real inputs, each time anew.
        whole: Whether this rank holds all of every tensor (no tensor or expert parallelism).
        part_reload: Gives, for a prefix of names, the module that holds these tensors and a reload of it alone; None
            where there is none. Without it all is learned at once.

    Raises:
        LearnError: something does not land unchanged; the real inputs are loaded all the same.
    """
    signature = signature_of(inputs())
    named = storages_of(model)
    names, flats = [name for name, _ in named], [flat for _, flat in named]
    try:
        blocks = blocks_of(parts_of(signature, named, reload, part_reload), names, flats)
        if whole:
            check_coverage(signature, blocks)
        layout = Layout(signature, blocks, tuple(sorted({b.storage for bs in blocks.values() for b in bs})))
        rest = Rest(layout, names, flats)
        reload((name, flipped(tensor)) for name, tensor in inputs())
        check_prediction(layout, names, ((n, flipped(t)) for n, t in inputs()), flats)
        before = rest.values()
    except LearnError:
        reload(inputs())
        raise
    reload(inputs())
    check_prediction(layout, names, inputs(), flats)
    rest.check(before)
    return layout


def parts_of(
    signature: Signature,
    named: list[tuple[str, Tensor]],
    reload: Reload,
    part_reload: PartReload | None,
) -> list[Part]:
    """The parts that are learned one at a time; what belongs to none of its own is learned with the whole."""
    groups: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for item in signature:
        groups.setdefault(part_of(item[0]) if part_reload else "", []).append(item)
    index = {flat.data_ptr(): i for i, (_, flat) in enumerate(named)}
    found, left = [], []
    for prefix, items in groups.items():
        own = part_reload(prefix) if part_reload and prefix else None
        if own is None:
            left += items
            continue
        module, own_reload = own
        found.append(Part(prefix, tuple(items), {n: index[f.data_ptr()] for n, f in storages_of(module)}, own_reload))
    if left:
        taken = {i for part in found for i in part.storages.values()}
        rest = {name: i for i, (name, _) in enumerate(named) if i not in taken}
        found.append(Part("", tuple(left), rest, reload))
    return found


def part_of(name: str) -> str:
    """The part that a tensor is learned with: its decoder layer (`model.layers.7.`), else its module (`lm_head.`)."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1]) + "."
    return ".".join(pieces[:-1]) + "."


def blocks_of(parts: list[Part], names: list[str], flats: list[Tensor]) -> dict[str, list[Block]]:
    """Strided blocks by tensor, learned once for parts that are alike.

    Raises:
        LearnError: storages whose elements come in too many runs.
    """
    known: dict[tuple[object, ...], tuple[Part, dict[str, list[Block]]]] = {}
    blocks: dict[str, list[Block]] = {}
    for part in parts:
        kind = part.kind(flats)
        if kind not in known:
            known[kind] = part, learn_part(part, names, flats)
        first, learned = known[kind]
        local = {index: name for name, index in first.storages.items()}
        for name, items in learned.items():
            own = part.prefix + name.removeprefix(first.prefix)
            blocks[own] = [moved(block, own, part.storages[local[block.storage]]) for block in items]
    return blocks


def learn_part(part: Part, names: list[str], flats: list[Tensor]) -> dict[str, list[Block]]:
    """Blocks of one part's tensors, by loading tags into it."""
    indices = sorted(part.storages.values())
    mine = [flats[i] for i in indices]
    covered = covered_by(part, mine)
    positions = positions_in(part, mine, covered)
    sizes = [torch.Size(shape).numel() for _, _, shape in part.signature]
    ends = torch.tensor(sizes).cumsum(0)
    blocks: dict[str, list[Block]] = {name: [] for name, _, _ in part.signature}
    tensors, scattered = list(blocks), {}
    for storage, position, mask in zip(indices, positions, covered, strict=True):
        runs = runs_of(position, mask, ends)
        if len(runs) > max(MIN_RUNS, len(position) * MAX_RUNS_SHARE):
            scattered[names[storage]] = f"its {len(position)} elements come in {len(runs)} runs: the engine repacks it"
            continue
        for index, src, dst, rows, cols, src_stride, dst_stride in merge(runs):
            start = int(ends[index]) - sizes[index]
            name = tensors[index]
            blocks[name].append(Block(storage, name, src - start, dst, rows, cols, src_stride, dst_stride))
    if scattered:
        raise LearnError(scattered)
    return blocks


def flipped(tensor: Tensor) -> Tensor:
    """Another input of the same kind whose bytes differ in every element: the top bit flipped."""
    found = bits(tensor)
    top = 0x80 if found.dtype == torch.uint8 else torch.iinfo(found.dtype).min
    return (found ^ top).view(tensor.dtype)


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def filled(signature: Signature, value: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Inputs of one value."""
    for name, dtype, shape in signature:
        yield name, torch.full(shape, float(value), device=device).to(dtype_of(dtype))


def digits(signature: Signature, place: int, base: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each element's number in the whole set of inputs, its digit at `place`."""
    start = 0
    for name, dtype, shape in signature:
        count = torch.Size(shape).numel()
        out = torch.empty(count, dtype=dtype_of(dtype), device=device)
        for at in range(0, count, CHUNK):
            number = torch.arange(start + at, start + min(at + CHUNK, count), device=device)
            out[at : at + CHUNK] = (number // base**place % base).to(torch.float32).to(out.dtype)
        yield name, out.reshape(shape)
        start += count


def covered_by(part: Part, flats: list[Tensor]) -> list[Tensor]:
    """Per storage, the elements that took both a one and a two from the inputs."""
    device = flats[0].device if flats else torch.device("cpu")
    part.reload(filled(part.signature, 1, device))
    ones = [equals(flat, 1) for flat in flats]
    part.reload(filled(part.signature, 2, device))
    return [one & equals(flat, 2) for one, flat in zip(ones, flats, strict=True)]


def equals(flat: Tensor, value: int) -> Tensor:
    """Which elements have a value."""
    pieces = [flat[at : at + CHUNK].to(torch.float32) == value for at in range(0, flat.numel(), CHUNK)]
    return torch.cat(pieces)


def positions_in(part: Part, flats: list[Tensor], covered: list[Tensor]) -> list[Tensor]:
    """Per storage, the number of the input element that each covered element took."""
    total = sum(torch.Size(shape).numel() for _, _, shape in part.signature)
    base = 16 if any(dtype_of(dtype).itemsize == 1 for _, dtype, _ in part.signature) else 256
    device = flats[0].device if flats else torch.device("cpu")
    places = [mask.nonzero().view(-1) for mask in covered]
    found = [torch.zeros(len(place), dtype=torch.int64, device=device) for place in places]
    place = 0
    while base**place < total:
        part.reload(digits(part.signature, place, base, device))
        for position, flat, at in zip(found, flats, places, strict=True):
            for start in range(0, len(at), CHUNK):
                step = slice(start, start + CHUNK)
                position[step] += flat[at[step]].to(torch.int64) * base**place
        place += 1
    return found


def runs_of(position: Tensor, mask: Tensor, ends: Tensor) -> list[tuple[int, int, int, int]]:
    """(tensor, source, target, length) of maximal runs in which both positions grow by one, within one tensor."""
    count = len(position)
    if not count:
        return []
    target, limits = mask.nonzero().view(-1), ends.to(position.device)
    found = [torch.zeros(1, dtype=torch.int64)]
    for at in range(0, count - 1, CHUNK):
        source, place = position[at : at + CHUNK + 1], target[at : at + CHUNK + 1]
        owner = torch.bucketize(source, limits, right=True)
        breaks = (source.diff() != 1) | (place.diff() != 1) | (owner.diff() != 0)
        found.append((breaks.nonzero().view(-1) + at + 1).cpu())
    starts = torch.cat(found)
    lengths = torch.cat([starts[1:], torch.tensor([count])]) - starts
    source = position[starts.to(position.device)].cpu()
    columns = (
        torch.bucketize(source, ends, right=True),
        source,
        target[starts.to(target.device)].cpu(),
        lengths,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def merge(runs: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int, int, int, int]]:
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


def check_coverage(signature: Signature, blocks: dict[str, list[Block]]) -> None:
    """Every element of every tensor must have a place.

    Raises:
        LearnError: names the tensors that lack some.
    """
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


def check_prediction(layout: Layout, names: list[str], inputs: Inputs, flats: list[Tensor]) -> None:
    """The storages must hold these inputs as the layout says.

    Raises:
        LearnError: names the tensors that they do not hold so.
    """
    wrong = {
        name: f"the learned layout does not reproduce what the reload stores ({places(layout, name, names)})"
        for name, tensor in inputs
        if not layout.matches(name, tensor, flats)
    }
    if wrong:
        raise LearnError(wrong)


class Rest:
    """What no input reaches; it must not depend on the inputs."""

    def __init__(self, layout: Layout, names: list[str], flats: list[Tensor]) -> None:
        filled = [0] * len(flats)
        for items in layout.blocks.values():
            for block in items:
                filled[block.storage] += block.rows * block.cols
        self._names, self._flats, self._masks = names, flats, {}
        for index, flat in enumerate(flats):
            if filled[index] < flat.numel():
                mask = torch.ones(flat.numel(), dtype=torch.bool, device=flat.device)
                self._masks[index] = mask
        for items in layout.blocks.values():
            for block in items:
                if block.storage in self._masks:
                    mask = self._masks[block.storage]
                    mask.as_strided((block.rows, block.cols), (block.dst_stride, 1), block.dst).fill_(value=False)

    def values(self) -> dict[int, Tensor]:
        """A copy, by storage."""
        return {index: self._flats[index][mask] for index, mask in self._masks.items()}

    def check(self, before: dict[int, Tensor]) -> None:
        """Compare with an earlier copy.

        Raises:
            LearnError: names the storages that have changed.
        """
        changed = {
            self._names[index]: "some of its elements depend on the weights, but hold none of them unchanged"
            for index, values in self.values().items()
            if not same_bits(values, before[index])
        }
        if changed:
            raise LearnError(changed)


def places(layout: Layout, name: str, names: list[str]) -> str:
    """The storages that hold a tensor, for words."""
    return ", ".join(sorted({names[block.storage] for block in layout.blocks[name]})) or "nowhere"
