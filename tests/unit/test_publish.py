"""The sending end without a group: what is cast from where, and under which digests."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from fp8rl_workers.errors import InvalidModelError, NonFiniteError, SyncError
from fp8rl_workers.protocol import SyncRequest
from fp8rl_workers.trainer.publish import Publisher, Staging, WireFormat, place
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.digest import digest, of_stack
from fp8rl_workers.weights.offer import Weight, plan_layout, stacked

STACK = "model.layers.0.mlp.experts.*.up_proj.weight"
NAMES = [STACK.replace("*", str(e)) for e in range(3)]
WEIGHTS = [
    Weight("model.norm.weight", (128,), quantized=False),
    *(Weight(name, (128, 256), quantized=True) for name in NAMES),
]


class Wire:
    """Buckets on the host."""

    shared = False

    def buffers(self, sizes):
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]


class Group:
    wire = Wire()


class Source:
    """`whole`: holds the experts as one stack, else each by itself."""

    def __init__(self, *, whole: bool, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        self.weights_lock, self.step, self.whole = threading.Lock(), 1, whole
        self.norm = torch.randn(128, generator=generator).to(dtype)
        self.experts = torch.randn(3, 128, 256, generator=generator).to(dtype)

    def sources(self):
        yield "model.norm.weight", self.norm
        if self.whole:
            yield STACK, self.experts
        else:
            yield from zip(NAMES, self.experts, strict=True)

    def rounding(self):
        return None


def form(wire="blockwise"):
    return WireFormat(wire, "pow2", stacked(WEIGHTS), 1 << 20)


def staged(source, wire="blockwise"):
    layout = plan_layout(form(wire).weights, wire, 1 << 20)
    staging = Staging(Group(), layout, source, form(wire))
    found = staging.fill(source)
    buckets = list(staging.outgoing())
    return {entry.name: (place(entry, buckets), value) for entry, value in zip(layout.tensors, found, strict=True)}


def test_experts_of_a_projection_travel_as_one_stack_where_the_first_one_stood():
    assert [(w.name, w.shape) for w in stacked(WEIGHTS)] == [("model.norm.weight", (128,)), (STACK, (3, 128, 256))]
    other = [*WEIGHTS[:3], Weight(NAMES[2], (128, 256), quantized=False)]
    assert stacked(other) == other


@pytest.mark.parametrize("wire", ["blockwise", "mxfp8", "channel", "bf16"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stack_holds_the_cast_of_each_expert_under_the_digest_of_all_of_it(wire, whole, dtype):
    source = Source(whole=whole, dtype=dtype)
    found = staged(source, wire)
    assert found["model.norm.weight"][0].tolist() == source.norm.to(torch.bfloat16).tolist()
    for e, name in enumerate(NAMES):
        for suffix, part in quantize(name, source.experts[e].to(torch.bfloat16), wire).items():
            stack, _ = found[STACK + suffix]
            assert torch.equal(stack[e].view(torch.uint8), part.view(torch.uint8))
    assert all(value == digest(tensor) for tensor, value in found.values())


def test_digests_of_members_make_the_digest_of_their_stack():
    stack = torch.arange(24, dtype=torch.uint8).view(3, 8)
    assert of_stack([digest(member) for member in stack], 8) == digest(stack)


def test_weights_that_moved_are_cast_from_where_they_are():
    source = Source(whole=True)
    layout = plan_layout(form().weights, "blockwise", 1 << 20)
    staging = Staging(Group(), layout, source, form())
    staging.fill(source)
    source.norm = torch.full((128,), 3.0, dtype=torch.bfloat16)
    staging.fill(source)
    assert place(layout.tensors[0], list(staging.outgoing())).tolist() == [3.0] * 128


def test_all_weights_that_are_not_finite_are_named_at_once():
    source = Source(whole=False)
    source.experts[1, 0, 0], source.norm[5] = float("nan"), float("inf")
    with pytest.raises(NonFiniteError) as error:
        staged(source)
    assert "model.norm.weight" in str(error.value)
    assert NAMES[1] in str(error.value)


def test_a_trainer_that_lacks_a_weight_of_the_layout_is_refused_with_its_name():
    source = Source(whole=True)
    source.sources = lambda: iter([("model.norm.weight", source.norm)])
    with pytest.raises(InvalidModelError, match=r"3 differ, the first is model\.layers\.0\.mlp\.experts\.0\.up_proj"):
        staged(source)


class SharedGroup(Group):
    """A store whose one engine never says that it has read what was staged."""

    def __init__(self):
        self.wire, self.epoch = Wire(), SimpleNamespace(world_size=2)
        self.wire.shared = True
        self.staged = self.wire.buffers(plan_layout(form().weights, "blockwise", 1 << 20).buckets)
        self.wire.buffers = lambda _: self.staged
        self.offered = []

    def wait_released(self, n, timeout):
        raise SyncError(f"rank 1 still reads the weights of offer {n}")

    def put_layout(self, digest, text):
        pass

    def put_offer(self, n, text):
        self.offered.append(n)

    def put_seal(self, n, text):
        pass

    def transfer(self, n):
        return contextlib.nullcontext()

    def wait_reports(self, n, timeout):
        return {}


def test_nothing_is_offered_or_written_over_bytes_that_an_engine_still_reads():
    group, source = SharedGroup(), Source(whole=True)
    publisher = Publisher(group, source, form(), 0)
    request = SyncRequest(job_uid="job", epoch=1, sync_id=1, version=1, timeout_seconds=1)
    publisher.publish(0, request)
    before = [bucket.clone() for bucket in group.staged]
    source.experts.add_(1.0)
    with pytest.raises(SyncError, match="offer 0"):
        publisher.publish(1, request)
    assert group.offered == [0]
    assert all(torch.equal(bucket, old) for bucket, old in zip(group.staged, before, strict=True))


def test_experts_that_do_not_end_on_words_are_refused_with_the_arithmetic():
    assert of_stack([digest(torch.zeros(10, dtype=torch.uint8))], 10) == 0
    with pytest.raises(InvalidModelError, match="3 experts of 10 bytes each, and 10 % 4 = 2"):
        of_stack([1, 2, 3], 10)
