"""The wire between GPUs as far as no GPU is needed: who may meet, and how waits end. NCCL itself: tests/gpu/test_wire_nccl.py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.weights import nccl, wire_nccl
from fp8rl_workers.weights.wire import WireError
from fp8rl_workers.weights.wire_nccl import End, NcclWire, misfit, this_end

GPU = torch.device("cuda", 0)


class Communicator:
    """NCCL's part, by a table: rank 0's tensors are what the others get; `stuck`: what never ends."""

    sent: Sequence[Tensor] = ()
    stuck = ""
    made: ClassVar[list[Communicator]] = []
    release = threading.Event()

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        assert (len(unique_id), world_size, device) == (nccl.ID_BYTES, 2, GPU)
        self.rank = rank
        self.aborts = 0
        self.made.append(self)

    def ready(self) -> bool:
        return type(self).stuck != "connect"

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.rank == 0:
            type(self).sent = list(tensors)
        self.into = tensors

    def moved(self) -> bool:
        if type(self).stuck == "error":
            raise nccl.NcclError("remote process exited or there was a network error")
        if type(self).stuck == "transfer" or not self.sent:
            return False
        for target, source in zip(self.into, self.sent, strict=True):
            target.copy_(source)
        return True

    def abort(self) -> None:
        self.aborts += 1
        if type(self).stuck == "abort":
            self.release.wait()


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> type[Communicator]:
    monkeypatch.setattr(Communicator, "made", [])
    monkeypatch.setattr(Communicator, "sent", ())
    monkeypatch.setattr(Communicator, "stuck", "")
    monkeypatch.setattr(nccl, "Communicator", Communicator)
    ends = iter([End("GPU-a", 22809, "1"), End("GPU-b", 22809, "1")])
    monkeypatch.setattr(wire_nccl, "this_end", lambda _: next(ends))
    return Communicator


def two(timeout: float = 60.0) -> list[NcclWire]:
    """Both ends of a wire, connected."""
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: NcclWire(store, rank, 2, GPU, timeout), range(2)))


def other(store: Store, gpu: str = "GPU-b", cumem: str = "1") -> None:
    """Rank 1 says who it is."""
    store.set("nccl/rank/1", f'{{"gpu": "{gpu}", "nccl": 22809, "cumem": "{cumem}"}}')


def test_ranks_on_gpus_of_their_own_with_one_nccl_fit_together() -> None:
    assert misfit({0: End("GPU-a", 22809, "1"), 1: End("GPU-b", 22809, "1")}) == ""


def test_all_that_does_not_fit_is_told_at_once_with_its_ranks() -> None:
    ends = {0: End("GPU-a", 22809, "1"), 1: End("GPU-a", 22703, ""), 2: End("GPU-c", 22809, "1")}
    assert misfit(ends) == (
        "ranks 0, 1 share GPU-a, and NCCL takes one rank per GPU (set transport: ipc); "
        "the ranks have different versions of NCCL: rank 0 22809, rank 1 22703, rank 2 22809 (give all pods the same); "
        "the ranks have different values of NCCL_CUMEM_ENABLE: rank 0 1, rank 1 unset, rank 2 1 (give all pods the same)"
    )


def test_weights_on_the_cpu_are_refused() -> None:
    with pytest.raises(InvalidInputError) as refused:
        this_end(torch.device("cpu"))
    assert str(refused.value) == (
        "weightSync.transport: nccl moves memory of GPUs, and the weights are on cpu; set transport: auto or gloo"
    )


def test_a_process_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInputError) as refused:
        this_end(GPU)
    assert str(refused.value) == (
        "weightSync.transport: nccl needs a GPU, and this process sees none; set transport: auto or gloo"
    )


def test_what_rank_0_refuses_every_rank_is_told() -> None:
    store = HashStore()
    other(store, gpu="GPU-a")
    words = "transport nccl: ranks 0, 1 share GPU-a, and NCCL takes one rank per GPU \\(set transport: ipc\\)"
    with pytest.raises(WireError, match=words):
        NcclWire(store, 0, 2, GPU, 60)
    with pytest.raises(WireError, match=words):
        NcclWire(store, 1, 2, GPU, 60)


def test_a_rank_that_does_not_say_who_it_is_is_named() -> None:
    with pytest.raises(WireError, match="transport nccl: nccl/rank/1 was not said in time: its rank is lost or late"):
        NcclWire(HashStore(), 0, 2, GPU, 0.0)


def test_tensors_of_any_shape_travel_in_one_launch() -> None:
    sender, receiver = two()
    sender.broadcast([torch.arange(6, dtype=torch.uint8), torch.ones(2, 3)])
    target = [torch.zeros(6, dtype=torch.uint8), torch.zeros(2, 3)]
    receiver.broadcast(target)
    assert target[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert target[1].tolist() == [[1.0] * 3] * 2


def test_a_peer_that_never_connects_ends_the_wait_and_the_communicator(cards: type[Communicator]) -> None:
    store = HashStore()
    other(store)
    cards.stuck = "connect"
    with pytest.raises(WireError, match=r"a peer is lost or late: 0\.02 s went by before rank 0 of 2 connected"):
        NcclWire(store, 0, 2, GPU, 0.02)
    assert [made.aborts for made in cards.made] == [1]


def test_a_late_peer_breaks_the_wire_for_good(cards: type[Communicator]) -> None:
    sender, _ = two(timeout=0.5)
    cards.stuck = "transfer"
    words = r"a peer is lost or late: 0\.5 s went by before a transfer ended"
    with pytest.raises(WireError, match=words):
        sender.send(torch.zeros(1, dtype=torch.uint8))
    cards.stuck = ""
    with pytest.raises(WireError, match=words):
        sender.send(torch.zeros(1, dtype=torch.uint8))
    sender.close()
    assert sorted(made.aborts for made in cards.made) == [0, 1]


def test_what_nccl_says_of_a_dead_peer_is_passed_on(cards: type[Communicator]) -> None:
    _, receiver = two()
    cards.stuck = "error"
    with pytest.raises(WireError, match="remote process exited or there was a network error"):
        receiver.receive(torch.zeros(1, dtype=torch.uint8))


def test_a_reason_to_stop_ends_a_blocked_transfer(cards: type[Communicator]) -> None:
    _, receiver = two()
    cards.stuck = "transfer"
    receiver.watch(lambda: "offer 3 was given up")
    with pytest.raises(WireError, match="offer 3 was given up"):
        receiver.receive(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("way", ["abort", "close"])
def test_a_blocked_transfer_is_freed_from_another_thread(cards: type[Communicator], way: str) -> None:
    _, receiver = two()
    cards.stuck = "transfer"
    blocked = threading.Event()

    def look() -> str:
        blocked.set()
        return ""

    receiver.watch(look)
    with ThreadPoolExecutor(1) as threads:
        transfer = threads.submit(receiver.receive, torch.zeros(1, dtype=torch.uint8))
        blocked.wait()
        receiver.close() if way == "close" else receiver.abort("the pod ends")
        with pytest.raises(WireError, match="the wire is closed" if way == "close" else "the pod ends"):
            transfer.result()
    assert sorted(made.aborts for made in cards.made) == [0, 1]


def test_a_stream_that_nccl_does_not_let_go_of_is_told(
    cards: type[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = two()
    monkeypatch.setattr(wire_nccl, "ABORT_SECONDS", 0.02)
    cards.stuck = "abort"
    sender.watch(lambda: "offer 0 was given up")
    with pytest.raises(WireError, match=r"offer 0 was given up; NCCL still holds the GPU's stream after 0\.02 s"):
        sender.broadcast([])
    cards.release.set()


def test_closing_ends_the_communicator_once(cards: type[Communicator]) -> None:
    for wire in two():
        wire.close()
        wire.close()
        with pytest.raises(WireError, match="the wire is closed"):
            wire.broadcast([])
    assert [made.aborts for made in cards.made] == [1, 1]


def test_the_library_is_found_and_knows_what_the_record_of_options_needs() -> None:
    assert nccl.version() >= nccl.CONFIG_VERSION
    assert len(nccl.new_id()) == nccl.ID_BYTES
