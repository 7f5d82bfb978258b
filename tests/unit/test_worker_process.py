"""What all workers share at their edges: names of epochs, addresses, how a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fp8rl_workers.http import base_url
from fp8rl_workers.orchestrator.dispatch import Dispatcher
from fp8rl_workers.protocol import store_prefix


def test_an_epochs_name_is_a_hash_of_job_and_epoch_keyed_with_the_token() -> None:
    name = store_prefix("token", "job", 7)
    assert name == "fp8rl/b5db1166cac7fa6b69b2d075f5070ddf"
    others = [("token", "job", 8), ("token", "other", 7), ("another", "job", 7)]
    assert len({name, *(store_prefix(*other) for other in others)}) == 4


@pytest.mark.parametrize(
    ("address", "url"), [("10.1.2.3", "http://10.1.2.3:8000"), ("fd00::1", "http://[fd00::1]:8000")]
)
def test_an_ipv6_address_stands_in_brackets(address: str, url: str) -> None:
    assert base_url(address, 8000) == url


def test_a_pod_that_got_another_address_is_called_there() -> None:
    dispatcher = Dispatcher(4)
    old, new = object(), object()
    dispatcher.add("uid", "engine-0", old)  # type: ignore[arg-type]
    dispatcher.replicas["uid"].version = 3
    dispatcher.add("uid", "engine-0", new)  # type: ignore[arg-type]
    assert (dispatcher.replicas["uid"].engine, dispatcher.replicas["uid"].version) == (new, 3)


def attend(code: str) -> subprocess.Popen[str]:
    """A command below a container's first process; it has printed a line."""
    words = [sys.executable, "-m", "fp8rl_workers.process", "-c", code]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


def test_the_first_process_hands_sigterm_on_and_ends_as_its_child_does() -> None:
    assert attend("print('up', flush=True); raise SystemExit(7)").wait(30) == 7
    child = attend("import time; print('up', flush=True); time.sleep(60)")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM


def test_a_child_that_does_not_end_is_killed_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    code = f"from fp8rl_workers import process; process.GRACE_SECONDS = 1; raise SystemExit(process.attend(['-c', {stubborn!r}]))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    start = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGKILL
    assert 0.5 < time.monotonic() - start < 20


def test_what_the_child_leaves_behind_is_reaped_and_does_not_end_its_parent() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import os; os.fork() or os._exit(0)'])\n"
        "print('up', flush=True); time.sleep(0.5); raise SystemExit(3)"
    )
    assert attend(code).wait(30) == 3
    assert os.getpid() != 1
