"""Which byte of which bucket each part of the wire takes. Pure, no torch.

Parts are laid down in the order given, each at a multiple of 256 bytes (so that any dtype can be viewed in place), into
buckets of at most `bucket_bytes`. Parts of one group (a weight's codes and scales) share a bucket, so one cast fills one
bucket. A group larger than `bucket_bytes` gets a bucket of its own, of its own size: nothing is ever split, so a receiver
needs no reassembly; the price is that a staging buffer holds the larger of `bucket_bytes` and the largest weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True)
class Part:
    """Something to place: its name and size in bytes; `group` keeps neighbours together (default: the name)."""

    name: str
    nbytes: int
    group: str = ""


@dataclass(frozen=True)
class Slot:
    """Where a part stands: bytes `offset` to `offset + nbytes` of bucket `bucket`."""

    name: str
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Slots in wire order and the size of each bucket in bytes."""

    slots: tuple[Slot, ...]
    buckets: tuple[int, ...]

    def by_bucket(self) -> list[list[Slot]]:
        """Slots of each bucket, in order: what to pack before it is sent and to unpack after it came."""
        found: list[list[Slot]] = [[] for _ in self.buckets]
        for slot in self.slots:
            found[slot.bucket].append(slot)
        return found


def align(offset: int) -> int:
    """Smallest multiple of 256 that is >= offset."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _groups(parts: Iterable[Part]) -> list[list[Part]]:
    """Runs of neighbours that share a group."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and (part.group or part.name) == (runs[-1][0].group or runs[-1][0].name):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def plan_buckets(parts: Sequence[Part], bucket_bytes: int) -> Layout:
    """Place `parts`, in order.

    Raises:
        ValueError: `bucket_bytes` or a size is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"weightSync.bucketBytes: {bucket_bytes} is not positive")
    empty = [part.name for part in parts if part.nbytes <= 0]
    if empty:
        raise ValueError(
            f"{empty[0]}: a part of {len(empty)} has no bytes; every tensor on the wire has at least one element"
        )
    slots: list[Slot] = []
    buckets: list[int] = []
    for group in _groups(parts):
        size = sum(align(part.nbytes) for part in group)
        if not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(0)
        for part in group:
            slots.append(Slot(part.name, len(buckets) - 1, buckets[-1], part.nbytes))
            buckets[-1] = align(buckets[-1] + part.nbytes)
    return Layout(tuple(slots), tuple(buckets))
