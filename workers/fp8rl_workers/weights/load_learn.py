"""Learning a layout by watching vLLM's reload, one layer of each kind.

The engine fuses, slices and transposes what it loads. Instead of knowing how, `learn` loads tags (`load_tags`), which show where
each element arrives, into one part of the model at a time (a decoder layer, an embedding), and of parts that are alike in the
names, dtypes and sizes of their tensors and storages only into the first: its blocks are taken for the others. Then the whole
layout is tried: the real weights with all top bits flipped, and the real weights, are reloaded, and the layout must predict each
byte of storage both times. What does not arrive unchanged, or not as predicted, is reported by tensor with its reason; then
nothing is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8rl_workers.weights.load_layout import (
    Block,
    Inputs,
    Layout,
    LearnError,
    Signature,
    bits,
    moved,
    same_bits,
    signature_of,
    storages_of,
)
from fp8rl_workers.weights.load_tags import Reload, blocks_by_tags

__all__ = ["LearnError", "PartReload", "Reload", "learn", "signature_of", "storages_of"]

PartReload = Callable[[str], tuple[nn.Module, Reload] | None]


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
    except torch.OutOfMemoryError as error:
        reload(inputs())
        raise LearnError({"*": f"no memory to learn the layout with: {str(error).partition('. ')[0]}"}) from error
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
            known[kind] = (
                part,
                blocks_by_tags(part.signature, sorted(part.storages.values()), part.reload, names, flats),
            )
        first, learned = known[kind]
        local = {index: name for name, index in first.storages.items()}
        for name, items in learned.items():
            own = part.prefix + name.removeprefix(first.prefix)
            blocks[own] = [moved(block, own, part.storages[local[block.storage]]) for block in items]
    return blocks


def flipped(tensor: Tensor) -> Tensor:
    """Another input of the same kind whose bytes differ in every element: the top bit flipped."""
    found = bits(tensor)
    top = 0x80 if found.dtype == torch.uint8 else torch.iinfo(found.dtype).min
    return (found ^ top).view(tensor.dtype)


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
