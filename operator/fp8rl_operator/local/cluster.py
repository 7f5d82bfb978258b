"""`Cluster` on one machine: the job's objects as processes, its status as files of the run folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.cluster import Object, Outcome
from fp8rl_operator.control import ControlClient
from fp8rl_operator.local import files, shim
from fp8rl_operator.local.addresses import AddressBlock
from fp8rl_operator.local.containers import Machine, gpus_wanted
from fp8rl_operator.local.pods import Backoff, Node, PodRunner
from fp8rl_operator.local.volumes import Folders, object_data
from fp8rl_operator.local.workloads import REVISION_LABEL, WORKLOADS, Existing, compute_change, owner_key
from fp8rl_operator.observed import Observed, PodPhase, PodState
from fp8rl_operator.plan import Plan
from fp8rl_operator.spec import FP8RLJob

TOKEN_KEY = "token"  # noqa: S105 - a key, no secret
PODS_FILE = "pods.json"


def machine_gpus() -> tuple[str, ...]:
    """This machine's NVIDIA GPUs, as CUDA_VISIBLE_DEVICES takes them: by ordinal, which is not a device file's number."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(part for part in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if part)
    count = sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in Path("/dev").iterdir())
    return tuple(map(str, range(count)))


@dataclass
class LocalCluster:
    """The children of one job on this machine. See `Node` for `backoff` and `max_grace`."""

    folders: Folders
    backoff: Backoff = field(default_factory=Backoff)
    max_grace: float = 30.0
    gpus: tuple[str, ...] = field(default_factory=machine_gpus)
    on_event: Callable[[dict[str, Any]], None] = lambda _: None

    def __post_init__(self) -> None:
        """Take an address block; become the reaper of whatever a killed shim leaves."""
        shim.prctl(shim.PR_SET_CHILD_SUBREAPER, 1)
        shutil.rmtree(self.folders.pods, ignore_errors=True)
        self.block = AddressBlock.take(str(self.folders.root.resolve()))
        self.objects: dict[tuple[str, str], Object] = {}
        self.pods: dict[str, PodRunner] = {}
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.control = ControlClient()
        self.next_gpu = 0
        self.closed = False
        self.node = Node(self.folders, self.find, self.event, self.block.lock.fileno(), self.backoff, self.max_grace)

    def find(self, kind: str, name: str) -> Object:
        """An applied object.

        Raises:
            KeyError: there is none of this kind and name.
        """
        try:
            return self.objects[kind, name]
        except KeyError:
            raise KeyError(f"{kind} {name} does not exist") from None

    def event(self, subject: str, reason: str, message: str) -> None:
        """Append to events.jsonl, with the time of now."""
        self.event_at(time.time(), reason, message, subject)

    def event_at(self, when: float, reason: str, message: str, subject: str = "") -> None:
        """Append to events.jsonl. `when` in Unix seconds; no subject: the node."""
        entry = {"time": when, "source": subject or "node", "kind": reason, "message": message}
        files.append_json(self.folders.root / "events.jsonl", entry)
        self.on_event(entry)

    async def observe(self, job: FP8RLJob) -> Observed:
        """See `Cluster.observe`."""
        pods = tuple(self.pod_state(pod) for pod in self.pods.values())
        token = self.token(job)
        if token is None:
            return Observed(pods)
        trainer, orchestrator = await self.control.read(pods, token)
        return Observed(pods, orchestrator, trainer, token)

    def token(self, job: FP8RLJob) -> str | None:
        """The control token, once its Secret was made; it lies in the run folder so that a resumed run keeps it."""
        name = names.child_name(job.metadata.name, "control")
        if ("Secret", name) in self.objects:
            return object_data(self.objects["Secret", name])[TOKEN_KEY].decode()
        path = self.folders.root / ".local" / "token"
        return path.read_text() if path.exists() else None

    def pod_state(self, pod: PodRunner) -> PodState:
        """A pod as the reconcile sees it."""
        metadata = pod.pod["metadata"]
        ended = next((c for c in pod.init + pod.containers if c.exit_code), None)
        waiting = next((c for c in pod.init + pod.containers if c.state == "waiting"), None)
        shown = ended or waiting
        phase: PodPhase = "Failed" if pod.broken[0] else "Running" if pod.phase == "Running" else "Pending"
        return PodState(
            name=pod.name,
            uid=pod.uid,
            role=metadata["labels"].get(names.LABEL_ROLE, ""),
            attempt=int(metadata.get("annotations", {}).get(names.ANNOTATION_ATTEMPT, 0)),
            phase=phase,
            ready=pod.ready,
            terminating=pod.terminating,
            starting=pod.phase == "Pending",
            ip=pod.address,
            restarts=sum(c.restarts for c in (pod.init if pod.phase == "Pending" else pod.containers)),
            exit_code=ended.exit_code if ended else None,
            reason=pod.broken[0] or (shown.reason if shown else ""),
            message=pod.broken[1] or (shown.message if shown else ""),
        )

    async def apply(self, job: FP8RLJob, objects: list[Object], plan: Plan) -> Outcome:
        """See `Cluster.apply`."""
        wanted = {(item["kind"], item["metadata"]["name"]): item for item in objects}
        changed = [f"{kind}/{name}" for (kind, name), item in wanted.items() if self.objects.get((kind, name)) != item]
        changed += [f"{kind}/{name}" for kind, name in self.objects.keys() - wanted.keys()]
        self.objects = wanted
        token = self.token(job)
        if token is not None:
            files.write_private(self.folders.root / ".local" / "token", token)
        for uid in plan.end_pods:
            self.end(uid)
        self.step()
        self.write_pods()  # a shim writes its container's process id a moment after the start
        if token is not None and plan.group is not None:
            await self.control.put_group(plan.group, [self.pod_state(pod) for pod in self.pods.values()], token)
        return Outcome(tuple(changed))

    async def write_status(self, job: FP8RLJob, status: dict[str, Any]) -> None:
        """See `Cluster.write_status`: status.yaml, whole or not at all."""
        files.write_job(self.folders.root / "status.yaml", job.model_copy(update={"status": status}))

    async def record(self, job: FP8RLJob, reason: str, message: str, *, warning: bool = False) -> None:
        """See `Cluster.record`."""
        self.event(job.metadata.name, reason, f"{message} (warning)" if warning else message)

    def step(self) -> None:
        """One step of the workload controllers."""
        if self.closed:
            return
        workloads = [item for (kind, _), item in self.objects.items() if kind in WORKLOADS]
        change = compute_change(workloads, [existing(pod) for pod in self.pods.values()], lambda: str(uuid.uuid4()))
        for uid in change.end:
            self.end(uid)
        for pod in change.create:
            self.start(pod)

    def start(self, pod: Object) -> None:
        """Start a pod on an address of its own."""
        address = self.block.allocate()
        runner = PodRunner(pod, address, self.node, self.machine(pod), self.write_pods)
        self.pods[runner.uid] = runner
        self.event(runner.name, "Scheduled", f"on {address}")

    def machine(self, pod: Object) -> Machine:
        """What this machine lends to a pod: GPUs in turn, shared when there are too few; all of them where it asks for none.

        A job that asks for no GPU (a sample for CPUs) uses what the machine has: an engine's build for GPUs needs one.
        """
        wanted = min(gpus_wanted(pod), len(self.gpus))
        mine = tuple(self.gpus[(self.next_gpu + i) % len(self.gpus)] for i in range(wanted)) or self.gpus
        self.next_gpu += wanted
        busy = sum(item["spec"].get("replicas", 1) for (kind, _), item in self.objects.items() if kind in WORKLOADS)
        return Machine(os.environ, max(1, len(os.sched_getaffinity(0)) // max(1, busy - 1)), mine)

    def end(self, uid: str, grace: float | None = None) -> None:
        """Begin to end a pod."""
        if uid in self.pods and uid not in self.ending:
            self.ending[uid] = asyncio.create_task(self.finish(self.pods[uid], grace))

    async def finish(self, pod: PodRunner, grace: float | None) -> None:
        """End a pod; its address is free again and its workload may replace it."""
        await pod.terminate(grace)
        self.block.release(pod.address)
        del self.pods[pod.uid], self.ending[pod.uid]
        self.event(pod.name, "Killing", "ended")
        self.step()
        self.write_pods()

    def write_pods(self) -> None:
        """Tell people and tools where everything runs: `.local/pods.json`."""
        rows = [
            {
                "name": pod.name,
                "address": pod.address,
                "ready": pod.ready,
                "phase": "Terminating" if pod.terminating else pod.phase,
                "pids": {c.name: c.pid for c in pod.init + pod.containers if c.pid},
                "restarts": sum(c.restarts for c in pod.containers),
            }
            for pod in self.pods.values()
        ]
        files.write_text(self.folders.root / ".local" / PODS_FILE, json.dumps(rows, indent=2))

    async def close(self, grace: float) -> None:
        """End every pod, killing what is left after `grace` seconds, and give the addresses back."""
        self.closed = True
        for uid in list(self.pods):
            self.end(uid, grace)
        ended = await asyncio.gather(*self.ending.values(), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                self.event("", "CleanUpFailed", repr(error))
        await self.control.close()
        self.block.close()
        shutil.rmtree(self.folders.pods, ignore_errors=True)


def existing(pod: PodRunner) -> Existing:
    """A pod as its workload sees it."""
    metadata = pod.pod["metadata"]
    owner = metadata["ownerReferences"][0]
    key = owner_key({"kind": owner["kind"], "metadata": {"name": owner["name"]}})
    return Existing(pod.name, pod.uid, key, metadata["labels"][REVISION_LABEL], pod.terminating)
