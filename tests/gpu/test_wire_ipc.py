"""The wire within one card: a process of its own reads rank 0's staging where it stands."""

from __future__ import annotations

import pytest
import torch
from wire_kit import SIZES, desk, offer

from fp8rl_workers.weights.wire import WireError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def card(device: str) -> str:
    """Where both ends keep their bytes; with the switch of `conftest` the host's memory."""
    return "cuda:0" if device == "cuda" else "cpu"


def test_a_peer_reads_every_offer_where_it_was_staged(card: str) -> None:
    with desk("ipc", "read", card, card) as peers:
        store, wire = peers.join(1)
        first = [bucket.data_ptr() for bucket in wire.buffers(SIZES)]
        for n in range(10):
            assert offer(store, wire, n, n) == n * sum(SIZES)
        assert [bucket.data_ptr() for bucket in wire.buffers(SIZES)] == first
        peers.leave(store, wire, 10)


def test_fifty_epochs_leave_the_memory_of_the_card_as_it_was(card: str) -> None:
    free = []
    with desk("ipc", "read", card, card) as peers:
        for number in range(1, 51):
            store, wire = peers.join(number)
            assert offer(store, wire, 0, number % 256) == number % 256 * sum(SIZES)
            free.append(peers.leave(store, wire, 1))
            assert store.get("closed") == b"0"
            del wire
    print("free bytes after epochs 3 and 50:", free[2], free[-1])
    assert free[-1] >= free[2]


def test_a_peer_killed_while_it_holds_the_staging_leaves_it_to_its_owner(card: str) -> None:
    with desk("ipc", "stop", card, card) as peers:
        store, wire = peers.join(1)
        buckets = wire.buffers(SIZES)
        store.set("offer/0", " ".join(map(str, SIZES)))
        store.wait(["stopped"])
        peers.peer.kill()
        peers.peer.wait()
        buckets[0].fill_(7)
        assert int(buckets[0].sum(dtype=torch.int64)) == 7 * SIZES[0]
        wire.close()
        with pytest.raises(WireError, match="the wire is closed"):
            wire.buffers(SIZES)
    with desk("ipc", "read", card, card) as peers:
        store, wire = peers.join(1)
        assert offer(store, wire, 0, 3) == 3 * sum(SIZES)
        peers.leave(store, wire, 1)


def test_memory_that_the_card_does_not_have_is_refused_with_the_reason(card: str) -> None:
    with desk("ipc", "silent", card, card) as peers:
        _, wire = peers.join(1)
        with pytest.raises(WireError, match=r"transport ipc: \d+ bytes on .* cannot be shared"):
            wire.buffers([1 << 60])
        wire.close()
