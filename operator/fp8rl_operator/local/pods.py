"""A tiny kubelet: runs the containers of one pod as processes, probes them, restarts what ends."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fp8rl_operator.local import shim
from fp8rl_operator.local.containers import Machine, Process, resolve
from fp8rl_operator.local.probes import read_probes, run_probes
from fp8rl_operator.local.processes import MARK, PortInUseError, check_ports, kill_orphans, last_words, read_pid
from fp8rl_operator.local.volumes import FindObject, Folders, Object, make_volumes, pod_mounts

SHIM = [sys.executable, "-I", "-S", shim.__file__]


@dataclass(frozen=True)
class Backoff:
    """Delay before the n-th restart, as the kubelet does: none, then `initial` doubled each time up to `cap`; seconds."""

    initial: float = 10.0
    cap: float = 300.0
    reset_after: float = 600.0

    def delay(self, restarts: int) -> float:
        """Seconds to wait before restart number `restarts` (1-based)."""
        return 0.0 if restarts <= 1 else min(self.cap, self.initial * 2 ** (restarts - 2))


@dataclass
class Container:
    """State of one container, as a pod's status tells it."""

    name: str
    state: str = "waiting"
    reason: str = "PodInitializing"
    message: str = ""
    exit_code: int | None = None
    restarts: int = 0
    ready: bool = False
    process: asyncio.subprocess.Process | None = None
    pid_file: Path | None = None
    killed_for: str = ""
    log_start: int = 0

    @property
    def pid(self) -> int | None:
        """Process id of the container's first process while it runs."""
        return (read_pid(self.pid_file) or None) if self.state == "running" else None

    def tell(self, word: bytes) -> None:
        """Send `T` or `K` to the shim."""
        if self.process is not None and self.process.stdin is not None and self.process.returncode is None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.process.stdin.write(word)


@dataclass
class Node:
    """What all pods of a run share."""

    folders: Folders
    find: FindObject
    event: Callable[[str, str, str], None]
    lock_fd: int
    backoff: Backoff = field(default_factory=Backoff)
    max_grace: float = 30.0


class PodRunner:
    """One pod, from its volumes to its last process. `changed` is called when its state changes."""

    def __init__(self, pod: Object, address: str, node: Node, machine: Machine, changed: Callable[[], None]) -> None:
        self.pod = pod
        self.address = address
        self.node = node
        self.machine = machine
        self.changed = changed
        self.name: str = pod["metadata"]["name"]
        self.uid: str = pod["metadata"]["uid"]
        spec = pod["spec"]
        self.init = [Container(container["name"]) for container in spec.get("initContainers", [])]
        self.containers = [Container(container["name"]) for container in spec["containers"]]
        self.mounts = pod_mounts(pod, node.folders)
        self.folder = node.folders.pods / self.uid
        self.terminating = False
        self.broken = ("", "")
        self.task = asyncio.create_task(self.run(), name=f"pod {self.name}")

    @property
    def phase(self) -> str:
        """Phase as Kubernetes names it."""
        if self.broken[0]:
            return "Failed"
        if any(container.state == "running" or container.restarts for container in self.containers):
            return "Running"
        return "Pending"

    @property
    def ready(self) -> bool:
        """Whether every container is ready."""
        return not self.terminating and all(container.ready for container in self.containers)

    async def run(self) -> None:
        """Volumes, init containers one after the other, then the containers, for as long as the pod stays."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.node.folders.logs.mkdir(parents=True, exist_ok=True)
            make_volumes(self.pod, self.node.folders, self.mounts, self.node.find)
            check_ports(self.pod, self.address)
            for state, container in zip(self.init, self.pod["spec"].get("initContainers", []), strict=True):
                while await self.run_container(state, container, probed=False) != 0 and not self.terminating:
                    await self.back_off(state)
            await self.run_containers()
        except PortInUseError as error:
            self.give_up("PortInUse", str(error))
        except (ValueError, KeyError, OSError) as error:
            self.give_up("FailedMount", str(error))

    async def run_containers(self) -> None:
        """Run the main containers side by side; the pod is given up where one of them can never be made here."""
        try:
            async with asyncio.TaskGroup() as group:
                for state, container in zip(self.containers, self.pod["spec"]["containers"], strict=True):
                    group.create_task(self.keep_running(state, container))
        except* (ValueError, KeyError, OSError) as errors:
            words = "; ".join(
                str(error.args[0] if isinstance(error, KeyError) else error) for error in errors.exceptions
            )
            self.give_up("CreateContainerConfigError", words)

    def give_up(self, reason: str, message: str) -> None:
        """The pod cannot be: phase Failed."""
        self.broken = (reason, message)
        self.node.event(self.name, reason, message)
        self.changed()

    async def keep_running(self, state: Container, container: Object) -> None:
        """Run a container again and again (restartPolicy Always)."""
        while not self.terminating:
            await self.run_container(state, container, probed=True)
            if not self.terminating:
                await self.back_off(state)

    async def back_off(self, state: Container) -> None:
        """Wait as long as the kubelet would before the next start."""
        state.restarts += 1
        delay = self.node.backoff.delay(state.restarts)
        state.state, state.reason = "waiting", "CrashLoopBackOff" if delay else "Error"
        self.node.event(
            self.name, "BackOff", f"container {state.name} ended with code {state.exit_code}; restart in {delay:g} s"
        )
        self.changed()
        await asyncio.sleep(delay)

    async def run_container(self, state: Container, container: Object, *, probed: bool) -> int:
        """Run a container once; returns its exit code."""
        if self.terminating:
            return 0
        read_probes(container)  # a probe that cannot be run here is told before anything starts
        process = resolve(container, self.pod, self.address, self.mounts, self.node.find, machine=self.machine)
        log = self.log_path(state)
        started = time.monotonic()
        state.process = await self.spawn(state, process, log, container.get("workingDir"))
        state.state, state.reason, state.killed_for = "running", "", ""
        self.node.event(self.name, "Started", f"container {state.name}")
        self.changed()
        probes = asyncio.create_task(self.probe(state, container)) if probed else None
        code = await state.process.wait()
        if probes is not None:
            probes.cancel()
        self.collect(state, code, log)
        if time.monotonic() - started >= self.node.backoff.reset_after:
            state.restarts = min(state.restarts, 1)
        return state.exit_code or 0

    def collect(self, state: Container, code: int, log: Path) -> None:
        """Note how a container ended; reap what a killed shim left."""
        if code < 0:
            kill_orphans(self.mark(state), read_pid(state.pid_file))
        state.ready = False
        state.state, state.exit_code = "terminated", 128 - code if code < 0 else code
        state.reason = "Completed" if code == 0 else "Error"
        state.message = state.killed_for or last_words(state.exit_code, log, state.log_start)
        if not self.terminating:
            self.node.event(self.name, "Exited", f"container {state.name} ended with code {state.exit_code}")
        self.changed()

    async def spawn(
        self, state: Container, process: Process, log: Path, folder: str | None
    ) -> asyncio.subprocess.Process:
        """Start a container's shim with its output appended to the log."""
        state.pid_file = self.folder / f"{state.name}.pid"
        state.pid_file.unlink(missing_ok=True)
        with log.open("ab") as output:
            state.log_start = output.tell()
            return await asyncio.create_subprocess_exec(
                *SHIM,
                str(state.pid_file),
                *process.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=process.env | {MARK: self.mark(state)},
                cwd=self.mounts.real(folder) if folder else self.folder,
                start_new_session=True,
                pass_fds=(self.node.lock_fd,),
            )

    async def probe(self, state: Container, container: Object) -> None:
        """Run the container's probes; a dead container is terminated and so restarted."""

        def on_ready(healthy: bool, why: str) -> None:
            state.ready = healthy
            if not healthy:
                self.node.event(self.name, "Unready", why)
            self.changed()

        async def on_dead(why: str) -> None:
            state.killed_for = why
            self.node.event(self.name, "Unhealthy", f"container {state.name}: {why}")
            await self.stop(state)

        await run_probes(container, self.address, on_ready, on_dead)

    async def stop(self, state: Container, grace: float | None = None) -> None:
        """Terminate a container, kill it after the pod's grace period."""
        if state.process is None or state.process.returncode is not None:
            return
        own = float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
        state.tell(b"T")
        try:
            async with asyncio.timeout(min(own if grace is None else grace, self.node.max_grace)):
                await asyncio.shield(state.process.wait())
        except TimeoutError:
            state.tell(b"K")
            await state.process.wait()

    async def terminate(self, grace: float | None = None) -> None:
        """End the pod: every container terminated, then killed, its own folder removed."""
        self.terminating = True
        self.changed()
        await asyncio.gather(*(self.stop(state, grace) for state in self.init + self.containers))
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await asyncio.gather(*(self.stop(state, 0.0) for state in self.init + self.containers))
        shutil.rmtree(self.folder, ignore_errors=True)

    def mark(self, state: Container) -> str:
        """Tells the container's processes from all others."""
        return f"{self.uid}/{state.name}"

    def log_path(self, state: Container) -> Path:
        """`<pod>.log` for the first container, `<pod>.<container>.log` for the others."""
        first = self.containers[0] is state
        return self.node.folders.logs / (f"{self.name}.log" if first else f"{self.name}.{state.name}.log")
