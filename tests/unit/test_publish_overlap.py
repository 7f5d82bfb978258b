"""The trainer is stopped for the cast only; what the wire costs is told from shapes alone."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from weight_sync.models import CONFIGS

from fp8rl_workers.protocol import MemberReport, SyncRequest
from fp8rl_workers.trainer.publish import Publisher, WireFormat, place
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.offer import Weight, plan_layout, stacked
from fp8rl_workers.weights.specs import plan_precision

NAMES = ["a.weight", "b.weight"]
WEIGHTS = [Weight(name, (128, 256), quantized=True) for name in NAMES]


class SlowWire:
    """Keeps each bucket back until it is let go."""

    shared = False

    def __init__(self):
        self.sending, self.go_on, self.sent = threading.Event(), threading.Event(), []

    def buffers(self, sizes):
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def send(self, bucket):
        self.sending.set()
        assert self.go_on.wait(30)
        self.sent.append(bucket.clone())


class Group:
    """A store of one process; its one engine reports at once."""

    def __init__(self):
        self.wire, self.epoch, self.seal = SlowWire(), SimpleNamespace(world_size=2), ""

    def wait_released(self, n, timeout):
        pass

    def put_layout(self, digest, text):
        pass

    def put_offer(self, n, text):
        pass

    def put_seal(self, n, text):
        self.seal = text

    def transfer(self, n):
        return contextlib.nullcontext()

    def wait_reports(self, n, timeout):
        return {1: MemberReport(sync_id=1, epoch=1, rank=1, state="prepared", version=1)}


class Source:
    """Two weights that an optimizer steps."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.weights_lock, self.step = threading.Lock(), 1
        self.masters = {name: torch.randn(128, 256, generator=generator) for name in NAMES}

    def sources(self):
        yield from self.masters.items()

    def rounding(self):
        return None


def test_the_optimizer_steps_while_buckets_are_sent_and_the_bytes_are_those_of_the_offer():
    group, source = Group(), Source()
    before = {name: master.to(torch.bfloat16) for name, master in source.masters.items()}
    publisher = Publisher(group, source, WireFormat("blockwise", "pow2", WEIGHTS, 40000, "torch"), 0)
    request = SyncRequest(job_uid="job", epoch=1, sync_id=1, version=1, timeout_seconds=30)
    reports = []
    sender = threading.Thread(target=lambda: reports.append(publisher.publish(0, request)))
    sender.start()
    assert group.wire.sending.wait(30)
    assert group.wire.sent == []
    assert source.weights_lock.acquire(timeout=10)
    for master in source.masters.values():
        master.add_(1.0)
    source.weights_lock.release()
    group.wire.go_on.set()
    sender.join(30)
    assert [member.state for member in reports[0].members] == ["prepared"]
    assert len(group.wire.sent) == len(publisher.layout.buckets) == 2
    sent = {entry.name: place(entry, group.wire.sent) for entry in publisher.layout.tensors}
    for name, weight in before.items():
        for suffix, part in quantize(name, weight, "blockwise", scale_format="pow2").items():
            assert torch.equal(sent[name + suffix].view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize(("model", "whole"), [("dense_8b", 0.577), ("moe_30b_a3b", 0.577)])
def test_wire_bytes_of_the_bf16_bytes_follow_from_the_shapes(model, whole):
    weights = stacked(plan_precision(CONFIGS[model], "blockwise").weights())
    layout = plan_layout(weights, "blockwise", 256 << 20)
    plain = {weight.name: 2 * math.prod(weight.shape) for weight in weights}
    codes = {weight.name for weight in weights if weight.quantized}
    quantized = sum(entry.nbytes for entry in layout.tensors if entry.weight in codes)
    assert sum(layout.buckets) / sum(plain.values()) <= whole
    assert quantized / sum(plain[name] for name in codes) <= 0.5002
