"""Looking at and after the processes of containers: ports, last words, what a killed shim leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from fp8rl_operator.local import shim
from fp8rl_operator.local.volumes import Object

TAIL_BYTES = 1 << 16  # an engine tells the cause some hundred lines before its end
MARK = "FP8RL_CONTAINER"
ORPHAN_ROUNDS = 100


class PortInUseError(Exception):
    """Raised when a port of a pod is taken on its address; the message names both and the way out."""


def check_ports(pod: Object, address: str) -> None:
    """Raise PortInUseError if something listens on a port that a container declares."""
    for container in pod["spec"]["containers"]:
        for port in (item["containerPort"] for item in container.get("ports", [])):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, port))
                except OSError as error:
                    raise PortInUseError(
                        f"port {port} of {pod['metadata']['name']} is in use on {address}: {error.strerror}; another program"
                        f" listens on 0.0.0.0:{port}, end it or give it an address of its own"
                    ) from error


def read_pid(path: Path | None) -> int:
    """Process id that a shim wrote, 0 if it did not get so far."""
    return int(path.read_text() or 0) if path is not None and path.exists() else 0


def tail(log: Path, start: int) -> str:
    """Last lines of a log from byte `start` on, as `terminationMessagePolicy: FallbackToLogsOnError` gives them, but longer."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines())
    return ""


def last_words(code: int, log: Path, start: int) -> str:
    """Why a container ended with `code`: what killed it, else the end of its log since its last start; empty for 0."""
    if code == 128 + signal.SIGKILL:  # it could say nothing: its last line is about something else
        return "killed by SIGKILL, from outside or for want of memory"
    return tail(log, start) if code else ""


def kill_orphans(mark: str, session: int) -> None:
    """Kill what is left of a container whose shim was killed. Looks again until nothing is left: processes change parents meanwhile."""
    for _ in range(ORPHAN_ROUNDS):
        left = [pid for pid in shim.parents() if pid != os.getpid() and belongs(pid, mark, session)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def belongs(pid: int, mark: str, session: int) -> bool:
    """Whether a process came from the container: by its environment, or by its session if it has overwritten that."""
    with contextlib.suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"{MARK}={mark}".encode() in environ or os.getsid(pid) == session
    return False
