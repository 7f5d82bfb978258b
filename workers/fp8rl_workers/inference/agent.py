"""The worker rank's own thread: takes an epoch's offers, receives, prepares and reports, beside vLLM's loop.

One thread per epoch. It never calls vLLM and vLLM's loop never waits for it longer than a dictionary look-up: a commit takes
what is prepared, or is refused. A dead trainer ends the thread; what is prepared stays, and the old version goes on.
A new epoch closes the old one's group before it makes its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fp8rl_workers.config import PodEnvironment
from fp8rl_workers.errors import NotYetError, StaleError, SyncError, WorkerError
from fp8rl_workers.protocol import Decision, Epoch, MemberReport
from fp8rl_workers.weights.group import Group, join_group
from fp8rl_workers.weights.load import Hold, Loader, Staging
from fp8rl_workers.weights.offer import Offer, parse_offer, parse_seal

log = logging.getLogger(__name__)

OFFER_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Prepared:
    """A version that stands ready to commit."""

    epoch: int
    sync_id: int
    version: int
    digest: str


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
            self.prepared = None

    def verify(self, decision: Decision) -> None:
        """Check that `decision` is about what is prepared, and that its bytes still stand.

        Raises:
            StaleError: it is about another epoch, sync, version or digest.
            NotYetError: nothing is prepared.
            DigestError: a byte has changed.
        """
        with self._turn():
            self._match(decision)
            self.loader.verify()

    def apply(self, decision: Decision) -> None:
        """Load what was verified into the live parameters.

        Raises:
            StaleError: what is prepared has changed since `verify`.
        """
        with self._turn():
            self._match(decision)
            self.loader.apply()
            self.prepared = None

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
            pod = self.agent.pod
            self.group = join_group(
                self.epoch, self.rank, pod.pod_uid, pod.pod_ip, token=pod.token, give_up=self._give_up
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
            if self.group is not None:
                self.group.close()
            if self.agent.joined == self.epoch.epoch:
                self.agent.joined = None

    def _left(self, why: str) -> None:
        if not self.closed:
            self.agent.error = f"epoch {self.epoch.epoch}: {why}"
            log.warning("left epoch %s: %s", self.epoch.epoch, why)

    def _serve(self, group: Group) -> None:
        n = 0
        while not self.closed and not group.wire.broken:
            text = group.wait_offer(n, OFFER_POLL_SECONDS)
            if text is not None:
                self._take(group, n, text)
                n += 1
        if group.wire.broken and not self.closed:
            raise SyncError(group.wire.broken)

    def _take(self, group: Group, n: int, text: str) -> None:
        """One offer: receive, prepare, report; a failure of this rank's own still receives what others need.

        Raises:
            Exception: what nobody foresaw, reported as failed; the wire may be out of step, so the epoch is left.
        """
        offer = parse_offer(text, self.epoch.job_uid, self.epoch.epoch)
        try:
            total, times = self._prepare(group, n, offer)
        except WorkerError as error:
            log.warning("sync %s, version %s: %s", offer.sync_id, offer.version, error)
            self.agent.error = str(error)
            group.put_report(n, self._report(offer, "failed", error=str(error)))
            return
        except Exception as error:
            group.put_report(n, self._report(offer, "failed", error=fault(error)))
            raise
        self.agent.error = ""
        group.put_report(n, self._report(offer, "prepared", digest=total, **times))

    def _prepare(self, group: Group, n: int, offer: Offer) -> tuple[str, dict[str, float]]:
        """Receive an offer and fill the shadow; returns the seal's total and the seconds of both."""
        start = time.perf_counter()
        staging = Staging(offer, self.agent.hold)
        with group.transfer(n):
            receive(staging, group.wire.receive)
        seal_text = group.wait_seal(n, self.epoch.timeout_seconds)
        if seal_text is None:
            raise SyncError(
                f"sync {offer.sync_id}: no seal within {self.epoch.timeout_seconds:g} s after the last bucket"
            )
        seal = parse_seal(seal_text, offer)
        received = time.perf_counter()
        with self.agent.filling():
            self.agent.loader.prepare(staging, seal)
            if reason := group.aborted(n):
                raise SyncError(f"sync {offer.sync_id} was aborted: {reason}")
            self.agent.prepared = Prepared(offer.epoch, offer.sync_id, offer.version, seal.total)
        return seal.total, {"receive_seconds": received - start, "load_seconds": time.perf_counter() - received}

    def _report(self, offer: Offer, state: str, **fields: str | float) -> MemberReport:
        return MemberReport.model_validate(
            {
                "sync_id": offer.sync_id,
                "epoch": offer.epoch,
                "rank": self.rank,
                "state": state,
                "version": offer.version,
                **fields,
            }
        )


def fault(error: Exception) -> str:
    """An exception that nobody foresaw, in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; the engine's log has the stack"


def receive(staging: Staging, transfer: Callable[[torch.Tensor], None]) -> None:
    """Receive every bucket of an offer.

    Raises:
        WireError: the transfer broke; the staging must not be used.
    """
    for bucket in staging.buckets:
        transfer(bucket)
