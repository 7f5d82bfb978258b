"""What a sync will send, said before it is sent (`Offer`), and what was sent, said after (`Seal`). JSON, no torch.

The layout of an offer is known before a byte is cast: names, shapes, dtypes, buckets and offsets follow from the model's
shapes and the precision plan alone. Digests are known only after the last cast, so they travel behind the buckets in the
seal: a receiver allocates from the offer, fills its shadow, digests what stands there, and compares with the seal before it
reports itself prepared. Both records carry job UID, epoch and sync id; `parse_*` refuse those of others.

Entries are wire tensors, named by the HF name plus the suffix of the format's part (`cast`), in wire order: by bucket, then
offset. `slice` is None for a whole tensor, else [start, stop] per dimension of `shape`; pieces of one tensor may come from
several senders and their digests add up (`digest`), so the seal has one digest per name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from fp8rl_workers.config import Record
from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.bucket import ALIGNMENT, Layout, Part, plan_buckets
from fp8rl_workers.weights.digest import total_digest

WireDtype = Literal["float8_e4m3fn", "bfloat16", "float32", "uint8"]

ITEM_BYTES: dict[str, int] = {"float8_e4m3fn": 1, "uint8": 1, "bfloat16": 2, "float32": 4}

SCALE_SUFFIX: dict[EngineWire, str] = {"blockwise": "_scale_inv", "mxfp8": "_scale", "channel": "_scale"}


@dataclass(frozen=True)
class Weight:
    """A weight to be sent: HF name, shape, and whether the plan quantizes it (else it travels as BF16)."""

    name: str
    shape: tuple[int, ...]
    quantized: bool


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


class Offer(SyncHeader):
    """What will be sent: `buckets` holds the size of each in bytes, in the order of sending."""

    attempt: int
    step: int
    wire: EngineWire
    scale_format: Literal["fp32", "pow2"]
    buckets: list[int]
    tensors: list[TensorEntry]

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = [fault for entry in self.tensors for fault in entry_faults(entry, self.buckets)]
        faults += overlap_faults(self.tensors)
        if faults:
            more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
            raise ValueError("; ".join(faults[:5]) + more)
        return self


class Seal(SyncHeader):
    """What was sent: the digest of each wire tensor (16 hexadecimal digits) and the total over (name, digest)."""

    digests: dict[str, str]
    total: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        expected = total_digest(self.digests)
        if self.total != expected:
            raise ValueError(f"total: {self.total!r} is not the digest of the {len(self.digests)} pairs, {expected!r}")
        return self

    def differences(self, digests: dict[str, str]) -> list[str]:
        """One sentence for each tensor of `digests` that is not as sealed; empty when all bytes are right."""
        return [
            f"{name}: digest {value}, sealed {self.digests.get(name, 'not at all')}"
            for name, value in sorted(digests.items())
            if self.digests.get(name) != value
        ]


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


def wire_parts(weight: Weight, wire: EngineWire) -> list[tuple[str, tuple[int, ...], WireDtype]]:
    """Name, shape and dtype of each part of a weight on the wire, codes first (the table of `cast`)."""
    if not weight.quantized or wire == "bf16":
        return [(weight.name, weight.shape, "bfloat16")]
    *stack, rows, columns = weight.shape
    scale = weight.name + SCALE_SUFFIX[wire]
    codes: tuple[str, tuple[int, ...], WireDtype] = (weight.name, weight.shape, "float8_e4m3fn")
    if wire == "blockwise":
        return [codes, (scale, (*stack, -(-rows // 128), -(-columns // 128)), "float32")]
    if wire == "mxfp8":
        return [codes, (scale, (*stack, rows, columns // 32), "uint8")]
    return [codes, (scale, (*stack, rows, 1), "bfloat16")]


def plan_tensors(weights: Iterable[Weight], wire: EngineWire, bucket_bytes: int) -> tuple[list[TensorEntry], list[int]]:
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
    return entries, list(layout.buckets)


def make_seal(offer: Offer, digests: dict[str, str]) -> Seal:
    """The seal of an offer from its tensors' digests.

    Raises:
        ValueError: a tensor of the offer has no digest, or a digest no tensor.
    """
    expected = {entry.name for entry in offer.tensors}
    if expected != set(digests):
        odd = sorted(expected ^ set(digests))
        raise ValueError(f"digests: {len(odd)} names differ from the offer's, the first is {odd[0]}")
    header = {name: getattr(offer, name) for name in SyncHeader.model_fields}
    return Seal(**header, digests=digests, total=total_digest(digests))


def parse_offer(text: str | bytes, job_uid: str, epoch: int) -> Offer:
    """Read an offer.

    Raises:
        InvalidInputError: no JSON, a field is unknown, missing or out of range, or the layout contradicts itself.
        StaleError: it belongs to another job or epoch.
    """
    try:
        offer = Offer.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInputError(f"offer: {_first_fault(error)}") from error
    _refuse_foreign("offer", offer, job_uid, epoch)
    return offer


def parse_seal(text: str | bytes, offer: Offer) -> Seal:
    """Read the seal of `offer`.

    Raises:
        InvalidInputError: no JSON, a wrong field, a wrong total, or other tensors than the offer's.
        StaleError: it belongs to another job, epoch, sync or version.
    """
    try:
        seal = Seal.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInputError(f"seal: {_first_fault(error)}") from error
    _refuse_foreign("seal", seal, offer.job_uid, offer.epoch)
    if (seal.sync_id, seal.version) != (offer.sync_id, offer.version):
        raise StaleError(
            f"seal: is of sync {seal.sync_id}, version {seal.version}; "
            f"the offer is of sync {offer.sync_id}, version {offer.version}"
        )
    odd = sorted(seal.digests.keys() ^ {entry.name for entry in offer.tensors})
    if odd:
        raise InvalidInputError(f"seal: {len(odd)} names differ from the offer's, the first is {odd[0]}")
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
