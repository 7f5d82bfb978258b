"""A job whose workers are toys, and what tests ask of a run of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml
from builders import make_body

from fp8rl_operator.local import shim

TOY = Path(__file__).with_name("toy_worker.py")
DEADLINE = 30.0


def toy_body(folder: Path, spec: dict[str, Any] | None = None, name: str = "toy") -> dict[str, Any]:
    """A manifest with toys as commands; `folder` is their TOY_DIR."""
    folder.mkdir(parents=True, exist_ok=True)
    body = make_body(spec, name=name)
    del body["metadata"]["uid"], body["metadata"]["generation"]
    for role in ("trainer", "inference", "orchestrator"):
        probes = {"startupProbe": {"periodSeconds": 1}, "readinessProbe": {"periodSeconds": 1}}
        env = [{"name": "TOY_DIR", "value": str(folder)}]
        main = {"name": "main", "command": ["python", str(TOY), role], "env": env, **probes}
        init = {"name": "prepare-model", "command": ["python", "-c", "pass"]}
        template = {"spec": {"containers": [main], "initContainers": [init]}}
        body["spec"].setdefault(role, {})["template"] = template
    return body


def write_toy(folder: Path, spec: dict[str, Any] | None = None, name: str = "toy") -> Path:
    """The manifest as a file."""
    path = folder.with_name(f"{folder.name}.yaml")
    path.write_text(yaml.safe_dump(toy_body(folder, spec, name)))
    return path


class ToyRun:
    """One `fp8rl run` of toys as a process."""

    def __init__(self, manifest: Path, out: Path, *more: str) -> None:
        self.out = out
        words = [sys.executable, "-m", "fp8rl_operator.cli", "run", str(manifest), "--out", str(out), *more]
        environ = os.environ | {"FP8RL_TEST_RUN": str(out)}
        self.log = out.with_name(f"{out.name}.log").open("a+")
        self.process = subprocess.Popen(words, env=environ, stdout=self.log, stderr=self.log, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
        self.log.close()

    def status(self) -> dict[str, Any]:
        """status.yaml's status, empty before it exists."""
        path = self.out / "status.yaml"
        return (yaml.safe_load(path.read_text()).get("status") or {}) if path.exists() else {}

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = next((item for item in self.status().get("conditions", []) if item["type"] == kind), None)
        return ("", "") if found is None else (found["status"], found["reason"])

    def pods(self) -> list[dict[str, Any]]:
        """pods.json."""
        path = self.out / ".local" / "pods.json"
        return json.loads(path.read_text()) if path.exists() else []

    def pod(self, role: str) -> dict[str, Any]:
        """The first pod of a role."""
        return next(row for row in self.pods() if f"-{role}-" in row["name"])

    def until(self, true: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
        """Wait for something and return it; the run's log stands in the failure."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := true():
                return value
            time.sleep(0.05 if seconds <= DEADLINE else 1.0)
        raise AssertionError(f"not within {seconds:g} s: {what}\n{self.text()}\n{yaml.safe_dump(self.status())}")

    def until_running(self) -> None:
        """Wait until the job is Ready and all pods are."""
        self.until(lambda: self.condition("Ready") == ("True", "Running"), "the job runs")
        self.until(lambda: len(self.pods()) == 4 and all(row["ready"] for row in self.pods()), "all pods are ready")

    def text(self) -> str:
        """What the run printed."""
        return Path(self.log.name).read_text()

    def processes(self) -> list[int]:
        """Every process of this run, the run itself and zombies left out."""
        return [pid for pid in marked(str(self.out)) if pid != self.process.pid]


def marked(mark: str) -> list[int]:
    """Processes that carry FP8RL_TEST_RUN=mark in their environment (the FP8RL_ prefix is not inherited, so TOY_DIR too)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(
                word.startswith("XDG_CACHE_HOME=" + mark + "/") or word == f"FP8RL_TEST_RUN={mark}" for word in environ
            ):
                found.append(int(entry.name))
    return found


def descendants(pid: int) -> dict[int, str]:
    """Process id to start time of everything below a process."""
    return {below: start_of(below) for below in shim.descendants(pid)}


def start_of(pid: int) -> str:
    """Start time of a process, empty if it is gone or a zombie: tells it from a later one with the same id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def names_of(tree: dict[int, str]) -> list[str]:
    """Command lines of those processes of a tree that still live."""
    alive = [pid for pid, start in tree.items() if start and start_of(pid) == start]
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in alive]
