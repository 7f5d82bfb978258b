"""The wire between GPUs. NCCL takes one rank per GPU: on one card it is refused by name, and a missing peer is waited out."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store
from wire_kit import SIZES, desk, free_bytes, offer

from fp8rl_workers.weights.wire import Wire, WireError
from fp8rl_workers.weights.wire_nccl import End, NcclWire, this_end

GPU = torch.device("cuda", 0)
HALTED = 2 << 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank per GPU, and there is one")


def works() -> bool:
    """Whether the GPU computes, all its streams being free."""
    torch.cuda.synchronize()
    return int(torch.ones(1 << 20, device=GPU).sum()) == 1 << 20


def stranger(store: HashStore) -> None:
    """A rank 1 on another GPU that says who it is and never connects."""
    own = this_end(GPU)
    store.set("nccl/rank/1", json.dumps(asdict(End("GPU-elsewhere", own.nccl, own.cumem))))


def test_a_world_of_one_moves_its_own_bytes_over_and_over() -> None:
    free = []
    for _ in range(50):
        wire = NcclWire(HashStore(), 0, 1, GPU, 30)
        bucket = wire.buffers([1 << 20])[0].fill_(5)
        wire.send(bucket)
        assert int(bucket.sum(dtype=torch.int64)) == 5 << 20
        wire.close()
        del wire, bucket
        free.append(free_bytes())
    print("free bytes after epochs 3 and 50:", free[2], free[-1])
    assert free[-1] >= free[2]


def test_two_ranks_on_one_card_are_refused_by_name() -> None:
    with desk("nccl", "read", "cuda:0", "cuda:0") as peers:
        with pytest.raises(WireError, match=r"ranks 0, 1 share GPU-\S+, and NCCL takes one rank per GPU"):
            peers.join(1)
        assert peers.epoch(1).get("refused").decode().startswith("transport nccl: ranks 0, 1 share GPU-")


def test_a_peer_that_never_connects_is_waited_out_and_the_card_is_free() -> None:
    store = HashStore()
    stranger(store)
    start = time.monotonic()
    with pytest.raises(WireError, match=r"a peer is lost or late: 3 s went by before rank 0 of 2 connected$"):
        NcclWire(store, 0, 2, GPU, 3.0)
    assert time.monotonic() - start < 3 + 5
    assert works()


def half_taken(store: Store, wire: Wire) -> Tensor:
    """A bucket that the peer took once and takes no second time; NCCL's own buffers would hold a small one whole."""
    bucket = wire.buffers([HALTED])[0]
    store.set("offer/0", str(HALTED))
    wire.send(bucket)
    store.wait(["stopped"])
    return bucket


@two_cards
def test_a_peer_on_another_card_gets_every_offer() -> None:
    with desk("nccl", "read", "cuda:0", "cuda:1") as peers:
        store, wire = peers.join(1)
        for n in range(10):
            assert offer(store, wire, n, n) == n * sum(SIZES)
        peers.leave(store, wire, 10)


@two_cards
def test_fifty_epochs_leave_the_memory_of_both_cards_as_it_was() -> None:
    free = []
    with desk("nccl", "read", "cuda:0", "cuda:1") as peers:
        for number in range(1, 51):
            store, wire = peers.join(number)
            assert offer(store, wire, 0, number % 256) == number % 256 * sum(SIZES)
            here = peers.leave(store, wire, 1)
            free.append((here, torch.cuda.mem_get_info(1)[0]))
            del wire
    print("free bytes after epochs 3 and 50:", free[2], free[-1])
    assert all(after >= before for before, after in zip(free[2], free[-1], strict=True))


@two_cards
@pytest.mark.parametrize("seconds", [4.0])
def test_a_peer_killed_in_the_middle_frees_the_survivor_in_time_and_its_stream(seconds: float) -> None:
    with desk("nccl", "stop", "cuda:0", "cuda:1") as peers:
        store, wire = peers.join(1, seconds)
        bucket = half_taken(store, wire)
        peers.peer.kill()
        peers.peer.wait()
        start = time.monotonic()
        with pytest.raises(WireError) as lost:
            wire.send(bucket)
        print(f"back after {time.monotonic() - start:.2f} s: {lost.value}")
        assert time.monotonic() - start < seconds + 1
        assert "still holds" not in str(lost.value)
        assert works()
        wire.close()


@two_cards
@pytest.mark.parametrize("way", ["abort", "watch"])
def test_a_blocked_transfer_is_aborted_and_the_stream_is_free(way: str) -> None:
    with desk("nccl", "stop", "cuda:0", "cuda:1") as peers:
        store, wire = peers.join(1)
        bucket = half_taken(store, wire)
        if way == "abort":
            threading.Timer(0.5, wire.abort, ["the offer was given up"]).start()
        else:
            until = time.monotonic() + 0.5
            wire.watch(lambda: "the offer was given up" if time.monotonic() > until else "")
        start = time.monotonic()
        with pytest.raises(WireError, match=r"^the offer was given up$"):
            wire.send(bucket)
        print(f"back {time.monotonic() - start - 0.5:.2f} s after the abort")
        assert time.monotonic() - start < 3
        assert works()
        wire.close()
