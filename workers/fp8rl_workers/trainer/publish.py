"""Weights to all engines: offer -> cast -> wire -> seal -> reports. The prepare phase of a sync.

    offer    on the epoch's store, from shapes alone, so that receivers get ready while the trainer casts
    cast     all weights into the staging buckets, under the lock that the next optimizer step waits for: afterwards training may
             go on. One plan of the epoch does it; on a GPU it runs on a stream of its own
    wire     the staging buckets, one after the other; over a shared wire nothing is to be done
    seal     digests of what was staged, on the store: taken while the bytes were made, not read back
    report   each engine rank says prepared or failed, until the deadline

A failure before the seal is said on the store (`abort/<n>`), so that no rank waits for bytes that will not come. What a rank
failed with, or that it did not report, stands in the SyncReport; the orchestrator decides.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fp8rl_workers.errors import InvalidModelError, WorkerError
from fp8rl_workers.protocol import EngineWire, MemberReport, SyncReport, SyncRequest
from fp8rl_workers.weights.cast import Rounding
from fp8rl_workers.weights.digest import of_stack
from fp8rl_workers.weights.group import Group
from fp8rl_workers.weights.kernels import Backend, CastItem, CastPlan, cast_plan
from fp8rl_workers.weights.offer import (
    Offer,
    OfferHead,
    TensorEntry,
    Weight,
    WireLayout,
    layout_digest,
    make_seal,
    members_of,
    plan_layout,
)
from fp8rl_workers.weights.wire import WireError


class WeightSource(Protocol):
    """Whose weights are published."""

    weights_lock: threading.Lock
    step: int

    def sources(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and weight of each tensor, BF16 or its fp32 master, where it stands: no copies, in the order of the offer."""

    def rounding(self) -> Rounding | None:
        """Key of stochastic rounding, None for the nearest."""


@dataclass(frozen=True)
class WireFormat:
    """What travels. `form`: the wire of quantized weights; `weights`: all of them, in order."""

    form: EngineWire
    scale_format: Literal["fp32", "pow2"]
    weights: Sequence[Weight]
    bucket_bytes: int
    cast_backend: Backend = "auto"


class Publisher:
    """The sending end of one epoch: its layout, its staging and its plan of casts are made once."""

    def __init__(self, group: Group, source: WeightSource, form: WireFormat, attempt: int) -> None:
        """See `publish`. Nothing is allocated before the first one."""
        self.group = group
        self.source = source
        self.form = form
        self.attempt = attempt
        self.layout = plan_layout(form.weights, form.form, form.bucket_bytes)
        self._layout_digest = ""
        self._staging: Staging | None = None
        self._released = -1

    def publish(self, n: int, request: SyncRequest) -> SyncReport:
        """Offer and send the source's weights to all engine ranks of the group, as its n-th offer.

        Raises:
            NonFiniteError: weights are NaN or infinite; the offer is taken back.
            SyncError: the store is lost, or a rank still reads the staging of the offer before.
        """
        deadline = time.monotonic() + request.timeout_seconds
        self._await_release(n - 1, request.timeout_seconds)
        begun = time.monotonic()
        with self.source.weights_lock:
            offer, staging = self._offer(n, request), self._staged()
            offered = time.monotonic()
            try:
                digests = staging.fill(self.source)
            except WorkerError as error:
                self.group.put_abort(n, str(error))
                raise
        stages = {"offer": offered - begun, "cast": time.monotonic() - offered}
        report = self._send(n, offer, digests, stages, deadline=deadline, outgoing=staging.outgoing())
        if self.group.wire.shared:
            waits = (n, request.timeout_seconds)
            threading.Thread(target=self._watch_release, args=waits, name="fp8rl-release", daemon=True).start()
        return report

    def _await_release(self, n: int, timeout: float) -> None:
        """Return when nobody reads the bytes of offer `n` any more; mostly that has been seen before anybody asks.

        Raises:
            SyncError: a rank still reads them after `timeout` seconds.
        """
        if self._released < n:
            self.group.wait_released(n, timeout)

    def _watch_release(self, n: int, timeout: float) -> None:
        """Wait beside the trainer until nobody reads offer `n`; who needs it meanwhile, or in vain, asks again and says so."""
        with contextlib.suppress(WorkerError):
            self.group.wait_released(n, timeout)
            self._released = n

    def _offer(self, n: int, request: SyncRequest) -> Offer:
        """Make the offer and put it where the ranks look; its layout before the first one."""
        self._staged()
        head = OfferHead(
            job_uid=request.job_uid,
            epoch=request.epoch,
            sync_id=request.sync_id,
            version=request.version,
            attempt=self.attempt,
            step=self.source.step,
            wire=self.form.form,
            scale_format=self.form.scale_format,
            layout=self._layout_digest,
        )
        self.group.put_offer(n, head.model_dump_json())
        return Offer(head, self.layout)

    def _staged(self) -> Staging:
        """The staging, made before the first offer together with what other ranks need to read it."""
        if self._staging is None:
            text = self.layout.model_dump_json()
            self._layout_digest = layout_digest(text)
            self.group.put_layout(self._layout_digest, text)
            self._staging = Staging(self.group, self.layout, self.source, self.form)
        return self._staging

    def _send(
        self,
        n: int,
        offer: Offer,
        digests: list[int],
        stages: dict[str, float],
        *,
        deadline: float,
        outgoing: Iterator[Tensor],
    ) -> SyncReport:
        """Send what is staged, seal it and collect the reports."""
        group, start = self.group, time.monotonic()
        try:
            with group.transfer(n):
                for bucket in () if group.wire.shared else outgoing:
                    group.wire.send(bucket)
        except WireError as error:
            group.put_abort(n, str(error))
            reports = group.wait_reports(n, deadline - time.monotonic())
            return report_of(offer, "", stages, reports, world_size=group.epoch.world_size, missing=str(error))
        sent = time.monotonic()
        seal = make_seal(offer, digests)
        group.put_seal(n, seal.model_dump_json())
        sealed = time.monotonic()
        reports = group.wait_reports(n, deadline - sealed)
        stages |= {"wire": sent - start, "seal": sealed - sent, "load": time.monotonic() - sealed}
        late = f"no report within {deadline - start:g} s"
        return report_of(offer, seal.total, stages, reports, world_size=group.epoch.world_size, missing=late)


class Staging:
    """Where the casts of an epoch go: the wire's buckets, or, where the wire's are elsewhere, buckets beside the weights."""

    def __init__(self, group: Group, layout: WireLayout, source: WeightSource, form: WireFormat) -> None:
        self._wire_buckets = group.wire.buffers(layout.buckets)
        self._layout = layout
        self._form = form
        sources = list(source.sources())
        device = sources[0][1].device
        same = self._wire_buckets[0].device == device
        self._buckets = self._wire_buckets if same else [bucket.to(device) for bucket in self._wire_buckets]
        for bucket in self._buckets:
            bucket.zero_()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._plan, self._addresses = self._planned(sources)

    def fill(self, source: WeightSource) -> list[int]:
        """Cast all weights; digest of each wire tensor in the layout's order. Hold the source's `weights_lock`.

        Raises:
            NonFiniteError: names each weight that is NaN or infinite.
        """
        with self._on_stream():
            self._plan.run(source.rounding())
            sources = list(source.sources())
            if [tensor.data_ptr() for _, tensor in sources] != self._addresses:
                self._plan, self._addresses = self._planned(sources)
                self._plan.run(source.rounding())
            found = self._plan.finish()
        return [of_stack([found[at] for at in places], size) for places, size in self._places]

    def outgoing(self) -> Iterator[Tensor]:
        """The wire's buckets, each with what was staged for it."""
        for bucket, staged in zip(self._wire_buckets, self._buckets, strict=True):
            if bucket is not staged:
                bucket.copy_(staged)
            yield bucket

    def _planned(self, sources: list[tuple[str, Tensor]]) -> tuple[CastPlan, list[int]]:
        """The plan that casts tensors where they stand, and where that is."""
        parts: dict[str, list[TensorEntry]] = {}
        for entry in self._layout.tensors:
            parts.setdefault(entry.weight, []).append(entry)
        quantized = {weight.name: weight.quantized for weight in self._form.weights}
        items: list[CastItem] = []
        self._places: list[tuple[list[int], int]] = []
        first = 0
        for weight, tensors in sources_of(dict(sources), self._layout).items():
            form: EngineWire = self._form.form if quantized[weight] else "bf16"
            outputs = tuple(place(entry, self._buckets) for entry in parts[weight])
            items += items_of(weight, tensors, form, outputs)
            last, step = first + len(outputs) * len(tensors), len(outputs)
            self._places += [
                (list(range(first + i, last, step)), out.nbytes // len(tensors)) for i, out in enumerate(outputs)
            ]
            first = last
        plan = cast_plan(items, self._form.scale_format, self._form.cast_backend)
        return plan, [tensor.data_ptr() for _, tensor in sources]

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A stream beside the trainer's, after what the trainer has enqueued."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def sources_of(held: Mapping[str, Tensor], layout: WireLayout) -> dict[str, list[Tensor]]:
    """For each weight of the layout what the trainer holds of it: itself, or the members of a stack one by one.

    Raises:
        InvalidModelError: the trainer holds others than the layout has.
    """
    found: dict[str, list[Tensor]] = {}
    used: set[str] = set()
    for entry in layout.tensors:
        names = [entry.weight] if entry.weight in held else members_of(entry.weight, entry.shape)
        found[entry.weight] = [held[name] for name in names if name in held]
        used.update(names)
    odd = sorted(used ^ held.keys())
    if odd:
        raise InvalidModelError(f"the trainer's weights are not the layout's: {len(odd)} differ, the first is {odd[0]}")
    return found


def items_of(weight: str, tensors: list[Tensor], form: EngineWire, outputs: tuple[Tensor, ...]) -> list[CastItem]:
    """Casts of one weight of the layout: of a stack in one, or member by member."""
    if "*" not in weight:
        return [CastItem((weight,), tensors[0], form, outputs)]
    names = members_of(weight, outputs[0].shape)
    if len(tensors) == 1:
        return [CastItem(tuple(names), tensors[0], form, outputs)]
    return [
        CastItem((name,), tensor, form, tuple(out[e] for out in outputs))
        for e, (name, tensor) in enumerate(zip(names, tensors, strict=True))
    ]


def place(entry: TensorEntry, buckets: Sequence[Tensor]) -> Tensor:
    """The entry's bytes in its bucket, as a tensor of its dtype and shape."""
    view = buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
    return view.view(getattr(torch, entry.dtype)).view(entry.local_shape)


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
    head = offer.head
    members = [
        reports.get(rank)
        or MemberReport(
            sync_id=head.sync_id, epoch=head.epoch, rank=rank, state="failed", version=head.version, error=missing
        )
        for rank in range(1, world_size)
    ]
    return SyncReport(
        sync_id=head.sync_id,
        epoch=head.epoch,
        version=head.version,
        step=head.step,
        attempt=head.attempt,
        digest=total,
        wire_bytes=offer.wire_bytes,
        stages=stages,
        members=members,
    )
