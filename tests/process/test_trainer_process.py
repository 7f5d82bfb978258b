"""`python -m fp8rl_workers.trainer` as the local cluster starts it: boot, kill, resume, end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_kit import make_config, make_folder, make_samples

from fp8rl_workers.config import TRAINER_PORT
from fp8rl_workers.protocol import StepRequest, StepResult, TrainerState


def make_address(number: int) -> str:
    return f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}.{200 + number}"


@contextlib.contextmanager
def process(folder: Path, ip: str, attempt: int = 0) -> Iterator[subprocess.Popen[str]]:
    environ = os.environ | {
        "FP8RL_CONFIG": str(folder / "config.json"),
        "FP8RL_TOKEN_FILE": str(folder / "token"),
        "FP8RL_POD_NAME": "trainer-0",
        "FP8RL_POD_UID": "uid-0",
        "FP8RL_POD_IP": ip,
        "FP8RL_ATTEMPT": str(attempt),
        "FP8RL_STATE_DIR": str(folder / "state"),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "fp8rl_workers.trainer"], env=environ, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def call(ip: str, path: str, body: str | None = None) -> str:
    request = urllib.request.Request(
        f"http://{ip}:{TRAINER_PORT}{path}",
        data=None if body is None else body.encode(),
        headers={"Authorization": "Bearer secret", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def wait_for(ip: str, phase: str, seconds: float = 60.0) -> TrainerState:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            state = TrainerState.model_validate_json(call(ip, "/v1/state"))
            if state.phase == phase:
                return state
        assert time.monotonic() < deadline, "the trainer did not get there in time"
        time.sleep(0.1)


def step(ip: str, number: int, attempt: int = 0) -> StepResult:
    request = StepRequest(
        job_uid="job-uid",
        attempt=attempt,
        step=number,
        samples=make_samples(8, number),
        orchestrator={"cursor": number},
    )
    return StepResult.model_validate_json(call(ip, "/v1/steps", request.model_dump_json()))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    config = make_config(make_folder(tmp_path / "model"), checkpoint={"every_steps": 1})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


def test_a_killed_trainer_resumes_from_its_last_step_and_ends_within_seconds_on_sigterm(job: Path) -> None:
    ip = make_address(1)
    with process(job, ip) as first:
        wait_for(ip, "idle")
        losses = [step(ip, number).metrics["loss"] for number in (1, 2)]
        first.send_signal(signal.SIGKILL)
        first.wait()
    with process(job, ip, attempt=1) as second:
        state = wait_for(ip, "idle")
        assert (state.step, state.resumed_step, state.orchestrator) == (2, 2, {"cursor": 2})
        assert state.last_result is not None
        assert state.last_result.metrics["loss"] == losses[1]
        step(ip, 3, attempt=1)
        start = time.monotonic()
        second.send_signal(signal.SIGTERM)
        assert second.wait(10) == 0
        assert time.monotonic() - start < 5


def test_a_port_in_use_is_one_line_and_exit_code_65(job: Path) -> None:
    ip = make_address(2)
    with socket.socket() as holder:
        holder.bind((ip, TRAINER_PORT))
        holder.listen()
        with process(job, ip) as child:
            _, errors = child.communicate(timeout=60)
    assert child.returncode == 65
    assert errors.splitlines()[-1] == (
        f"InvalidInput: cannot listen on {ip}:{TRAINER_PORT}: Address already in use; "
        "end the process that holds it or use another address"
    )


def test_a_config_that_does_not_parse_is_one_line_and_exit_code_65(job: Path) -> None:
    config = json.loads((job / "config.json").read_text())
    (job / "config.json").write_text(json.dumps(config | {"stepps": 3}))
    with process(job, make_address(3)) as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 65
    assert errors.splitlines()[-1].startswith(
        f"InvalidInput: {job / 'config.json'}: stepps: Extra inputs are not permitted"
    )
