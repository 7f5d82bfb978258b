"""The operator as a real process against a real API server, for tests."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from builders import make_body, make_job
from control_plane_kit import ControlPlane

from fp8rl_operator import names
from fp8rl_operator.manifests import build_objects
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan

CHILDREN = len(build_objects(make_job(), compute_plan(make_job(), Observed(), 0.0), "token", None))
LEASE_SECONDS = 10
WRITES = ("apply", "create", "status", "delete")
KINDS = "secrets,serviceaccounts,configmaps,services,networkpolicies,poddisruptionbudgets,statefulsets,deployments"
SELECTOR = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(check: Callable[[], Any], seconds: float = 60, every: float = 0.1) -> Any:
    """The first true value of `check`; its last one fails the test. An AssertionError in it counts as false."""
    end = time.monotonic() + seconds
    while True:
        try:
            if found := check():
                return found
            said: object = found
        except AssertionError as error:
            said = error
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {said!r}")
        time.sleep(every)


class OperatorProcess:
    """`python -m fp8rl_operator`. Its log is in `log`; what it wrote to the API server is counted by its own metrics."""

    def __init__(self, kubeconfig: Path, log: Path, **settings: object) -> None:
        self.log = log
        self.metrics_port, self.health_port = free_port(), free_port()
        own = {
            "lease_namespace": "default",
            "lease_seconds": LEASE_SECONDS,
            "metrics_address": "127.0.0.1",
            "health_address": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "health_port": self.health_port,
            **settings,
        }
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FP8RL_")}
        environ |= {f"FP8RL_{key.upper()}": str(value) for key, value in own.items()}
        environ["KUBECONFIG"] = str(kubeconfig)
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fp8rl_operator"], env=environ, stdout=stream, stderr=stream
            )

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of /metrics, /healthz or /readyz; status 0 for no answer."""
        port = self.metrics_port if path == "/metrics" else self.health_port
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def samples(self, start: str) -> dict[str, float]:
        """Samples of /metrics whose names begin so."""
        lines = [line for line in self.page("/metrics")[1].splitlines() if line.startswith(start)]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def leads(self) -> bool:
        """Whether it leads with all lists in."""
        code, text = self.page("/readyz")
        return code == 200 and text.startswith("leader")

    def wait_leading(self, seconds: float = 60) -> OperatorProcess:
        eventually(lambda: self.leads() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def writes(self) -> float:
        """Requests that could change something; the Lease is not among them."""
        found = self.samples("fp8rl_operator_api_requests_total")
        return sum(value for name, value in found.items() if any(f'verb="{verb}"' in name for verb in WRITES))

    def at_rest(self, seconds: float = 3, patience: float = 60) -> float:
        """Wait until nothing was written for so long; the number of writes so far."""
        before, since = -1.0, time.monotonic()
        end = since + patience
        while time.monotonic() - since < seconds:
            assert time.monotonic() < end, "writes and writes"
            if (count := self.writes()) != before:
                before, since = count, time.monotonic()
            time.sleep(0.2)
        return before

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 15) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def operators(kubeconfig: Path, folder: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Makes processes with settings of their own; all are killed at the end, and the last lines of their logs are printed."""
    made: list[OperatorProcess] = []

    def start(kubeconfig: Path = kubeconfig, **settings: object) -> OperatorProcess:
        made.append(OperatorProcess(kubeconfig, folder / f"operator-{len(made)}.log", **settings))
        return made[-1]

    try:
        yield start
    finally:
        for process in made:
            process.kill()
            print(f"--- {process.log.name}\n{process.log.read_text()[-6000:]}")


def condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of a job; empty if there is none."""
    found = job.get("status", {}).get("conditions", [])
    return next((item for item in found if item["type"] == kind), {})


def manifest(name: str = "job", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    """A manifest without what the API server gives."""
    body = make_body(spec)
    return {**body, "metadata": {"name": name}}


def children(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """`Kind/name` to resourceVersion of all children of all jobs of a namespace."""
    items = json.loads(plane.kubectl("get", KINDS, "-n", namespace, "-l", SELECTOR, "-o", "json"))["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in items}


def has_children(plane: ControlPlane, namespace: str, count: int = CHILDREN, seconds: float = 30) -> None:
    def there() -> bool:
        found = sorted(children(plane, namespace))
        assert len(found) == count, found
        return True

    eventually(there, seconds)


def ready_reason(plane: ControlPlane, namespace: str, name: str = "job") -> str:
    return str(condition(plane.get("fp8rljob", name, namespace), "Ready").get("reason"))
