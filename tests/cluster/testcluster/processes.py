"""Processes of a cluster: started in sessions of their own, known by process id and start time, each with a log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from testcluster.layout import Cluster, ClusterError

_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}  # those of this interpreter, to be reaped


def log_of(cluster: Cluster, name: str) -> Path:
    """Log of a process, kept over its restarts."""
    return cluster.run / "log" / f"{name}.log"


def _start_time(pid: int) -> str | None:
    """Clock tick at which a process started; None if it is dead (a zombie is dead)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def pid_of(cluster: Cluster, name: str) -> int | None:
    """Process id of a running process of the cluster; None if it does not run."""
    try:
        pid, started = (cluster.run / "pid" / name).read_text().split()
    except FileNotFoundError:
        return None
    return int(pid) if _start_time(int(pid)) == started else None


def names(cluster: Cluster) -> list[str]:
    """Processes that were started and not stopped."""
    folder = cluster.run / "pid"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def start(cluster: Cluster, name: str, command: list[str]) -> None:
    """Starts a process that does not run yet."""
    if pid_of(cluster, name) is not None:
        return
    log = log_of(cluster, name)
    for folder in (log.parent, cluster.run / "pid"):
        folder.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    _CHILDREN[child.pid] = child
    (cluster.run / "pid" / name).write_text(f"{child.pid} {_start_time(child.pid)}")


def stop(cluster: Cluster, stopped: list[str], *, patience: float = 5.0, sign: int = signal.SIGTERM) -> None:
    """Ends processes, together: a signal to each, and after `patience` seconds SIGKILL."""
    running = {name: pid for name in stopped if (pid := pid_of(cluster, name)) is not None}
    for pid in running.values():
        os.kill(pid, sign)
    end = time.monotonic() + patience
    while any(pid_of(cluster, name) for name in running) and time.monotonic() < end:
        time.sleep(0.02)
    for name, pid in running.items():
        if pid_of(cluster, name) is not None:
            os.kill(pid, signal.SIGKILL)
        if (child := _CHILDREN.pop(pid, None)) is not None:
            child.wait()
    for name in stopped:
        (cluster.run / "pid" / name).unlink(missing_ok=True)


def wait(cluster: Cluster, what: str, ready: Callable[[], bool], *, process: str, seconds: float = 90.0) -> None:
    """Waits until `ready`.

    Raises:
        ClusterError: `process` died, or `seconds` passed; the message ends with the last lines of its log.
    """
    end = time.monotonic() + seconds
    while not ready():
        if pid_of(cluster, process) is None:
            raise ClusterError(f"{process} died before {what}; its log is {_tail(cluster, process)}")
        if time.monotonic() > end:
            raise ClusterError(f"no {what} after {seconds:.0f} s; the log of {process} is {_tail(cluster, process)}")
        time.sleep(0.05)


def _tail(cluster: Cluster, name: str) -> str:
    log = log_of(cluster, name)
    lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    return "\n  ".join([f"{log}, which ends:", *lines])
