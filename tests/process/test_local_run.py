"""`fp8rl run` with toy workers: real processes, real probes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys import ToyRun, write_toy

FP8RL = [sys.executable, "-m", "fp8rl_operator.cli"]


def test_a_run_goes_from_start_to_complete_and_leaves_no_process(tmp_path: Path) -> None:
    toys = tmp_path / "toys"
    with ToyRun(write_toy(toys), tmp_path / "run") as run:
        run.until_running()
        assert len({row["address"] for row in run.pods()}) == 4
        assert len(run.processes()) > 4
        assert peak_mb(run.process.pid) < 150
        (toys / "done").touch()
        assert run.process.wait(30) == 0
        assert run.condition("Complete") == ("True", "StepsDone")
        assert run.processes() == []
        assert "trainer attempt 0 on 127." in (run.out / "logs" / "toy-trainer-0.log").read_text()
        assert (run.out / ".local" / "token").stat().st_mode & 0o777 == 0o600
        assert run.text().rstrip().endswith("Complete: StepsDone: 4 steps done")


def peak_mb(pid: int) -> int:
    """Largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM:"))


def test_sigkill_of_the_run_leaves_no_process_grandchildren_included(tmp_path: Path) -> None:
    with ToyRun(write_toy(tmp_path / "toys"), tmp_path / "run") as run:
        run.until_running()
        assert len(run.processes()) == 4 * 2 + 2  # a shim and a worker for each pod, and the engines' grandchildren
        run.process.kill()
        run.process.wait()
        run.until(lambda: run.processes() == [], "no process is left")


def test_sigkill_of_a_shim_leaves_nothing_of_its_container(tmp_path: Path) -> None:
    with ToyRun(write_toy(tmp_path / "toys"), tmp_path / "run") as run:
        run.until_running()
        worker = run.pod("inference")["pids"]["main"]
        shim = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(shim, signal.SIGKILL)
        run.until(lambda: run.pod("inference")["restarts"] == 1 and run.pod("inference")["ready"], "a restart")
        run.until(lambda: len(run.processes()) == 4 * 2 + 2, "nothing is left of the old container")


@pytest.mark.parametrize("stubborn", [False, True])
def test_ctrl_c_ends_every_process_and_leaves_a_run_that_goes_on(tmp_path: Path, stubborn: bool) -> None:
    toys = tmp_path / "toys"
    manifest = write_toy(toys)
    if stubborn:
        (toys / "stubborn").touch()
    with ToyRun(manifest, tmp_path / "run") as run:
        run.until_running()
        token = (run.out / ".local" / "token").read_text()
        begin = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(20) == 130
        assert time.monotonic() - begin < 8.0
        assert run.processes() == []
    with ToyRun(manifest, tmp_path / "run", "--resume") as again:
        again.until(lambda: again.status()["attempt"] == 1 and again.pods(), "the new attempt has begun")
        again.until_running()
        assert (again.out / ".local" / "token").read_text() == token
        assert again.status()["restarts"] == 0


def test_two_runs_of_one_manifest_touch_nothing_of_each_other(tmp_path: Path) -> None:
    manifest = write_toy(tmp_path / "toys")
    with ToyRun(manifest, tmp_path / "one") as one, ToyRun(manifest, tmp_path / "two") as two:
        one.until_running()
        two.until_running()
        assert not {row["address"] for row in one.pods()} & {row["address"] for row in two.pods()}
        one.process.kill()
        one.process.wait()
        one.until(lambda: one.processes() == [], "no process of the killed run is left")
        before = {row["name"]: row["pids"] for row in two.pods()}
        time.sleep(1.5)
        assert {row["name"]: row["pids"] for row in two.pods()} == before
        assert two.condition("Ready") == ("True", "Running")


def test_a_run_folder_is_refused_without_resume_and_while_it_is_run(tmp_path: Path) -> None:
    manifest = write_toy(tmp_path / "toys")
    with ToyRun(manifest, tmp_path / "run") as run:
        run.until_running()
        for more, words in (
            ([], "exists and is not empty; --resume goes on with it, --fresh moves it aside"),
            (["--fresh"], "is being run by process"),
            (["--resume"], "is being run by process"),
        ):
            command = [*FP8RL, "run", str(manifest), "--out", str(run.out), *more]
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            assert second.returncode == 1
            assert words in second.stderr
        assert run.condition("Ready") == ("True", "Running")
    with ToyRun(manifest, tmp_path / "run", "--fresh") as fresh:
        fresh.until_running()
        assert f"run folder {fresh.out} is now {fresh.out}.1\n" in fresh.text()
        assert fresh.status()["attempt"] == 0
        assert (tmp_path / "run.1" / "status.yaml").is_file()


def test_an_unready_pod_shows_and_readiness_comes_back(tmp_path: Path) -> None:
    toys = tmp_path / "toys"
    with ToyRun(write_toy(toys), tmp_path / "run") as run:
        run.until_running()
        (toys / "unready").touch()
        run.until(lambda: not any(row["ready"] for row in run.pods()), "no pod is ready")
        (toys / "unready").unlink()
        run.until_running()
        assert all(row["restarts"] == 0 for row in run.pods())


def test_a_worker_that_cannot_start_ends_the_run_with_its_words(tmp_path: Path) -> None:
    toys = tmp_path / "toys"
    manifest = write_toy(toys, {"failurePolicy": {"maxRestarts": 0}})
    (toys / "orchestrator.crash").touch()
    with ToyRun(manifest, tmp_path / "run") as run:
        assert run.process.wait(30) == 1
        assert run.condition("Failed") == ("True", "RestartsExhausted")
        assert "the toy was told to crash" in run.text()
        assert run.processes() == []
