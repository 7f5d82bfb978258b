"""Where the elements of a few tensors arrive in storages, seen by loading tags: strided blocks.

First all ones are loaded, then all twos, which shows the elements that arrive unchanged; then the position of each element, one
digit per reload, in digits that every dtype holds exactly (0..15 where one-byte floats travel, else 0..255). Runs of
consecutive positions become blocks.

Storages are looked at through windows of `WINDOW` elements in all, each with reloads of its own: what is kept of an element is one
4-byte position, of one window at a time, however large a layer is.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fp8rl_workers.weights.load_layout import Block, Inputs, LearnError, Signature

Reload = Callable[[Inputs], None]

MAX_RUNS_SHARE = 1 / 16
"""A storage whose elements land in more runs than this share of them is repacked, not laid out."""
MIN_RUNS = 1024
MAX_RUNS = 1 << 21
WINDOW = 1 << 28
CHUNK = 1 << 24
"""Elements worked on together: bounds what the work itself takes beside the positions."""
NOWHERE = -2
"""Position of an element that no input reaches: one more is no position either, so a run never goes on from it."""


class Run(NamedTuple):
    """`length` consecutive elements of all inputs, counted from `source`, at `target` of a storage."""

    source: int
    target: int
    length: int


class Span(NamedTuple):
    """A part of a storage that is looked at. `storage`: its index among all."""

    storage: int
    start: int
    stop: int


def blocks_by_tags(
    signature: Signature, storages: Sequence[int], reload: Reload, names: list[str], flats: list[Tensor]
) -> dict[str, list[Block]]:
    """Blocks of these tensors, by tensor.

    Args:
        signature: The tensors, all that `reload` takes.
        storages: Indices of the storages that they may reach.
        reload: Loads a set of them.
        names: Of all storages.
        flats: All storages, flat.

    Raises:
        LearnError: storages whose elements come in too many runs.
    """
    runs: dict[int, list[Run]] = {storage: [] for storage in storages}
    scattered: dict[str, str] = {}
    for window in windows([(storage, flats[storage].numel()) for storage in storages]):
        pieces = [flats[span.storage][span.start : span.stop] for span in window]
        for span, position in zip(window, positions_in(signature, reload, pieces), strict=True):
            size, known = flats[span.storage].numel(), runs[span.storage]
            limit = min(max(MIN_RUNS, int(size * MAX_RUNS_SHARE)), MAX_RUNS)
            found = starts_of(position, limit)
            if len(known) + len(found) > limit:
                count = len(known) + len(found)
                scattered[names[span.storage]] = (
                    f"its {size} elements come in {count} runs or more: the engine repacks it"
                )
            else:
                extend(known, runs_of(position, found, span.start))
    if scattered:
        raise LearnError(scattered)
    return by_tensor(signature, runs)


def windows(sizes: Sequence[tuple[int, int]]) -> Iterator[list[Span]]:
    """Storages (index, elements) cut so that those looked at together have `WINDOW` elements at most."""
    window: list[Span] = []
    room = WINDOW
    for storage, size in sizes:
        start = 0
        while start < size:
            stop = min(size, start + room)
            window.append(Span(storage, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield window
                window, room = [], WINDOW
    if window:
        yield window


def positions_in(signature: Signature, reload: Reload, pieces: list[Tensor]) -> list[Tensor]:
    """Per piece of storage, the number of the input element that each element took; `NOWHERE` if it took none unchanged."""
    device = pieces[0].device
    total = sum(torch.Size(shape).numel() for _, _, shape in signature)
    kind = torch.int32 if total < 1 << 31 else torch.int64
    base = 16 if any(dtype_of(dtype).itemsize == 1 for _, dtype, _ in signature) else 256
    found = [torch.zeros(piece.numel(), dtype=kind, device=device) for piece in pieces]
    for value in (1, 2):
        reload(filled(signature, value, device))
        for position, piece in chunks(found, pieces):
            position.masked_fill_(comparable(piece) != value, NOWHERE)
    place = 0
    while base**place < total:
        reload(digits(signature, place, base, device))
        for position, piece in chunks(found, pieces):
            position.add_(torch.where(position == NOWHERE, 0, piece.to(kind) * base**place))
        place += 1
    return found


def chunks(positions: list[Tensor], pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions and the storage that they are of, `CHUNK` elements at a time."""
    for position, piece in zip(positions, pieces, strict=True):
        for at in range(0, len(piece), CHUNK):
            yield position[at : at + CHUNK], piece[at : at + CHUNK]


def comparable(piece: Tensor) -> Tensor:
    """The values in a dtype that compares."""
    return piece.to(torch.bfloat16) if piece.element_size() == 1 and piece.is_floating_point() else piece


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def filled(signature: Signature, value: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Inputs of one value."""
    for name, dtype, shape in signature:
        yield name, torch.full(shape, value, dtype=dtype_of(dtype), device=device)


def digits(signature: Signature, place: int, base: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each element's number in the whole set of inputs, its digit at `place`."""
    start = 0
    for name, dtype, shape in signature:
        count = torch.Size(shape).numel()
        out = torch.empty(count, dtype=dtype_of(dtype), device=device)
        for at in range(0, count, CHUNK):
            number = torch.arange(start + at, start + min(at + CHUNK, count), device=device)
            out[at : at + CHUNK] = number.div_(base**place, rounding_mode="floor").remainder_(base).to(out.dtype)
        yield name, out.reshape(shape)
        start += count


def starts_of(position: Tensor, limit: int) -> Tensor:
    """Where runs begin, on the host, or the first ones when there are more than `limit`.

    A run begins at a position that is not one more than the one before; what is `NOWHERE` goes together.
    """
    found = [torch.zeros(1, dtype=torch.int64)]
    count = 1
    for at in range(0, len(position) - 1, CHUNK):
        piece = position[at : at + CHUNK + 1]
        breaks = (piece.diff() != 1) & ((piece[1:] != NOWHERE) | (piece[:-1] != NOWHERE))
        found.append(breaks.nonzero().view(-1).cpu() + at + 1)
        count += len(found[-1])
        if count > limit:
            break
    return torch.cat(found)


def runs_of(position: Tensor, starts: Tensor, offset: int) -> Iterator[Run]:
    """The runs that begin at `starts`, without those of `NOWHERE`. `offset`: where in its storage `position` begins."""
    ends = torch.cat([starts[1:], torch.tensor([len(position)])])
    source = position[starts.to(position.device)].cpu()
    for first, at, end in zip(source.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if first != NOWHERE:
            yield Run(first, offset + at, end - at)


def extend(runs: list[Run], more: Iterator[Run]) -> None:
    """Add runs; one that goes on where the last ends, in another window, is joined to it."""
    for run in more:
        last = runs[-1] if runs else None
        if last is not None and (last.source + last.length, last.target + last.length) == run[:2]:
            runs[-1] = last._replace(length=last.length + run.length)
        else:
            runs.append(run)


def by_tensor(signature: Signature, runs: dict[int, list[Run]]) -> dict[str, list[Block]]:
    """Blocks of each tensor: runs cut at the ends of tensors, those of equal length at equal strides joined."""
    sizes = [torch.Size(shape).numel() for _, _, shape in signature]
    ends = list(accumulate(sizes))
    blocks: dict[str, list[Block]] = {name: [] for name, _, _ in signature}
    tensors = list(blocks)
    for storage, found in runs.items():
        for index, src, dst, rows, cols, src_stride, dst_stride in merge(
            [cut for run in found for cut in cuts(run, ends)]
        ):
            name, start = tensors[index], ends[index] - sizes[index]
            blocks[name].append(Block(storage, name, src - start, dst, rows, cols, src_stride, dst_stride))
    return blocks


def cuts(run: Run, ends: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, source, target, length) of a run's part in each tensor."""
    source, target, left = run
    index = bisect.bisect_right(ends, source)
    while left:
        length = min(left, ends[index] - source)
        if length:
            yield index, source, target, length
        source, target, left, index = source + length, target + length, left - length, index + 1


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
