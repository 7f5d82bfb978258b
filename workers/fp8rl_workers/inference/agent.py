"""The worker rank's own thread: takes an epoch's offers, receives, prepares and reports, beside vLLM's loop.

One thread per epoch. It never calls vLLM and vLLM's loop never waits for it longer than a dictionary look-up: a commit takes
what is prepared, or is refused. A dead trainer ends the thread; what is prepared stays, and the old version goes on.
A new epoch closes the old one's group before it makes its own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fp8rl_workers.config import PodEnvironment
from fp8rl_workers.errors import DigestError, NotYetError, StaleError, SyncError, WorkerError
from fp8rl_workers.protocol import Decision, Epoch, MemberReport
from fp8rl_workers.weights.group import Group, join_group
from fp8rl_workers.weights.load import Hold, Loader, Staging
from fp8rl_workers.weights.offer import LayoutReader, Offer, parse_offer, parse_seal

log = logging.getLogger(__name__)

OFFER_POLL_SECONDS = 1.0
SEAL_POLL_SECONDS = 0.5
RELEASE_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Prepared:
    """A version that stands ready to commit; `offer`: its number in the epoch."""

    epoch: int
    sync_id: int
    version: int
    digest: str
    offer: int = field(default=0, compare=False)


class Agent:
    """One rank's membership of the weight-sync group. Public methods are called from vLLM's loop and return at once."""

    def __init__(self, loader: Loader, hold: Hold, *, job_uid: str, pod: PodEnvironment, local_rank: int) -> None:
        self.loader = loader
        self.hold = hold
        self.job_uid = job_uid
        self.pod = pod
        self.local_rank = local_rank
        self.epoch: Epoch | None = None
        self.prepared: Prepared | None = None
        self.joined: int | None = None
        self.error = ""
        self._lock = threading.Lock()  # the loader and `prepared`: held by the thread only while it fills the shadow
        self._member: Member | None = None

    def join(self, epoch: Epoch) -> None:
        """Leave the current epoch and join this one, in a thread of its own. The same epoch again changes nothing.

        Raises:
            StaleError: another job's, older than the current one, or without this pod.
        """
        if epoch.job_uid != self.job_uid:
            raise StaleError(f"epoch {epoch.epoch} belongs to job {epoch.job_uid}, this engine to {self.job_uid}")
        if self.epoch is not None and epoch.epoch < self.epoch.epoch:
            raise StaleError(f"epoch {epoch.epoch} is over: this engine is in epoch {self.epoch.epoch}")
        if self.epoch == epoch and self._member is not None and self._member.alive:
            return
        rank = self._rank_in(epoch)
        self.leave()
        self.prepared = None
        self.epoch = epoch
        self._member = Member(self, epoch, rank)
        self._member.start()

    def leave(self) -> None:
        """Close the group of the current epoch; its thread ends by itself."""
        if self._member is not None:
            self._member.close()
        self._member = None
        self.joined = None

    def abort(self, decision: Decision) -> None:
        """Forget a sync that was given up, if it is the prepared one."""
        prepared = self.prepared
        if prepared is not None and (prepared.epoch, prepared.sync_id) == (decision.epoch, decision.sync_id):
            self._drop()

    def verify(self, decision: Decision) -> None:
        """Check that `decision` is about what is prepared, and that its bytes still stand.

        Raises:
            StaleError: it is about another epoch, sync, version or digest.
            NotYetError: nothing is prepared.
            DigestError: a byte has changed.
        """
        with self._turn():
            self._match(decision)
            try:
                self.loader.verify()
            except DigestError:
                self._drop()
                raise

    def apply(self, decision: Decision) -> None:
        """Load what was verified into the live parameters.

        Raises:
            StaleError: what is prepared has changed since `verify`.
        """
        with self._turn():
            self._match(decision)
            self.loader.apply()
            self._drop()

    def _drop(self) -> None:
        """Nothing is prepared any more; whoever shares its memory may write there once the device has read it."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None and self._member is not None:
            self._member.released(prepared)

    def drop_memory(self) -> None:
        """Keep nothing of an epoch's memory; what is prepared stays, and can still be committed when its sender has gone."""
        with self._lock:
            if self.prepared is None:
                self.loader.leave()

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Held by the epoch's thread while it writes: what was prepared before is gone."""
        with self._lock:
            self.prepared = None
            yield

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The loop's turn: refused, not waited for, while the thread writes the next version."""
        if not self._lock.acquire(blocking=False):
            raise StaleError("the next version is being received; what was prepared is gone")
        try:
            yield
        finally:
            self._lock.release()

    def _match(self, decision: Decision) -> None:
        found = self.prepared
        if found is None:
            raise NotYetError(f"sync {decision.sync_id} of epoch {decision.epoch} is not prepared here")
        wanted = Prepared(decision.epoch, decision.sync_id, decision.version, decision.digest)
        if decision.job_uid != self.job_uid or found != wanted:
            raise StaleError(f"the decision is about {wanted} of job {decision.job_uid}, but prepared is {found}")

    def _rank_in(self, epoch: Epoch) -> int:
        for member in epoch.members:
            if member.uid == self.pod.pod_uid:
                return member.ranks[self.local_rank]
        raise StaleError(f"epoch {epoch.epoch} has no member with this pod's uid {self.pod.pod_uid}")


class Member:
    """The thread of one epoch."""

    def __init__(self, agent: Agent, epoch: Epoch, rank: int) -> None:
        self.agent = agent
        self.epoch = epoch
        self.rank = rank
        self.group: Group | None = None
        self._give_up = threading.Event()
        self._free: queue.SimpleQueue[tuple[int, torch.Event | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fp8rl-epoch-{epoch.epoch}", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the epoch can still bring a sync."""
        return self._thread.is_alive() and not self.closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._give_up.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Leave the epoch; frees the thread from whatever it waits for, a join included."""
        self._give_up.set()
        if self.group is not None:
            self.group.close()

    def _run(self) -> None:
        try:
            self.agent.drop_memory()
            pod = self.agent.pod
            self.group = join_group(
                self.epoch,
                self.rank,
                pod.pod_uid,
                pod.pod_ip,
                token=pod.token,
                give_up=self._give_up,
                device=self.agent.loader.device,
            )
            if self.closed:
                return
            self.agent.joined = self.epoch.epoch
            self._serve(self.group)
        except WorkerError as error:
            self._left(str(error))
        except Exception as error:
            log.exception("a fault of the program in epoch %s", self.epoch.epoch)
            self._left(fault(error))
        finally:
            self.agent.drop_memory()
            if self.group is not None:
                self.group.close()
            if self.agent.joined == self.epoch.epoch:
                self.agent.joined = None

    def _left(self, why: str) -> None:
        if not self.closed:
            self.agent.error = f"epoch {self.epoch.epoch}: {why}"
            log.warning("left epoch %s: %s", self.epoch.epoch, why)

    def _serve(self, group: Group) -> None:
        n, layouts = 0, LayoutReader(group.layout)
        while not self.closed and not group.wire.broken:
            self._release(group)
            text = group.wait_offer(n, RELEASE_POLL_SECONDS if group.wire.shared else OFFER_POLL_SECONDS)
            if text is not None:
                offer = parse_offer(text, self.epoch.job_uid, self.epoch.epoch, layouts)
                with on_stream_of(self.agent.loader.device):
                    self._take(group, n, offer)
                n += 1
        if group.wire.broken and not self.closed:
            raise SyncError(group.wire.broken)

    def released(self, prepared: Prepared) -> None:
        """From vLLM's loop: offer `prepared.offer` is not read any more after what the current stream does until here."""
        if self.group is not None and prepared.epoch == self.epoch.epoch:
            event = None
            if self.agent.loader.device.type == "cuda":
                event = torch.Event(device=self.agent.loader.device)
                event.record()
            self._free.put((prepared.offer, event))

    def _release(self, group: Group) -> None:
        """Tell the sender what may be written again."""
        while not self._free.empty():
            n, event = self._free.get()
            if event is not None:
                event.synchronize()
            group.release(n)

    def _take(self, group: Group, n: int, offer: Offer) -> None:
        """One offer: receive, prepare, report; a failure of this rank's own still receives what others need.

        Raises:
            Exception: what nobody foresaw, reported as failed; the wire may be out of step, so the epoch is left.
        """
        head = offer.head
        try:
            total, times = self._prepare(group, n, offer)
        except WorkerError as error:
            log.warning("sync %s, version %s: %s", head.sync_id, head.version, error)
            self.agent.error = str(error)
            group.release(n)
            group.put_report(n, self._report(offer, "failed", error=str(error)))
            return
        except Exception as error:
            group.release(n)
            group.put_report(n, self._report(offer, "failed", error=fault(error)))
            raise
        self.agent.error = ""
        group.put_report(n, self._report(offer, "prepared", digest=total, **times))

    def _prepare(self, group: Group, n: int, offer: Offer) -> tuple[str, dict[str, float]]:
        """Receive an offer and fill the shadow; returns the seal's total and the seconds of both."""
        start = time.perf_counter()
        wire, sync_id = group.wire, offer.head.sync_id
        staging = Staging(offer, self.agent.hold, wire.buffers(offer.buckets), shared=wire.shared)
        if not wire.shared:
            with group.transfer(n):
                receive(staging, wire.receive)
        seal = parse_seal(sealed(group, n, self.epoch.timeout_seconds), offer)
        received = time.perf_counter()
        with self.agent.filling():
            self.agent.loader.prepare(staging, seal)
            if reason := group.aborted(n):
                raise SyncError(f"sync {sync_id} was aborted: {reason}")
            self.agent.prepared = Prepared(offer.head.epoch, sync_id, offer.version, seal.total, n)
        return seal.total, {"receive_seconds": received - start, "load_seconds": time.perf_counter() - received}

    def _report(self, offer: Offer, state: str, **fields: str | float) -> MemberReport:
        return MemberReport.model_validate(
            {
                "sync_id": offer.head.sync_id,
                "epoch": offer.head.epoch,
                "rank": self.rank,
                "state": state,
                "version": offer.version,
                **fields,
            }
        )


def fault(error: Exception) -> str:
    """An exception that nobody foresaw, in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; the engine's log has the stack"


def sealed(group: Group, n: int, timeout: float) -> str:
    """The seal of an offer.

    Raises:
        SyncError: the offer was given up, or there is no seal in time.
    """
    deadline = time.monotonic() + timeout
    while (text := group.wait_seal(n, SEAL_POLL_SECONDS)) is None:
        if reason := group.aborted(n):
            raise SyncError(f"offer {n} was given up: {reason}")
        if time.monotonic() > deadline:
            raise SyncError(f"offer {n}: no seal within {timeout:g} s after the last bucket")
    return text


@contextlib.contextmanager
def on_stream_of(device: torch.device) -> Iterator[None]:
    """A stream of this thread's own on a GPU, so that nothing waits behind the engine's steps."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def receive(staging: Staging, transfer: Callable[[torch.Tensor], None]) -> None:
    """Receive every bucket of an offer.

    Raises:
        WireError: the transfer broke; the staging must not be used.
    """
    for bucket in staging.buckets:
        transfer(bucket)
