"""The rank's thread over a real store and wire on the loopback, with a small module instead of an engine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from offers import offer_of, put
from torch import nn

from fp8rl_workers.config import PodEnvironment
from fp8rl_workers.errors import DigestError, NotYetError, StaleError, SyncError
from fp8rl_workers.inference.agent import Agent
from fp8rl_workers.inference.rank import merge_states
from fp8rl_workers.inference.rank import state as rank_state
from fp8rl_workers.protocol import Decision, Epoch, Member
from fp8rl_workers.weights.digest import digest
from fp8rl_workers.weights.group import StoreHost, join_group
from fp8rl_workers.weights.load import Loader
from fp8rl_workers.weights.offer import Weight, make_seal, plan_layout

HERE = "127.31.8.1"
POD = PodEnvironment(Path("/c"), "token", "e", "e", HERE, 0, Path("/s"))
WEIGHTS = [Weight("w", (64, 64), quantized=False), Weight("v", (64,), quantized=False)]


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
        self.v = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)

    def reload(self, inputs):
        for name, tensor in inputs:
            getattr(self, name).copy_(tensor)


class Sender:
    """Rank 0: a store and one epoch at a time."""

    def __init__(self, transport):
        self.transport = transport
        self.host = StoreHost(HERE, 0)
        self.group = None
        self.number = self.sync_id = self.n = 0

    def form(self, agent, timeout=10.0):
        if self.group is not None:
            self.group.close()
        self.number, self.n = self.number + 1, 0
        epoch = Epoch(
            job_uid="job",
            attempt=0,
            epoch=self.number,
            world_size=2,
            store_host=HERE,
            store_port=self.host.port,
            timeout_seconds=timeout,
            members=[
                Member(pod="t", uid="t", role="trainer", address=HERE, ranks=[0], transport=self.transport),
                Member(pod="e", uid="e", role="inference", address=HERE, ranks=[1], transport=self.transport),
            ],
        )
        agent.join(epoch)
        self.group = join_group(epoch, 0, "t", HERE, self.host, token="token")
        return epoch

    def send(self, value, version, *, buckets_sent=None, seal=True, flip=False):
        """Offer weights that are all `value`; returns the seal's total."""
        self.sync_id += 1
        n, self.n = self.n, self.n + 1
        layout = plan_layout(WEIGHTS, "bf16", 4096)
        offer = offer_of(layout, epoch=self.number, sync_id=self.sync_id, version=version, step=version, wire="bf16")
        self.group.wait_released(n - 1, 10)
        buckets = self.group.wire.buffers(layout.buckets)
        put(self.group, n, offer)
        parts = {w.name: torch.full(w.shape, float(value), dtype=torch.bfloat16) for w in WEIGHTS}
        sealed = make_seal(offer, [digest(parts[entry.name]) for entry in offer.tensors])
        for number, entries in enumerate(offer.by_bucket()):
            if number == buckets_sent:
                return sealed.total
            bucket = buckets[number]
            for entry in entries:
                bucket[entry.offset : entry.offset + entry.nbytes] = parts[entry.name].view(-1).view(torch.uint8)
            bucket[0] ^= int(flip)
            self.group.wire.send(bucket)
        if seal:
            self.group.put_seal(n, sealed.model_dump_json())
        return sealed.total

    def report(self, timeout=10.0):
        return self.group.wait_reports(self.n - 1, timeout)[1]

    def decision(self, version, digest_):
        return Decision(
            job_uid="job", epoch=self.number, sync_id=self.sync_id, version=version, digest=digest_, committed=True
        )

    def close(self):
        self.group.close()
        self.host.close()


@pytest.fixture
def agent():
    model = Tiny()
    loader = Loader(model, model.reload, whole=True, mode="auto", unlearnable=dict)
    agent = Agent(loader, "codes", job_uid="job", pod=POD, local_rank=0)
    yield agent
    agent.leave()


@pytest.fixture(params=["gloo", "ipc"])
def sender(request):
    sender = Sender(request.param)
    yield sender
    sender.close()


@pytest.fixture
def sharer():
    sender = Sender("ipc")
    yield sender
    sender.close()


def commit(agent, decision):
    agent.verify(decision)
    agent.apply(decision)


def publish(agent, sender, value, version):
    total = sender.send(value, version)
    report = sender.report()
    assert (report.state, report.digest, report.version) == ("prepared", total, version)
    commit(agent, sender.decision(version, total))
    assert float(agent.loader.model.w.sum()) == value * 64 * 64


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_syncs_arrive_are_reported_and_committed_in_order(agent, sender):
    sender.form(agent)
    for version, value in enumerate((1, 2, 3), start=1):
        publish(agent, sender, value, version)
    assert agent.loader.path == "plan"
    assert agent.joined == 1


def test_nothing_changes_before_the_commit_and_only_the_prepared_sync_commits(agent, sender):
    sender.form(agent)
    publish(agent, sender, 1, 1)
    total = sender.send(2, 2)
    sender.report()
    good = sender.decision(2, total)
    assert float(agent.loader.model.w[0, 0]) == 1.0
    for change in ({"sync_id": 1}, {"version": 3}, {"digest": "0"}, {"job_uid": "x"}, {"epoch": 9}):
        with pytest.raises(StaleError):
            agent.verify(good.model_copy(update=change))
    commit(agent, good)
    with pytest.raises(NotYetError):
        agent.verify(good)


def test_damaged_bytes_are_reported_as_failed_and_the_next_sync_works(agent, sender):
    sender.form(agent)
    publish(agent, sender, 1, 1)
    sender.send(2, 2, flip=True)
    report = sender.report()
    assert report.state == "failed"
    assert "w: digest" in report.error
    assert agent.prepared is None
    publish(agent, sender, 3, 3)


def test_a_sender_that_dies_in_the_middle_leaves_the_old_version_and_the_next_epoch_works(agent, sender):
    sender.form(agent, timeout=3.0)
    publish(agent, sender, 1, 1)
    sender.send(2, 2, buckets_sent=1)
    sender.close()
    eventually(lambda: agent.joined is None)
    assert float(agent.loader.model.w[0, 0]) == 1.0
    sender.host, sender.group = StoreHost(HERE, 0), None
    sender.form(agent)
    publish(agent, sender, 4, 4)


def test_a_prepared_version_outlives_its_sender_and_can_still_be_committed(agent, sender):
    sender.form(agent)
    total = sender.send(5, 1)
    sender.report()
    decision = sender.decision(1, total)
    sender.close()
    eventually(lambda: agent.joined is None)
    commit(agent, decision)
    assert float(agent.loader.model.w[0, 0]) == 5.0
    sender.host, sender.group = StoreHost(HERE, 0), None
    sender.form(agent)


def test_a_new_epoch_drops_what_the_old_one_prepared(agent, sender):
    sender.form(agent)
    total = sender.send(5, 1)
    sender.report()
    old = sender.decision(1, total)
    sender.form(agent)
    with pytest.raises(NotYetError):
        agent.verify(old)
    publish(agent, sender, 6, 2)


def test_an_aborted_sync_is_forgotten_and_another_ones_abort_is_ignored(agent, sender):
    sender.form(agent)
    total = sender.send(5, 1)
    sender.report()
    decision = sender.decision(1, total)
    agent.abort(decision.model_copy(update={"sync_id": 99}))
    assert agent.prepared is not None
    agent.abort(decision)
    with pytest.raises(NotYetError):
        agent.verify(decision)


def test_shared_bytes_are_read_until_the_commit_and_then_released(agent, sharer):
    sharer.form(agent)
    for n, value in enumerate((1, 2)):
        total = sharer.send(value, n + 1)
        sharer.report()
        with pytest.raises(SyncError, match=f"rank 1 still reads the weights of offer {n}"):
            sharer.group.wait_released(n, 0.1)
        commit(agent, sharer.decision(n + 1, total))
        sharer.group.wait_released(n, 10)
    assert agent.loader.path == "plan"
    assert agent.loader.shadow is None
    assert float(agent.loader.model.w[0, 0]) == 2.0


def test_shared_bytes_are_released_when_they_are_refused_aborted_or_given_up(agent, sharer):
    sharer.form(agent)
    publish(agent, sharer, 1, 1)
    sharer.send(2, 2, flip=True)
    sharer.group.wait_released(1, 10)
    total = sharer.send(3, 3)
    sharer.report()
    agent.abort(sharer.decision(3, total))
    sharer.group.wait_released(2, 10)
    sharer.send(4, 4, seal=False)
    sharer.group.put_abort(3, "a weight is not finite")
    sharer.group.wait_released(3, 10)
    publish(agent, sharer, 5, 5)


def test_a_byte_that_changes_in_shared_memory_after_it_was_prepared_is_refused_and_the_memory_released(agent, sharer):
    sharer.form(agent)
    publish(agent, sharer, 1, 1)
    total = sharer.send(2, 2)
    sharer.report()
    sharer.group.wire.buffers(plan_layout(WEIGHTS, "bf16", 4096).buckets)[0][7] ^= 1
    with pytest.raises(DigestError, match="w: digest"):
        agent.verify(sharer.decision(2, total))
    assert float(agent.loader.model.w[0, 0]) == 1.0
    sharer.group.wait_released(1, 10)


def test_epochs_of_others_are_refused(agent, sender):
    epoch = sender.form(agent)
    for change in ({"job_uid": "x"}, {"epoch": 0}, {"epoch": 2, "members": epoch.members[:1]}):
        with pytest.raises(StaleError):
            agent.join(epoch.model_copy(update=change))
    agent.join(epoch)
    publish(agent, sender, 1, 1)


def test_a_commit_that_comes_while_the_next_version_is_written_is_refused_not_kept_waiting(agent):
    entered, leave = threading.Event(), threading.Event()

    def fill():
        with agent.filling():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=fill)
    thread.start()
    entered.wait(10)
    start = time.monotonic()
    with pytest.raises(StaleError, match="next version is being received"):
        agent.verify(Decision(job_uid="job", epoch=1, sync_id=1, version=1, committed=True))
    assert time.monotonic() - start < 1.0
    leave.set()
    thread.join()


def state_of(agent):
    worker = SimpleNamespace(
        weight_transfer_engine=SimpleNamespace(agent=agent, loader=agent.loader, quantized=[], audit="")
    )
    return rank_state(worker)


def test_an_epoch_is_reported_while_its_group_stands_and_not_when_it_was_only_heard_of(agent, sender):
    epoch = sender.form(agent)
    eventually(lambda: state_of(agent)["epoch"] == 1)
    sender.close()
    eventually(lambda: state_of(agent)["epoch"] is None)
    assert state_of(agent)["epoch_told"] == 1
    sender.host, sender.group = StoreHost(HERE, 0), None
    agent.join(epoch.model_copy(update={"epoch": 2, "store_port": sender.host.port}))
    assert (state_of(agent)["epoch"], state_of(agent)["epoch_told"]) == (None, 2)
    sender.number = 2
    sender.form(agent)
    eventually(lambda: state_of(agent)["epoch"] == 3)


def test_leaving_frees_a_thread_that_waits_for_the_others_to_join(agent, sender):
    epoch = sender.form(agent)
    agent.join(epoch.model_copy(update={"epoch": 9, "timeout_seconds": 60.0}))
    time.sleep(0.1)
    thread = agent._member._thread
    assert thread.is_alive()
    agent.leave()
    thread.join(2.0)
    assert not thread.is_alive()
    assert agent.error == ""


def test_a_fault_of_the_program_is_reported_at_once_and_leaves_the_epoch(agent, sender, monkeypatch):
    sender.form(agent, timeout=60.0)

    def exhaust(*_):
        raise RuntimeError("can't allocate memory\nstack")

    with monkeypatch.context() as patch:
        patch.setattr(agent.loader, "prepare", exhaust)
        sender.send(1, 1)
        report = sender.report(5.0)
    assert (report.state, report.error) == (
        "failed",
        "RuntimeError: can't allocate memory; the engine's log has the stack",
    )
    eventually(lambda: agent.joined is None)
    assert agent.error == f"epoch 1: {report.error}"
    sender.form(agent)
    publish(agent, sender, 2, 2)
    assert agent.error == ""


def test_ranks_that_differ_have_nothing_prepared_together():
    rank = {
        "epoch": 1,
        "epoch_told": 1,
        "prepared_sync_id": 3,
        "prepared_version": 7,
        "load_path": "plan",
        "load_fallback": {},
        "num_quantized": 0,
        "place": "cpu/boot/net",
        "audit": "",
        "message": "",
    }
    late = rank | {"prepared_sync_id": 2, "message": "late", "load_fallback": {"w": "packed"}}
    merged = merge_states([rank, late])
    assert (merged["prepared_sync_id"], merged["prepared_version"]) == (None, None)
    assert (merged["error"], merged["load_fallback"], merged["audit_passed"]) == ("late", {"w": "packed"}, True)
    assert merge_states([rank, rank])["prepared_version"] == 7
    assert merge_states([rank, rank])["epoch"] == 1
    assert merge_states([rank, rank | {"epoch": None}])["epoch"] is None
    assert merge_states([rank | {"epoch": None}, rank])["epoch"] is None
    assert merge_states([rank, rank | {"audit": "1 layer"}])["audit_passed"] is False
    assert merge_states([rank, rank])["place"] == "cpu/boot/net"
    assert merge_states([rank, rank | {"place": "cuda:GPU-1/boot/net"}])["place"] == ""
