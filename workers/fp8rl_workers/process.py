"""How a worker's process ends: within seconds of SIGTERM, whatever it is doing.

The kernel drops a SIGTERM to a container's first process unless that process has said what to do with it. So every entry point
calls `end_on_sigterm` before it imports anything heavy, and vLLM's server, which says so only late in its boot, is the child of
`python -m fp8rl_workers.process COMMAND...`: it hands SIGTERM on, kills what has not ended after GRACE_SECONDS, and reaps
what the server's processes leave behind.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 10
ENDING = (signal.SIGTERM, signal.SIGINT)


def end_on_sigterm() -> None:
    """From here on SIGTERM ends this process at once, until it says something else."""
    signal.signal(signal.SIGTERM, _end)


def leave(code: int) -> NoReturn:
    """End without waiting for threads that compute; what they write, they write to files that are renamed when whole."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command, with a first process above it where this one is a container's.

    `command`: arguments of this Python.
    """
    first = os.getpid() == 1
    words = [sys.executable, *(["-m", __name__] if first else []), *command]
    if first:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # kept until there is a handler again
    os.execve(sys.executable, words, dict(environ))  # noqa: S606 - our own interpreter


def attend(command: Sequence[str]) -> int:
    """Run a command of this Python as a container's first process does; returns its exit code."""
    words = [sys.executable, *command]
    child = os.posix_spawn(sys.executable, words, os.environ, setsigmask=[], setsigdef=ENDING)

    def hand_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)
        signal.alarm(GRACE_SECONDS)

    for number in ENDING:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(attend(sys.argv[1:]))
