"""The parent of one container's process: run as a script of its own, standard library only.

`python -I -S shim.py PIDFILE ARGV...` starts ARGV in a session of its own and holds everything that descends from it:
the shim is their child subreaper. When the container's first process ends, all the others are killed and the shim exits
with the first one's code (128 + signal for a signal), as a container does. Its standard input is the line to the node:
`T` terminates the first process, `K` kills all, and the end of the input, which comes also when the node itself is killed, kills
all. PIDFILE receives the first process's id.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
START_FAILED = 127
KILLED = 137
HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def prctl(option: int, value: int) -> None:
    """The system call prctl.

    Raises:
        OSError: the kernel refuses the option.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def parents() -> dict[int, int]:
    """Process id to parent's process id of every process that can be read."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = int(fields[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before their children."""
    below: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        below.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        children = below.get(queue.pop(0), [])
        found += children
        queue += children
    return found


def reap() -> dict[int, int]:
    """Collect every child that has ended: process id to exit code."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = 128 - code if code < 0 else code


def kill_tree() -> dict[int, int]:
    """Kill all descendants until none is left; returns what `reap` saw."""
    ended: dict[int, int] = {}
    while left := descendants(os.getpid()):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)
        ended |= reap()
    return ended


def start(argv: list[str]) -> int:
    """Fork and execute `argv` in a new session that dies with this process; returns its process id."""
    shim = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(KILLED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)  # a termination that came meanwhile takes effect here
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the container's own command
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(START_FAILED)


def serve(child: int, wake: int) -> int:
    """Wait for the child's end or the node's word; returns the exit code."""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            ended = reap()
            if child in ended:
                return ended[child]
        if 0 in ready:
            words = os.read(0, 16)
            if not words or b"K" in words:
                return kill_tree().get(child, KILLED)
            os.kill(child, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run one container to its end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    child = start(argv[1:])
    Path(argv[0]).write_text(str(child))
    code = serve(child, wake)
    kill_tree()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
