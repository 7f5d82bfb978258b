"""What a sync will send, said before it is sent (`Offer`), and what was sent, said after (`Seal`). JSON, no torch.

The layout of an offer is known before a byte is cast: names, shapes, dtypes, buckets and offsets follow from the model's
shapes and the precision plan alone. Digests are known only after the last cast, so they travel behind the buckets in the
seal: a receiver allocates from the offer, fills its shadow, digests what stands there, and compares with the seal before it
reports itself prepared. Both records carry job UID, epoch and sync id; `parse_*` refuse those of others.

Entries are wire tensors, named by the HF name plus the suffix of the format's part (`cast`), in wire order: by bucket, then
offset. `slice` is None for a whole tensor, else [start, stop] per dimension of `shape`; pieces of one tensor may come from
several senders and their digests add up (`digest`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from fp8rl_workers.config import Record
from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.bucket import ALIGNMENT, Layout, Part, plan_buckets
from fp8rl_workers.weights.digest import joined

WireDtype = Literal["float8_e4m3fn", "bfloat16", "float32", "int32", "uint8"]

ITEM_BYTES: dict[str, int] = {"float8_e4m3fn": 1, "uint8": 1, "bfloat16": 2, "float32": 4, "int32": 4}

DIGITS = 16
EXPERT = re.compile(r"\.experts\.\d+\.")

SCALE_SUFFIX: dict[EngineWire, str] = {"blockwise": "_scale_inv", "mxfp8": "_scale", "channel": "_scale"}


@dataclass(frozen=True)
class Weight:
    """A weight to be sent: HF name, shape, whether the plan quantizes it, and as what it travels where it does not."""

    name: str
    shape: tuple[int, ...]
    quantized: bool
    dtype: Literal["bfloat16", "float32", "int32"] = "bfloat16"


class TensorEntry(Record):
    """One tensor (or piece) on the wire. `weight` is the HF name that it belongs to; `shape` is the whole tensor's."""

    name: str
    weight: str
    shape: list[int]
    dtype: WireDtype
    bucket: int = Field(ge=0)
    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)
    sender: int = Field(default=0, ge=0, description="Rank in the epoch's world that sends it.")
    slice: list[tuple[int, int]] | None = None

    @property
    def local_shape(self) -> list[int]:
        """Shape of what is sent: the slice's, or the whole."""
        return self.shape if self.slice is None else [stop - start for start, stop in self.slice]


class SyncHeader(Record):
    """Which sync a record belongs to."""

    job_uid: str
    epoch: int
    sync_id: int
    version: int


class WireLayout(Record):
    """What every sync of an epoch brings: `buckets` holds the size of each in bytes, in the order of sending."""

    buckets: list[int]
    tensors: list[TensorEntry]

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = [fault for entry in self.tensors for fault in entry_faults(entry, self.buckets)]
        faults += overlap_faults(self.tensors)
        if faults:
            more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
            raise ValueError("; ".join(faults[:5]) + more)
        return self


class OfferHead(SyncHeader):
    """An offer as it stands on the store; `layout`: digest of the layout's text, which was put there once."""

    attempt: int
    step: int
    wire: EngineWire
    scale_format: Literal["fp32", "pow2"]
    layout: str


@dataclass(frozen=True)
class Offer:
    """What will be sent: an offer's head and its layout."""

    head: OfferHead
    layout: WireLayout

    @property
    def version(self) -> int:
        """The version that is offered."""
        return self.head.version

    @property
    def wire(self) -> EngineWire:
        """The format of quantized weights."""
        return self.head.wire

    @property
    def buckets(self) -> list[int]:
        """Size of each bucket in bytes."""
        return self.layout.buckets

    @property
    def tensors(self) -> list[TensorEntry]:
        """What travels, in order."""
        return self.layout.tensors

    @property
    def wire_bytes(self) -> int:
        """Bytes that travel, padding included."""
        return sum(self.buckets)

    def by_bucket(self) -> list[list[TensorEntry]]:
        """Entries of each bucket, in order of offset."""
        found: list[list[TensorEntry]] = [[] for _ in self.buckets]
        for entry in self.tensors:
            found[entry.bucket].append(entry)
        return found


class LayoutReader:
    """Layouts by digest, each fetched and parsed once. `fetch` gives the text of a digest (`Group.layout`)."""

    def __init__(self, fetch: Callable[[str], str]) -> None:
        self._fetch = fetch
        self._known: dict[str, WireLayout] = {}

    def __call__(self, digest: str) -> WireLayout:
        """The layout of a digest.

        Raises:
            InvalidInputError: its text is another one's, or contradicts itself.
        """
        if digest not in self._known:
            text = self._fetch(digest)
            if layout_digest(text) != digest:
                raise InvalidInputError(f"layout: the text under {digest} digests to {layout_digest(text)}")
            try:
                self._known[digest] = WireLayout.model_validate_json(text)
            except ValidationError as error:
                raise InvalidInputError(f"layout: {_first_fault(error)}") from error
        return self._known[digest]


def layout_digest(text: str) -> str:
    """32 hexadecimal digits of a layout's JSON."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Seal(SyncHeader):
    """What was sent: 16 hexadecimal digits for each tensor of the layout, in its order, and the total over layout and digests."""

    digests: str
    total: str

    def differences(self, offer: Offer, digests: str) -> list[str]:
        """One sentence for each tensor whose digest in `digests` is not as sealed; empty when all bytes are right."""
        if digests == self.digests:
            return []
        pairs = zip(split(digests), split(self.digests), strict=True)
        return [
            f"{entry.name}: digest {found}, sealed {sealed}"
            for entry, (found, sealed) in zip(offer.tensors, pairs, strict=True)
            if found != sealed
        ]


def split(digests: str) -> list[str]:
    """16 digits each."""
    return [digests[at : at + DIGITS] for at in range(0, len(digests), DIGITS)]


def total_of(layout: str, digests: str) -> str:
    """32 hexadecimal digits that bind the digests to the tensors of a layout, so that two tensors cannot change places."""
    return hashlib.blake2b(f"{layout}\n{digests}".encode(), digest_size=16).hexdigest()


def entry_faults(entry: TensorEntry, buckets: Sequence[int]) -> list[str]:
    """What is wrong with one entry by itself, with the arithmetic."""
    faults = []
    if entry.slice is not None and (
        len(entry.slice) != len(entry.shape)
        or any(not 0 <= a < b <= n for (a, b), n in zip(entry.slice, entry.shape, strict=False))
    ):
        return [f"{entry.name}: slice {entry.slice} is not inside shape {entry.shape}"]
    expected = math.prod(entry.local_shape) * ITEM_BYTES[entry.dtype]
    if entry.nbytes != expected:
        faults.append(f"{entry.name}: nbytes {entry.nbytes}, but {entry.local_shape} of {entry.dtype} is {expected}")
    if entry.offset % ALIGNMENT:
        faults.append(f"{entry.name}: offset {entry.offset} is no multiple of {ALIGNMENT}")
    if entry.bucket >= len(buckets):
        faults.append(f"{entry.name}: bucket {entry.bucket} of {len(buckets)}")
    elif entry.offset + entry.nbytes > buckets[entry.bucket]:
        end = entry.offset + entry.nbytes
        faults.append(f"{entry.name}: ends at {end} in bucket {entry.bucket} of {buckets[entry.bucket]} bytes")
    return faults


def overlap_faults(entries: Sequence[TensorEntry]) -> list[str]:
    """Names sent twice whole, entries out of order, and entries that share bytes."""
    faults = []
    seen: set[tuple[str, str]] = set()
    last = (0, 0, "")
    for entry in entries:
        key = (entry.name, str(entry.slice))
        if key in seen or (entry.slice is not None and (entry.name, "None") in seen):
            faults.append(f"{entry.name}: offered twice")
        seen.add(key)
        if (entry.bucket, entry.offset) < last[:2]:
            faults.append(
                f"{entry.name}: starts at {entry.offset} of bucket {entry.bucket}, before {last[2]} ends at {last[1]}"
            )
        last = (entry.bucket, entry.offset + entry.nbytes, entry.name)
    return faults


def stacked(weights: Iterable[Weight]) -> list[Weight]:
    """Weights with the experts of a projection as one stack each: `experts.*.up_proj.weight` `[E, N, K]`, where the first one stood.

    Experts that differ in shape or precision stay apart.
    """
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(EXPERT.sub(".experts.*.", weight.name), []).append(weight)
    found: list[Weight] = []
    for name, group in groups.items():
        first = group[0]
        names = [name.replace("*", str(e)) for e in range(len(group))]
        alike = all(replace(weight, name="") == replace(first, name="") for weight in group)
        if len(group) > 1 and alike and [weight.name for weight in group] == names:
            found.append(replace(first, name=name, shape=(len(group), *first.shape)))
        else:
            found += group
    return found


def members_of(name: str, shape: Sequence[int]) -> list[str]:
    """HF names of a wire tensor: its own, or one for each member of a stack of this shape."""
    return [name.replace("*", str(e)) for e in range(shape[0])] if "*" in name else [name]


def wire_parts(weight: Weight, wire: EngineWire) -> list[tuple[str, tuple[int, ...], WireDtype]]:
    """Name, shape and dtype of each part of a weight on the wire, codes first (the table of `cast`)."""
    if not weight.quantized or wire == "bf16":
        return [(weight.name, weight.shape, weight.dtype)]
    *stack, rows, columns = weight.shape
    scale = weight.name + SCALE_SUFFIX[wire]
    codes: tuple[str, tuple[int, ...], WireDtype] = (weight.name, weight.shape, "float8_e4m3fn")
    if wire == "blockwise":
        return [codes, (scale, (*stack, -(-rows // 128), -(-columns // 128)), "float32")]
    if wire == "mxfp8":
        return [codes, (scale, (*stack, rows, columns // 32), "uint8")]
    return [codes, (scale, (*stack, rows, 1), "bfloat16")]


def plan_layout(weights: Iterable[Weight], wire: EngineWire, bucket_bytes: int) -> WireLayout:
    """Entries in wire order and the bucket sizes, for one sender that holds whole weights.

    Raises:
        ValueError: see `plan_buckets`.
    """
    described = [(weight.name, *part) for weight in weights for part in wire_parts(weight, wire)]
    parts = [Part(name, math.prod(shape) * ITEM_BYTES[dtype], group=weight) for weight, name, shape, dtype in described]
    layout: Layout = plan_buckets(parts, bucket_bytes)
    entries = [
        TensorEntry(
            name=name,
            weight=weight,
            shape=list(shape),
            dtype=dtype,
            bucket=slot.bucket,
            offset=slot.offset,
            nbytes=slot.nbytes,
        )
        for (weight, name, shape, dtype), slot in zip(described, layout.slots, strict=True)
    ]
    return WireLayout(buckets=list(layout.buckets), tensors=entries)


def make_seal(offer: Offer, digests: Sequence[int]) -> Seal:
    """The seal of an offer from the digests of its tensors, in their order.

    Raises:
        ValueError: there are more or fewer digests than tensors.
    """
    if len(digests) != len(offer.tensors):
        raise ValueError(f"digests: {len(digests)} for {len(offer.tensors)} tensors")
    head, text = offer.head, joined(digests)
    return Seal(
        job_uid=head.job_uid,
        epoch=head.epoch,
        sync_id=head.sync_id,
        version=head.version,
        digests=text,
        total=total_of(head.layout, text),
    )


def parse_offer(text: str | bytes, job_uid: str, epoch: int, layout_of: Callable[[str], WireLayout]) -> Offer:
    """Read an offer; `layout_of` finds its layout (`LayoutReader`).

    Raises:
        InvalidInputError: no JSON, a field is unknown, missing or out of range, or the layout contradicts itself.
        StaleError: it belongs to another job or epoch.
    """
    try:
        head = OfferHead.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInputError(f"offer: {_first_fault(error)}") from error
    _refuse_foreign("offer", head, job_uid, epoch)
    return Offer(head, layout_of(head.layout))


def parse_seal(text: str | bytes, offer: Offer) -> Seal:
    """Read the seal of `offer`.

    Raises:
        InvalidInputError: no JSON, a wrong field, a wrong total, or digests of more or fewer tensors than the offer's.
        StaleError: it belongs to another job, epoch, sync or version.
    """
    try:
        seal = Seal.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInputError(f"seal: {_first_fault(error)}") from error
    head = offer.head
    _refuse_foreign("seal", seal, head.job_uid, head.epoch)
    if (seal.sync_id, seal.version) != (head.sync_id, head.version):
        raise StaleError(
            f"seal: is of sync {seal.sync_id}, version {seal.version}; "
            f"the offer is of sync {head.sync_id}, version {head.version}"
        )
    if len(seal.digests) != DIGITS * len(offer.tensors):
        raise InvalidInputError(f"seal: {len(seal.digests)} digits for {len(offer.tensors)} tensors of {DIGITS} each")
    if seal.total != (expected := total_of(head.layout, seal.digests)):
        raise InvalidInputError(f"seal: total {seal.total!r} is not that of its layout and digests, {expected!r}")
    return seal


def _first_fault(error: ValidationError) -> str:
    """Field and reason of the first fault of a record."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"


def _refuse_foreign(kind: str, record: SyncHeader, job_uid: str, epoch: int) -> None:
    if record.job_uid != job_uid:
        raise StaleError(f"{kind}: belongs to job {record.job_uid}, not to {job_uid}")
    if record.epoch != epoch:
        raise StaleError(f"{kind}: belongs to epoch {record.epoch}, this process is in epoch {epoch}")
