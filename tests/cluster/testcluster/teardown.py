"""Ends what a node runs beyond the processes that `up` started: containers, their shims, cgroups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from testcluster import processes
from testcluster.layout import Cluster

CGROUPS = Path("/sys/fs/cgroup")


def remove_containers(cluster: Cluster, index: int) -> None:
    """Kills a node's containers through its containerd, which then lets their shims end."""
    ctr = ["ctr", "--address", str(cluster.node(index) / "containerd.sock"), "--namespace", "k8s.io"]
    if processes.pid_of(cluster, f"containerd{index}") is None:
        return
    for kind, flags in (("tasks", ["--force"]), ("containers", [])):
        listed = subprocess.run(
            [*ctr, kind, "list", "--quiet"], check=False, capture_output=True, text=True
        ).stdout.split()
        ends = [
            subprocess.Popen([*ctr, kind, "rm", *flags, one], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for one in listed
        ]
        for end in ends:
            end.wait()


def _members(group: str) -> set[int]:
    """Processes in a cgroup and below."""
    found: set[int] = set()
    for path in (CGROUPS / "pids" / group).rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found |= {int(line) for line in path.read_text().split()}
    return found


def _shims(socket: Path) -> set[int]:
    """Shims that were started by the containerd of a socket."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].endswith(b"containerd-shim-runc-v2") and str(socket).encode() in words:
                found.add(int(path.parent.name))
    return found


def kill_leftovers(cluster: Cluster, index: int) -> None:
    """SIGKILL for everything in the node's cgroup, then for the shims of its containerd."""
    end = time.monotonic() + 5
    while (left := _members(cluster.cgroup(index))) and time.monotonic() < end:
        _kill(left)
        time.sleep(0.05)
    _kill(_shims(cluster.node(index) / "containerd.sock"))


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove_cgroups(cluster: Cluster, index: int) -> None:
    """Removes the node's cgroups, which are empty."""
    for controller in CGROUPS.iterdir():
        top = controller / cluster.cgroup(index)
        folders = [path for path in top.rglob("*") if path.is_dir()] if top.exists() else []
        for folder in [*sorted(folders, reverse=True), *([top] if top.exists() else [])]:
            with contextlib.suppress(OSError):
                folder.rmdir()
