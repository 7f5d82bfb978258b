"""The wire within one machine: receivers in processes of their own read the sender's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_wire_group import HOST, make_epoch, peer

from fp8rl_workers.errors import SyncError
from fp8rl_workers.protocol import Epoch
from fp8rl_workers.weights.group import Group, StoreHost, join_group
from fp8rl_workers.weights.wire import WireError

SIZES = [1 << 16, 256, 1 << 12]


@pytest.fixture
def host() -> Iterator[StoreHost]:
    store = StoreHost(HOST, 0)
    yield store
    store.close()


def shared_epoch(number: int, engines: int, port: int, timeout: float = 60.0) -> Epoch:
    epoch = make_epoch(number, engines, port, timeout)
    return epoch.model_copy(update={"members": [m.model_copy(update={"transport": "ipc"}) for m in epoch.members]})


def offer(group: Group, n: int, value: int) -> list[str]:
    """Stage `value` everywhere as the n-th offer; the sums that the engines read."""
    group.wait_released(n - 1, 5)
    buckets = group.wire.buffers(SIZES)
    group.put_offer(n, " ".join(map(str, SIZES)))
    for bucket in buckets:
        bucket.fill_(value)
    group.put_seal(n, "sealed")
    return [report.digest for report in group.wait_reports(n, 10).values()]


def mapped() -> int:
    """Mappings of shared weights in this process."""
    return Path("/proc/self/maps").read_text().count("fp8rl-weights")


def test_two_engines_read_what_the_sender_stages_over_many_offers(host: StoreHost) -> None:
    epoch = shared_epoch(1, 2, host.port)
    with peer(epoch, 1, "shared"), peer(epoch, 2, "shared"):
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        first = group.wire.buffers(SIZES)
        for n in range(10):
            assert offer(group, n, n) == [str(n * sum(SIZES))] * 2
        assert [b.data_ptr() for b in group.wire.buffers(SIZES)] == [b.data_ptr() for b in first]
        group.close()


def test_nothing_is_staged_over_bytes_that_an_engine_still_reads(host: StoreHost) -> None:
    epoch = shared_epoch(1, 1, host.port)
    with peer(epoch, 1, "keep"):
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        assert offer(group, 0, 1) == [str(sum(SIZES))]
        with pytest.raises(
            SyncError, match=r"rank 1 still reads the weights of offer 0 after 0\.2 s; form a new epoch"
        ):
            group.wait_released(0, 0.2)
        group.close()


def test_a_killed_engine_leaves_the_sender_its_memory_and_the_next_epoch_works(host: StoreHost) -> None:
    epoch = shared_epoch(1, 1, host.port)
    with peer(epoch, 1, "shared") as engine:
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        assert offer(group, 0, 3) == [str(3 * sum(SIZES))]
        engine.kill()
        engine.wait()
        group.put_offer(1, " ".join(map(str, SIZES)))
        start = time.monotonic()
        assert group.wait_reports(1, 0.5) == {}
        assert time.monotonic() - start < 5
        group.close()
    following = shared_epoch(2, 1, host.port)
    with peer(following, 1, "shared"):
        group = join_group(following, 0, "uid-0", HOST, host, token="token")
        assert offer(group, 0, 4) == [str(4 * sum(SIZES))]
        group.close()


def test_fifty_epochs_leave_no_memory_and_no_descriptor(host: StoreHost) -> None:
    def held() -> tuple[int, int]:
        return mapped(), len(list(Path("/proc/self/fd").iterdir()))

    before = None
    for number in range(1, 51):
        group = join_group(shared_epoch(number, 0, host.port), 0, "uid-0", HOST, host, token="token")
        group.wire.buffers(SIZES)[0].fill_(1)
        assert mapped() == 1
        group.close()
        before = before or held()
    assert held() == before
    assert held()[0] == 0


def test_memory_of_a_sender_that_cannot_be_seen_is_refused_with_the_reason(host: StoreHost) -> None:
    group = join_group(shared_epoch(1, 0, host.port), 0, "uid-0", HOST, host, token="token")
    with pytest.raises(WireError, match=r"transport ipc: \d+ bytes on cpu cannot be shared between trainer and engine"):
        group.wire.buffers([1 << 60])
    group.close()
