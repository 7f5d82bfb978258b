"""The trainer's part in the weight-sync group: it hosts the store, joins epochs, runs syncs, hears decisions.

One thread does all that blocks, in order; the event loop decides. Calls may be repeated: an epoch or a sync that is running is
joined, a finished one answers what it answered. An epoch's group is closed before the next is formed; closing frees a sync
that is stuck in it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fp8rl_workers.config import PodEnvironment, TrainerConfig
from fp8rl_workers.errors import InvalidInputError, NotYetError, StaleError, SyncError
from fp8rl_workers.metrics import WorkerMetrics
from fp8rl_workers.places import this_place
from fp8rl_workers.protocol import Decision, Epoch, EpochReport, SyncReport, SyncRequest
from fp8rl_workers.trainer.publish import Publisher, WeightSource, WireFormat
from fp8rl_workers.trainer.versions import VersionCounter
from fp8rl_workers.weights.group import Group, JoinError, StoreHost, join_group, name_of

log = logging.getLogger(__name__)


@dataclass
class RunningSync:
    """A sync under way or finished. `offer`: its number in the epoch."""

    request: SyncRequest
    offer: int
    task: asyncio.Task[SyncReport]


class Membership:
    """The group as the trainer's rank 0 sees it. Methods run on the event loop."""

    def __init__(self, config: TrainerConfig, pod: PodEnvironment, metrics: WorkerMetrics) -> None:
        """Listen for members.

        Raises:
            InvalidInputError: the store's port is in use.
        """
        self.versions = VersionCounter(pod.state_dir / "version")
        self.place = this_place(name_of(weights_device()))
        self._config, self._pod, self._metrics = config, pod, metrics
        self._store = StoreHost(pod.pod_ip, config.weight_sync.port)
        self._thread = ThreadPoolExecutor(1, "fp8rl-sync")
        self._epoch: Epoch | None = None
        self._joining: asyncio.Task[EpochReport] | None = None
        self._group: Group | None = None
        self._publisher: Publisher | None = None
        self._give_up = threading.Event()
        self._offers = 0
        self._sync: RunningSync | None = None

    async def form(self, epoch: Epoch) -> EpochReport:
        """Leave the epoch before and join this one.

        Raises:
            StaleError: it is older than the current one, or another document of the same number.
            InvalidInputError: this pod is not in it, or its store is not the one that this pod hosts.
        """
        if self._epoch == epoch and self._joining is not None:
            return await asyncio.shield(self._joining)
        if self._epoch is not None and epoch.epoch <= self._epoch.epoch:
            raise StaleError(f"epoch {epoch.epoch} is not after epoch {self._epoch.epoch}, which this trainer is in")
        rank = self._rank_in(epoch)
        self._leave()
        self._epoch, self._group, self._publisher, self._offers, self._sync = epoch, None, None, 0, None
        self._joining = asyncio.create_task(self._join(epoch, rank))
        return await asyncio.shield(self._joining)

    async def sync(self, request: SyncRequest, source: WeightSource, form: WireFormat) -> SyncReport:
        """Publish the weights as they are under a new version, to all members.

        Raises:
            NotYetError: no epoch is formed.
            StaleError: another epoch, a sync or version that is over, or another sync is running.
            SyncError: the group is broken; a new epoch is needed.
        """
        if self._sync is not None and self._sync.request == request:
            return await asyncio.shield(self._sync.task)
        group = self._usable_group(request)
        offer, self._offers = self._offers, self._offers + 1
        task = asyncio.create_task(self._publish(group, offer, request, source, form))
        self._sync = RunningSync(request, offer, task)
        return await asyncio.shield(task)

    async def decide(self, decision: Decision) -> None:
        """Hear what became of a sync; an abort frees a publication that is still running.

        Raises:
            StaleError: it belongs to another epoch.
        """
        if self._epoch is None or decision.epoch != self._epoch.epoch:
            raise StaleError(f"the decision is of epoch {decision.epoch}, this trainer is in {self._epoch_name()}")
        if decision.committed:
            self._metrics.version.set(decision.version)
            return
        sync, group = self._sync, self._group
        if sync is not None and group is not None and sync.request.sync_id == decision.sync_id:
            await asyncio.to_thread(group.put_abort, sync.offer, "the orchestrator aborted the sync")

    def close(self) -> None:
        """Leave the group and stop listening."""
        self._leave()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _leave(self) -> None:
        """Free the thread from the epoch, whether it joins, publishes or waits."""
        if self._group is not None:
            self._group.close()
        self._give_up.set()
        self._give_up = threading.Event()

    async def _join(self, epoch: Epoch, rank: int) -> EpochReport:
        host, give_up = self._store if rank == 0 else None, self._give_up

        def work() -> Group:
            pod = self._pod
            return join_group(
                epoch, rank, pod.pod_uid, pod.pod_ip, host, token=pod.token, give_up=give_up, device=weights_device()
            )

        try:
            group = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except JoinError as error:
            missing = [member.pod for member in epoch.members if set(member.ranks) & set(error.missing)]
            joined = [member.pod for member in epoch.members if member.pod not in missing]
            return EpochReport(epoch=epoch.epoch, joined=joined, missing=missing)
        if self._epoch != epoch:
            group.close()
            raise StaleError(f"epoch {epoch.epoch} was given up for {self._epoch_name()}")
        self._group = group
        return EpochReport(epoch=epoch.epoch, joined=[member.pod for member in epoch.members])

    async def _publish(
        self, group: Group, offer: int, request: SyncRequest, source: WeightSource, form: WireFormat
    ) -> SyncReport:
        def work() -> SyncReport:
            try:
                self.versions.take(request.version)
            except OSError as error:
                message = f"version {request.version} cannot be recorded in {self._pod.state_dir}: {error.strerror}; mend the volume"
                raise SyncError(message) from error
            if self._publisher is None or self._publisher.group is not group:
                self._publisher = Publisher(group, source, form, self._pod.attempt)
            return self._publisher.publish(offer, request)

        try:
            report = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except BaseException:
            self._metrics.sync_failures.inc()
            raise
        if any(member.state == "failed" for member in report.members):
            self._metrics.sync_failures.inc()
        for stage, seconds in report.stages.items():
            self._metrics.sync_stage.labels(stage).observe(seconds)
        log.info("%s", summary(report))
        return report

    def _usable_group(self, request: SyncRequest) -> Group:
        if self._group is None:
            raise NotYetError(f"{self._epoch_name()} is not formed; PUT /v1/epoch first")
        if request.epoch != self._group.epoch.epoch:
            raise StaleError(
                f"sync {request.sync_id} is of epoch {request.epoch}, this trainer is in {self._epoch_name()}"
            )
        if self._sync is not None and not self._sync.task.done():
            raise StaleError(f"sync {request.sync_id}: sync {self._sync.request.sync_id} is still running")
        if self._sync is not None and request.sync_id <= self._sync.request.sync_id:
            raise StaleError(f"sync {request.sync_id} is not after sync {self._sync.request.sync_id}")
        if request.version <= self.versions.highest:
            raise StaleError(f"version {request.version} was used before; the highest is {self.versions.highest}")
        if self._group.wire.broken:
            raise SyncError(f"{self._epoch_name()} is broken ({self._group.wire.broken}); form a new one")
        return self._group

    def _rank_in(self, epoch: Epoch) -> int:
        ranks = [rank for member in epoch.members if member.uid == self._pod.pod_uid for rank in member.ranks]
        if not ranks:
            raise InvalidInputError(
                f"members: pod {self._pod.pod_name} ({self._pod.pod_uid}) is not in epoch {epoch.epoch}"
            )
        if ranks[0] == 0 and (epoch.store_host, epoch.store_port) != (self._store.address, self._store.port):
            asked, mine = f"{epoch.store_host}:{epoch.store_port}", f"{self._store.address}:{self._store.port}"
            raise InvalidInputError(f"store_host, store_port: {asked} is not the store of this trainer, {mine}")
        return ranks[0]

    def _epoch_name(self) -> str:
        return "no epoch" if self._epoch is None else f"epoch {self._epoch.epoch}"


def weights_device() -> torch.device:
    """Where a trainer on this machine keeps its weights."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def summary(report: SyncReport) -> str:
    """One line about a sync."""
    failed = [f"rank {member.rank}: {member.error}" for member in report.members if member.state == "failed"]
    outcome = f"failed on {'; '.join(failed)}" if failed else f"prepared on {len(report.members)} ranks"
    seconds = sum(report.stages.values())
    return f"sync {report.sync_id}, version {report.version} of step {report.step}: {outcome}, {report.wire_bytes} bytes in {seconds:.3f} s"
