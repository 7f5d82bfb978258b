"""Weights to all engines: offer -> gather -> cast -> bucket -> wire -> seal -> reports. The prepare phase of a sync.

    offer    on the epoch's store, from shapes alone, so that receivers allocate while the trainer casts
    cast     into a staging copy, under the lock that the next optimizer step waits for: afterwards training may go on
    wire     bucket by bucket from the staging copy
    seal     digests of the staged bytes, on the store
    report   each engine rank says prepared or failed, until the deadline

A failure before the seal is said on the store (`abort/<n>`), so that no rank waits for bytes that will not come. What a rank
failed with, or that it did not report, stands in the SyncReport; the orchestrator decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fp8rl_workers.errors import WorkerError
from fp8rl_workers.protocol import EngineWire, MemberReport, SyncReport, SyncRequest
from fp8rl_workers.weights.cast import Rounding, quantize
from fp8rl_workers.weights.digest import digest, to_hex
from fp8rl_workers.weights.group import Group
from fp8rl_workers.weights.offer import Offer, Seal, TensorEntry, Weight, make_seal, plan_tensors
from fp8rl_workers.weights.wire import WireError


class WeightSource(Protocol):
    """Whose weights are published."""

    weights_lock: threading.Lock
    step: int

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and BF16 weight of each tensor, in the order of the offer."""

    def rounding(self) -> Rounding | None:
        """Key of stochastic rounding, None for the nearest."""


@dataclass(frozen=True)
class WireFormat:
    """What travels. `form`: the wire of quantized weights; `weights`: all of them, in order."""

    form: EngineWire
    scale_format: Literal["fp32", "pow2"]
    weights: Sequence[Weight]
    bucket_bytes: int


def make_offer(request: SyncRequest, step: int, attempt: int, form: WireFormat) -> Offer:
    """The offer of a sync: layout from the shapes alone."""
    tensors, buckets = plan_tensors(form.weights, form.form, form.bucket_bytes)
    return Offer(
        job_uid=request.job_uid,
        epoch=request.epoch,
        sync_id=request.sync_id,
        version=request.version,
        attempt=attempt,
        step=step,
        wire=form.form,
        scale_format=form.scale_format,
        buckets=buckets,
        tensors=tensors,
    )


def place(entry: TensorEntry, buckets: Sequence[Tensor]) -> Tensor:
    """The entry's bytes in its bucket, as a tensor of its dtype and shape."""
    view = buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
    return view.view(getattr(torch, entry.dtype)).view(entry.local_shape)


def stage(offer: Offer, form: WireFormat, source: WeightSource) -> tuple[list[Tensor], dict[str, float]]:
    """Cast all weights into buckets (uint8, host memory). Hold the source's `weights_lock`.

    Returns:
        The buckets, and the seconds of stages `gather` and `cast`.

    Raises:
        NonFiniteError: a weight is NaN or infinite.
    """
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in offer.buckets]
    entries = {entry.name: entry for entry in offer.tensors}
    quantized = {weight.name: weight.quantized for weight in form.weights}
    seconds = {"gather": 0.0, "cast": 0.0}
    mark = time.monotonic()
    for name, weight in source.weights():
        gathered = time.monotonic()
        wire: EngineWire = form.form if quantized[name] else "bf16"
        parts = quantize(name, weight, wire, scale_format=form.scale_format, rounding=source.rounding())
        for suffix, part in parts.items():
            place(entries[name + suffix], buckets).copy_(part)
        seconds["gather"] += gathered - mark
        mark = time.monotonic()
        seconds["cast"] += mark - gathered
    return buckets, seconds


def seal_of(offer: Offer, buckets: Sequence[Tensor]) -> Seal:
    """The seal of staged buckets."""
    return make_seal(offer, {entry.name: to_hex(digest(place(entry, buckets))) for entry in offer.tensors})


def publish(
    group: Group, n: int, request: SyncRequest, *, attempt: int, source: WeightSource, form: WireFormat
) -> SyncReport:
    """Offer and send the source's weights to all engine ranks of the group, as its n-th offer.

    Raises:
        NonFiniteError: a weight is NaN or infinite; the offer is taken back.
        SyncError: the store is lost.
    """
    deadline = time.monotonic() + request.timeout_seconds
    start = time.monotonic()
    with source.weights_lock:
        offer = make_offer(request, source.step, attempt, form)
        group.put_offer(n, offer.model_dump_json())
        stages = {"offer": time.monotonic() - start}
        try:
            buckets, cast_seconds = stage(offer, form, source)
        except WorkerError as error:
            group.put_abort(n, str(error))
            raise
    stages |= cast_seconds
    try:
        seal = send(group, n, offer, buckets, stages)
    except WireError as error:
        group.put_abort(n, str(error))
        reports = group.wait_reports(n, deadline - time.monotonic())
        return report_of(offer, "", stages, reports, world_size=group.epoch.world_size, missing=str(error))
    sealed = time.monotonic()
    reports = group.wait_reports(n, deadline - sealed)
    stages["load"] = time.monotonic() - sealed
    late = f"no report within {request.timeout_seconds:g} s"
    return report_of(offer, seal.total, stages, reports, world_size=group.epoch.world_size, missing=late)


def send(group: Group, n: int, offer: Offer, buckets: Sequence[Tensor], stages: dict[str, float]) -> Seal:
    """Send the buckets and the seal; adds stages `wire` and `digest`.

    Raises:
        WireError: a peer is lost or late, or somebody aborted.
    """
    start = time.monotonic()
    with group.transfer(n):
        for bucket in buckets:
            group.wire.send(bucket)
    sent = time.monotonic()
    seal = seal_of(offer, buckets)
    group.put_seal(n, seal.model_dump_json())
    stages["wire"] = sent - start
    stages["digest"] = time.monotonic() - sent
    return seal


def report_of(
    offer: Offer,
    total: str,
    stages: dict[str, float],
    reports: dict[int, MemberReport],
    *,
    world_size: int,
    missing: str,
) -> SyncReport:
    """The prepare phase; ranks that said nothing failed with `missing`."""
    members = [
        reports.get(rank)
        or MemberReport(
            sync_id=offer.sync_id, epoch=offer.epoch, rank=rank, state="failed", version=offer.version, error=missing
        )
        for rank in range(1, world_size)
    ]
    return SyncReport(
        sync_id=offer.sync_id,
        epoch=offer.epoch,
        version=offer.version,
        step=offer.step,
        attempt=offer.attempt,
        digest=total,
        wire_bytes=offer.wire_bytes,
        stages=stages,
        members=members,
    )
