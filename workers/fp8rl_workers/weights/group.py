"""One membership of the weight-sync group: the epoch's store, its wire, and what the ranks tell each other over the store.

The trainer's rank 0 hosts one TCPStore for its whole life (`StoreHost`), bound to the pod's address only. Each epoch has
its own key prefix (`protocol.store_prefix`), so ranks of two jobs or two epochs never meet:

    join/<rank>   uid of the pod that holds the rank      go              "ok", or why rank 0 gave the epoch up
    offer/<n>     seal/<n>    report/<n>/<rank>           abort/<n>       n = 0, 1, 2, ...: syncs of this epoch
    layout/<digest>           released/<n>/<rank>         what offers refer to; who no longer reads shared bytes
    closed        set by rank 0 when the epoch ends

A member joins in two steps: all ranks sign in on the store, then rank 0 says go and all connect the wire; whoever does not
sign in is named. A member leaves an epoch (`Group.close`) before it joins the next. No call blocks in the store: waits poll
a key, so that every thread of a member may use the group and `close` frees them all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fp8rl_workers.errors import InvalidInputError, StaleError, SyncError
from fp8rl_workers.protocol import Epoch, MemberReport, store_prefix
from fp8rl_workers.weights.wire import Wire, open_wire

POLL_SECONDS = 0.0002  # while a sync runs: a look costs 20 microseconds
IDLE_POLL_SECONDS = 0.005
IDLE_AFTER_SECONDS = 0.25
CONNECT_RETRY_SECONDS = 0.1
ABORT_GRACE_SECONDS = 1.0
GO_GRACE_SECONDS = 5.0
STORE_TIMEOUT = timedelta(seconds=10)

HOST = torch.device("cpu")

T = TypeVar("T")


class JoinError(SyncError):
    """Raised when not all ranks of an epoch signed in before its deadline; `missing` are their ranks."""

    reason = "MembersMissing"

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing


class StoreHost:
    """The store's server, in the trainer's rank 0, on one address and never on all of them."""

    def __init__(self, address: str, port: int) -> None:
        """Listen on `address`, IPv4 or IPv6; port 0 takes a free one.

        Raises:
            InvalidInputError: the address is in use or not this machine's.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            listener.close()
            message = f"weightSync.port: cannot listen on {address}:{port}: {error.strerror}; end the process that holds it or choose another port"
            raise InvalidInputError(message) from error
        listener.listen(socket.SOMAXCONN)
        self.address = address
        self.port: int = listener.getsockname()[1]
        self._server: TCPStore | None = TCPStore(
            address, self.port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def purge(self, prefix: str) -> None:
        """Forget the keys of an epoch that is over, except those that say so."""
        assert self._server is not None
        for key in self._server.list_keys():
            if key.startswith(prefix) and not key.endswith(("/closed", "/go")):
                self._server.delete_key(key)

    def close(self) -> None:
        """Stop listening and cut all members off. Idempotent."""
        self._server = None


class Group:
    """One rank's membership of one epoch. Made by `join_group`; every method may be called from any thread."""

    def __init__(
        self,
        epoch: Epoch,
        rank: int,
        store: Store,
        *,
        prefix: str,
        host: StoreHost | None,
        give_up: threading.Event,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.closed = False
        self.wire: Wire
        self._store = PrefixStore(prefix, store)
        self._prefix = prefix
        self._host = host
        self._give_up = give_up
        self._current: int | None = None
        self._lock = threading.Lock()

    def put_layout(self, digest: str, text: str) -> None:
        """Say what offers with this layout digest bring: `Layout` as JSON. Once per epoch is enough."""
        self._set(f"layout/{digest}", text)

    def layout(self, digest: str) -> str:
        """The layout of an offer, which was put before it.

        Raises:
            SyncError: it was not.
        """
        text = self._peek(f"layout/{digest}")
        if text is None:
            raise SyncError(f"epoch {self.epoch.epoch}: an offer has layout {digest}, which nobody has put")
        return text

    def put_offer(self, n: int, text: str) -> None:
        """Offer weights to all ranks: `Offer` as JSON."""
        self._set(f"offer/{n}", text)

    def wait_offer(self, n: int, timeout: float) -> str | None:
        """The n-th offer, or None when there is none within `timeout` seconds."""
        return self._wait(f"offer/{n}", timeout, idle=True)

    def release(self, n: int) -> None:
        """Say that this rank reads nothing of the n-th offer any more."""
        if self.wire.shared:
            self._set(f"released/{n}/{self.rank}", "1")

    def wait_released(self, n: int, timeout: float) -> None:
        """Wait until nobody reads what the n-th offer staged. Rank 0, before it stages again; at once unless the wire is shared.

        Raises:
            SyncError: a rank still reads it after `timeout` seconds: a new epoch with memory of its own is needed.
        """
        deadline = time.monotonic() + timeout
        for rank in range(1, self.epoch.world_size) if self.wire.shared and n >= 0 else ():
            if not self._there(f"released/{n}/{rank}", until(deadline)):
                reason = f"rank {rank} still reads the weights of offer {n} after {timeout:g} s"
                raise SyncError(f"epoch {self.epoch.epoch}: {reason}; form a new epoch")

    def put_seal(self, n: int, text: str) -> None:
        """Say what all bytes of the n-th offer digest to; known once the last bucket was cast."""
        self._set(f"seal/{n}", text)

    def wait_seal(self, n: int, timeout: float) -> str | None:
        """The n-th seal, or None when there is none within `timeout` seconds."""
        return self._wait(f"seal/{n}", timeout)

    def put_report(self, n: int, report: MemberReport) -> None:
        """Say how the n-th offer went on this rank."""
        self._set(f"report/{n}/{self.rank}", report.model_dump_json())

    def reports(self, n: int) -> dict[int, MemberReport]:
        """The reports of the n-th offer that are there, by rank."""
        found: dict[int, MemberReport] = {}
        for rank in range(1, self.epoch.world_size):
            text = self._peek(f"report/{n}/{rank}")
            if text is not None:
                found[rank] = MemberReport.model_validate_json(text)
        return found

    def wait_reports(self, n: int, timeout: float) -> dict[int, MemberReport]:
        """The reports of the n-th offer once all engine ranks have reported, or those there after `timeout` seconds.

        After an abort it waits a moment only, for the ranks that say so.
        """
        deadline = time.monotonic() + timeout
        for rank in range(1, self.epoch.world_size):
            while self._wait(f"report/{n}/{rank}", min(ABORT_GRACE_SECONDS, until(deadline))) is None:
                if self.aborted(n) or not until(deadline):
                    return self.reports(n)
        return self.reports(n)

    def put_abort(self, n: int, reason: str) -> None:
        """Tell all ranks to give the n-th offer up."""
        self._set(f"abort/{n}", reason)

    def aborted(self, n: int) -> str:
        """Why the n-th offer was given up, or ""."""
        return self._peek(f"abort/{n}") or ""

    @contextlib.contextmanager
    def transfer(self, n: int) -> Iterator[None]:
        """Within it a blocked transfer of the wire ends when somebody aborts the n-th offer or closes the group."""
        self._current = n
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        """Leave the epoch and free all threads that wait in it (they get a SyncError). Idempotent; blocks for no peer."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if hasattr(self, "wire"):
            self.wire.close()
        if self._host is not None:
            self._store.set("closed", "1")
            self._host.purge(f"{self._prefix}/")

    def connect(self, transport: str, address: str, timeout: float, device: torch.device) -> None:
        """Open the wire to all ranks that signed in."""
        self.wire = open_wire(
            transport,
            self._store,
            self.rank,
            self.epoch.world_size,
            address=address,
            timeout_seconds=timeout,
            device=device,
        )
        self.wire.watch(self._stop_reason)

    def sign_in(self, uid: str) -> None:
        """Take this rank for the pod `uid`.

        Raises:
            StaleError: the epoch is over, or another pod holds the rank.
        """
        holder = self._call(lambda: self._store.compare_set(f"join/{self.rank}", "", uid)).decode()
        if self._peek("closed"):
            raise StaleError(f"epoch {self.epoch.epoch} is over; wait for the next one")
        if holder != uid:
            raise StaleError(f"rank {self.rank} of epoch {self.epoch.epoch} belongs to pod {holder}, not to {uid}")

    def await_start(self, deadline: float) -> None:
        """Rank 0 waits for all ranks and says go; the others wait for its word.

        Raises:
            JoinError: a rank did not sign in before `deadline` (monotonic seconds).
        """
        if self.rank == 0:
            missing = [r for r in range(1, self.epoch.world_size) if self._wait(f"join/{r}", until(deadline)) is None]
            self._set("go", f"ranks {missing} are missing" if missing else "ok")
            word, names = self._peek("go") or "", missing
        else:
            word = self._wait("go", until(deadline) + GO_GRACE_SECONDS, unless="closed") or "rank 0 has not said go"
            names = [0]
        if word != "ok":
            raise JoinError(
                f"epoch {self.epoch.epoch} did not form within {self.epoch.timeout_seconds:g} s: {word}", names
            )

    def _stop_reason(self) -> str:
        current = self._current
        try:
            return "" if current is None else self.aborted(current)
        except SyncError as error:
            return str(error)

    def _set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def _peek(self, key: str) -> str | None:
        if not self._call(lambda: self._store.check([key])):
            return None
        return self._call(lambda: self._store.get(key)).decode()

    def _wait(self, key: str, timeout: float, unless: str = "", *, idle: bool = False) -> str | None:
        start = time.monotonic()
        while (text := self._peek(key)) is None:
            waited = time.monotonic() - start
            if waited >= timeout or (unless and self._peek(unless)):
                return None
            time.sleep(IDLE_POLL_SECONDS if idle or waited > IDLE_AFTER_SECONDS else POLL_SECONDS)
        return text

    def _there(self, key: str, timeout: float) -> bool:
        """Whether a key is there within `timeout` seconds; its value is not asked for."""
        if self._call(lambda: self._store.check([key])):
            return True
        return self._wait(key, timeout) is not None

    def _call(self, operation: Callable[[], T]) -> T:
        if self.closed or self._give_up.is_set():
            raise SyncError(f"epoch {self.epoch.epoch} is closed on this rank")
        try:
            return operation()
        except DistError as error:
            place = f"{self.epoch.store_host}:{self.epoch.store_port}"
            raise SyncError(
                f"the store of epoch {self.epoch.epoch} at {place} is lost: the trainer has gone"
            ) from error


def name_of(device: torch.device) -> str:
    """A device as `places.this_place` takes it: cpu, or cuda: and the card's UUID."""
    if device.type != "cuda":
        return device.type
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def until(deadline: float) -> float:
    """Seconds until a monotonic deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())


def connect_store(epoch: Epoch, deadline: float, give_up: threading.Event) -> Store:
    """A connection of its own to the epoch's store, tried again until `deadline`: the trainer may still be starting.

    Raises:
        JoinError: no store answered.
    """
    while True:
        patience = min(STORE_TIMEOUT, timedelta(seconds=max(1.0, until(deadline))))
        try:
            client = TCPStore(epoch.store_host, epoch.store_port, None, False, patience, wait_for_workers=False)
        except DistError as error:
            if time.monotonic() > deadline or give_up.is_set():
                place = f"{epoch.store_host}:{epoch.store_port}"
                raise JoinError(f"no store answers at {place} within {epoch.timeout_seconds:g} s", [0]) from error
            time.sleep(CONNECT_RETRY_SECONDS)
        else:
            return client


def join_group(
    epoch: Epoch,
    rank: int,
    uid: str,
    address: str,
    host: StoreHost | None = None,
    *,
    token: str,
    give_up: threading.Event | None = None,
    device: torch.device = HOST,
) -> Group:
    """Join an epoch; blocks for at most about `epoch.timeout_seconds`. Close the group of the epoch before it first.

    Args:
        epoch: What the orchestrator said.
        rank: This rank in the epoch's world; the trainer's is 0.
        uid: UID of this pod; a rank belongs to one pod.
        address: The pod's own address to bind to.
        host: The store's server, in the trainer's rank 0.
        token: The job's control token; a member with another one never signs in.
        give_up: Set by another thread to leave: the join, or any later call, ends with a SyncError.
        device: Where this rank's weights are.

    Raises:
        JoinError: ranks are missing (`missing`), or there is no store.
        StaleError: the epoch is over, or another pod holds the rank.
        WireError: all signed in, but not all connected.
    """
    deadline = time.monotonic() + epoch.timeout_seconds
    event = give_up or threading.Event()
    prefix = store_prefix(token, epoch.job_uid, epoch.epoch)
    store = connect_store(epoch, deadline, event)
    group = Group(epoch, rank, store, prefix=prefix, host=host, give_up=event)
    try:
        group.sign_in(uid)
        group.await_start(deadline)
        group.connect(transport_of(epoch, rank), address, max(1.0, until(deadline)), device)
    except BaseException:
        group.close()
        raise
    return group


def transport_of(epoch: Epoch, rank: int) -> str:
    """The transport of the member that holds `rank`.

    Raises:
        InvalidInputError: nobody holds it.
    """
    for member in epoch.members:
        if rank in member.ranks:
            return member.transport
    raise InvalidInputError(f"rank {rank} belongs to no member of epoch {epoch.epoch}")
