"""The wire and the epoch's store between real processes, with peers killed, stopped and late."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fp8rl_workers.errors import InvalidInputError, StaleError, SyncError
from fp8rl_workers.protocol import Epoch, Member
from fp8rl_workers.weights.group import JoinError, StoreHost, join_group
from fp8rl_workers.weights.wire import WireError

NETWORK = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
HOST = f"{NETWORK}.1"
PEER = Path(__file__).with_name("wire_peer.py")


def make_epoch(number: int, engines: int, port: int, timeout: float = 60.0, job_uid: str = "job") -> Epoch:
    trainer = Member(pod="trainer-0", uid="uid-0", role="trainer", address=HOST, ranks=[0])
    others = [
        Member(pod=f"engine-{r}", uid=f"uid-{r}", role="inference", address=f"{NETWORK}.{r + 1}", ranks=[r])
        for r in range(1, engines + 1)
    ]
    return Epoch(
        job_uid=job_uid,
        attempt=0,
        epoch=number,
        world_size=engines + 1,
        store_host=HOST,
        store_port=port,
        timeout_seconds=timeout,
        members=[trainer, *others],
    )


@pytest.fixture
def host() -> Iterator[StoreHost]:
    store = StoreHost(HOST, 0)
    yield store
    store.close()


@contextlib.contextmanager
def peer(epoch: Epoch, rank: int, mode: str = "receive", token: str = "token") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(PEER), mode, str(rank), f"{NETWORK}.{rank + 1}", epoch.model_dump_json()]
    environ = os.environ | {"PEER_TOKEN": token}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_receivers_get_the_same_bytes_over_many_offers(host: StoreHost) -> None:
    epoch = make_epoch(1, 2, host.port)
    with peer(epoch, 1), peer(epoch, 2):
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        for n in range(5):
            group.put_offer(n, "3 100000")
            for value in (1, 2, n):
                group.wire.send(torch.full((100000,), value, dtype=torch.uint8))
            reports = group.wait_reports(n, 10)
            assert {rank: (r.state, r.digest) for rank, r in reports.items()} == {
                1: ("prepared", str(100000 * (3 + n))),
                2: ("prepared", str(100000 * (3 + n))),
            }
        group.close()


@pytest.mark.parametrize(("number", "bound"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 6.0)])
def test_a_peer_lost_while_it_receives_frees_the_sender_within_the_timeout(
    host: StoreHost, number: signal.Signals, bound: float
) -> None:
    epoch = make_epoch(1, 2, host.port)
    with peer(epoch, 1, "hang") as lost, peer(epoch, 2) as survivor:
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        group.wire._timeout_seconds = 4.0
        group.put_offer(0, "1 268435456")
        threading.Timer(0.5, os.kill, (lost.pid, number)).start()
        start = time.monotonic()
        with pytest.raises(WireError):
            group.wire.send(torch.ones(1 << 28, dtype=torch.uint8))
        assert time.monotonic() - start < bound
        with pytest.raises(WireError):
            group.wire.send(torch.ones(8, dtype=torch.uint8))
        group.put_abort(0, "a member is lost")
        assert 2 in group.wait_reports(0, 5) or survivor.poll() is None
        start = time.monotonic()
        group.close()
        assert time.monotonic() - start < 0.5


def test_an_abort_on_the_store_frees_a_blocked_receiver_at_once(host: StoreHost) -> None:
    epoch = make_epoch(1, 1, host.port)
    with peer(epoch, 1):
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        group.put_offer(0, "1 1000")
        time.sleep(0.5)
        start = time.monotonic()
        group.put_abort(0, "the trainer changed its mind")
        report = group.wait_reports(0, 5)[1]
        assert time.monotonic() - start < 1.0
        assert (report.state, report.error) == ("failed", "the trainer changed its mind")
        group.close()


def test_closing_a_group_frees_its_own_blocked_sender(host: StoreHost) -> None:
    epoch = make_epoch(1, 1, host.port)
    with peer(epoch, 1, "hang"):
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        failures: list[WireError] = []

        def send() -> None:
            try:
                group.wire.send(torch.ones(1 << 28, dtype=torch.uint8))
            except WireError as error:
                failures.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.5)
        start = time.monotonic()
        group.close()
        thread.join(2)
        assert time.monotonic() - start < 1.0
        assert [str(error) for error in failures] == ["the wire is closed"]


def test_a_rank_that_does_not_sign_in_is_named_and_the_others_are_told(host: StoreHost) -> None:
    epoch = make_epoch(4, 3, host.port, timeout=3.0)
    with ThreadPoolExecutor() as pool:
        present = pool.submit(join_group, epoch, 2, "uid-2", f"{NETWORK}.3", token="token")
        with pytest.raises(JoinError, match=r"epoch 4 did not form within 3 s: ranks \[1, 3\] are missing") as raised:
            join_group(epoch, 0, "uid-0", HOST, host, token="token")
        assert raised.value.missing == [1, 3]
        with pytest.raises(JoinError, match=r"ranks \[1, 3\] are missing"):
            present.result()


def test_ranks_of_two_epochs_and_of_two_jobs_never_meet(host: StoreHost) -> None:
    old, new = make_epoch(1, 1, host.port, timeout=3.0), make_epoch(2, 1, host.port, timeout=3.0)
    other = make_epoch(2, 1, host.port, timeout=3.0, job_uid="other")
    with peer(old, 1) as stale, peer(other, 1) as foreign, peer(new, 1, token="another") as stranger:
        with pytest.raises(JoinError):
            join_group(new, 0, "uid-0", HOST, host, token="token")
        for process in (stale, foreign, stranger):
            assert process.stdout is not None
            assert process.stdout.readline().startswith("JOIN")


def test_a_group_forms_over_ipv6() -> None:
    host = StoreHost("::1", 0)
    epoch = make_epoch(1, 1, host.port).model_copy(update={"store_host": "::1"})
    with ThreadPoolExecutor() as pool:
        engine = pool.submit(join_group, epoch, 1, "uid-1", "::1", token="token")
        trainer = join_group(epoch, 0, "uid-0", "::1", host, token="token")
        bucket = torch.zeros(8, dtype=torch.uint8)
        received = pool.submit(engine.result().wire.receive, bucket)
        trainer.wire.send(torch.arange(8, dtype=torch.uint8))
        received.result()
    assert bucket.tolist() == list(range(8))
    engine.result().close()
    trainer.close()
    host.close()


def test_an_epoch_that_is_over_and_a_rank_that_is_taken_are_refused(host: StoreHost) -> None:
    epoch = make_epoch(7, 0, host.port)
    join_group(epoch, 0, "uid-0", HOST, host, token="token").close()
    with pytest.raises(StaleError, match="epoch 7 is over"):
        join_group(epoch, 0, "uid-0", HOST, host, token="token")
    following = make_epoch(8, 0, host.port)
    group = join_group(following, 0, "uid-0", HOST, host, token="token")
    with pytest.raises(StaleError, match="rank 0 of epoch 8 belongs to pod uid-0, not to uid-9"):
        join_group(following, 0, "uid-9", HOST, token="token")
    group.close()


def test_a_store_that_is_gone_is_said_so(host: StoreHost) -> None:
    group = join_group(make_epoch(1, 0, host.port), 0, "uid-0", HOST, token="token")
    host.close()
    time.sleep(0.5)
    with pytest.raises(SyncError, match=r"the store of epoch 1 at 127\.\d+\.\d+\.1:\d+ is lost"):
        group.aborted(0)


def test_the_store_listens_on_one_address_only(host: StoreHost) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listeners = [line.split()[1] for line in lines[1:] if f":{host.port:04X} " in line and line.split()[3] == "0A"]
    address = "".join(f"{int(part):02X}" for part in reversed(HOST.split(".")))
    assert listeners == [f"{address}:{host.port:04X}"]
    with pytest.raises(InvalidInputError, match=r"weightSync\.port: cannot listen on 127\.\d+\.\d+\.1"):
        StoreHost(HOST, host.port)


def usage() -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes; what the allocator merely keeps is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return descriptors, int(status["Threads"]), int(status["VmRSS"].split()[0]) * 1024


def test_fifty_epochs_leave_no_descriptors_threads_or_memory_behind(host: StoreHost) -> None:
    def one(number: int) -> None:
        epoch = make_epoch(number, 1, host.port)
        received: list[int] = []

        def engine() -> None:
            group = join_group(epoch, 1, "uid-1", f"{NETWORK}.2", token="token")
            bucket = torch.empty(1 << 20, dtype=torch.uint8)
            group.wire.receive(bucket)
            received.append(int(bucket[0]))
            group.close()

        thread = threading.Thread(target=engine)
        thread.start()
        group = join_group(epoch, 0, "uid-0", HOST, host, token="token")
        group.wire.send(torch.full((1 << 20,), number, dtype=torch.uint8))
        thread.join()
        group.close()
        assert received == [number]

    for number in range(1, 11):
        one(number)
    time.sleep(0.2)
    before = usage()
    for number in range(11, 61):
        one(number)
    time.sleep(0.2)
    after = usage()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 1
    assert after[2] - before[2] < 32 << 20  # of 50 buckets of 1 MiB on either side, none is kept
