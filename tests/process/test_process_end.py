"""Every role as the first process of a container: the kernel drops a SIGTERM that such a process has not asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_kit import Engine, Load, resolved_for
from orchestrator_peers import Cluster
from test_trainer_process import call, make_address, wait_for
from trainer_kit import make_config, make_folder, make_samples

from fp8rl_workers.process import GRACE_SECONDS
from fp8rl_workers.protocol import StepRequest

SECONDS = 10.0  # of the 30 that a pod has


def can_unshare() -> bool:
    """Whether this machine lets us make process namespaces."""
    done = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs the right to make a process namespace")


@contextlib.contextmanager
def first_process(*words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of this Python as process 1 of a namespace of its own, which ends with it."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, *words]
    child = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def pid_of(child: subprocess.Popen[bytes]) -> int:
    """Process 1 as it is seen from here."""
    return int(until(lambda: Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[:1])[0])


def catches_sigterm(pid: int) -> bool:
    """Whether the process has asked for SIGTERM; until then the kernel keeps it from a first process."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def until(condition: Callable[[], list[str]], seconds: float = 60.0) -> list[str]:
    """What a condition is met with."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def seconds_to_end(child: subprocess.Popen[bytes], *, killed: bool = False) -> float:
    """From SIGTERM to the end of process 1; its exit code is 0 or that of SIGTERM. `killed`: it may have had to kill vLLM (137)."""
    start = time.monotonic()
    os.kill(pid_of(child), signal.SIGTERM)
    assert child.wait(60) in ((0, 143, 137) if killed else (0, 143))
    return time.monotonic() - start


@pytest.fixture
def trainer(tmp_path: Path) -> dict[str, str]:
    config = make_config(make_folder(tmp_path / "model"), checkpoint={"every_steps": 1})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "token").write_text("secret\n")
    return variables(tmp_path, make_address(9))


def variables(folder: Path, address: str) -> dict[str, str]:
    return {
        "FP8RL_CONFIG": str(folder / "config.json"),
        "FP8RL_TOKEN_FILE": str(folder / "token"),
        "FP8RL_POD_NAME": "pod-0",
        "FP8RL_POD_UID": "uid-0",
        "FP8RL_POD_IP": address,
        "FP8RL_STATE_DIR": str(folder / "state"),
    }


def test_a_trainer_that_imports_or_computes_ends_within_seconds(trainer: dict[str, str]) -> None:
    with first_process("-m", "fp8rl_workers.trainer", **trainer) as child:
        until(lambda: ["caught"] if catches_sigterm(pid_of(child)) else [])
        assert seconds_to_end(child) < SECONDS
    with first_process("-m", "fp8rl_workers.trainer", **trainer) as child:
        wait_for(trainer["FP8RL_POD_IP"], "idle")
        request = StepRequest(job_uid="job-uid", attempt=0, step=1, samples=make_samples(2000, 1))
        post = "import sys, test_trainer_process as t; t.call(sys.argv[1], '/v1/steps', sys.stdin.read())"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        caller = subprocess.Popen(
            [sys.executable, "-c", post, trainer["FP8RL_POD_IP"]],
            env=environ,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert caller.stdin is not None
        caller.stdin.write(request.model_dump_json().encode())
        caller.stdin.close()
        wait_for(trainer["FP8RL_POD_IP"], "training")
        assert '"training"' in call(trainer["FP8RL_POD_IP"], "/v1/state")
        assert seconds_to_end(child) < SECONDS
        caller.wait()


async def test_an_orchestrator_ends_within_seconds_in_the_midst_of_rollouts(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=1000) as cluster:
        cluster.kill()
        assert cluster.process is not None
        await cluster.process.wait()
        for engine in cluster.engines:
            engine.seconds = 8.0
        with first_process("-m", "fp8rl_workers.orchestrator", **variables(tmp_path, cluster.host)) as child:
            before = sum(len(engine.requests) for engine in cluster.engines)
            await cluster.until(lambda: sum(len(engine.requests) for engine in cluster.engines) > before, "requests")
            assert seconds_to_end(child) < SECONDS


@pytest.mark.parametrize("module", ["fp8rl_workers.models.prepare"])
def test_an_init_container_ends_within_seconds(tmp_path: Path, module: str) -> None:
    source = '{"source": {"builtin": {"name": "reverse-text-tiny"}}}'
    place = {"FP8RL_MODEL_SOURCE": source, "FP8RL_MODEL_PATH": str(tmp_path / "model")}
    with first_process("-m", module, **place) as child:
        until(lambda: [path.name for path in tmp_path.iterdir()])
        assert seconds_to_end(child) < SECONDS


@pytest.mark.vllm
def test_an_engine_ends_within_seconds_while_it_waits_boots_and_generates(tmp_path: Path) -> None:
    engine = Engine(tmp_path, resolved_for("blockwise")[0], address=make_address(10), first=True)
    engine.start()
    engine.wait(lambda: engine.call("GET", "/fp8rl/v1/state")[0] == 200, 60.0)
    assert engine.process is not None
    assert seconds_to_end(engine.process) < SECONDS
    engine.start()
    engine.wait(lambda: engine.call("GET", "/fp8rl/v1/state")[0] == 200, 60.0)
    engine.call("PUT", "/fp8rl/v1/resolved", engine.resolved.model_dump())
    time.sleep(3.0)
    assert engine.process is not None
    assert engine.process.poll() is None
    assert seconds_to_end(engine.process) < SECONDS
    engine.start().boot()
    with Load(engine, 2, [1, 2, 3], max_tokens=200) as load:
        engine.wait(lambda: load.answers, 60.0)
        assert engine.process is not None
        assert seconds_to_end(engine.process, killed=True) < GRACE_SECONDS + SECONDS
