"""The operator in a cluster of the tests: its Deployment from the built image, or a process of this machine that may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from kube_world import Object, World, until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "operator"
NAMESPACE = "fp8rl-system"
READY_SECONDS = 90.0
LEASE_SECONDS = 5


def deploy(world: World) -> None:
    """kubectl apply of deploy/operator; returns when the Deployment is available.

    FP8RL_E2E_OPERATOR=outside: somebody runs one beside the cluster, nothing is deployed.
    """
    if os.environ.get("FP8RL_E2E_OPERATOR") == "outside":
        return
    world.kubectl("apply", "-f", str(DEPLOY))
    world.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/fp8rl-operator")
    world.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/fp8rl-operator", f"--timeout={READY_SECONDS:.0f}s")


def pods(world: World) -> list[Object]:
    """The operator's pods."""
    return world.pods(NAMESPACE, "app.kubernetes.io/name=fp8rl-operator")


def scale(world: World, replicas: int) -> None:
    """So many operators; waits until it is so."""
    world.kubectl("-n", NAMESPACE, "scale", "deployment/fp8rl-operator", f"--replicas={replicas}")
    if replicas:
        world.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/fp8rl-operator", "--timeout=90s")
    else:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io/name=fp8rl-operator"
        until(lambda: not world.raw(path)["items"], READY_SECONDS, "no operator runs, nor ends")


class OperatorProcess:
    """`python -m fp8rl_operator` on this machine, with the administrator's rights; its log in `log`.

    `dies_after`: it kills itself right before its write of that number (1 is the first), to be seen between any two writes.
    """

    def __init__(self, world: World, log: Path, *, dies_after: int | None = None, namespaces: str = "") -> None:
        settings = {
            "KUBECONFIG": str(world.kubeconfig),
            "FP8RL_LEASE_NAMESPACE": "default",
            "FP8RL_LEASE_NAME": "operator-process",
            "FP8RL_LEASE_SECONDS": str(LEASE_SECONDS),
            "FP8RL_METRICS_PORT": "0",
            "FP8RL_HEALTH_PORT": "0",
            "FP8RL_NAMESPACES": namespaces,
        }
        self.log = log
        words = [sys.executable, "-m", "fp8rl_operator"]
        if dies_after is not None:
            words = [sys.executable, str(Path(__file__).with_name("mortal_operator.py"))]
            settings["DIES_AFTER"] = str(dies_after)
        own = {key: value for key, value in os.environ.items() if not key.startswith("FP8RL_")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(words, env=own | settings, stdout=file, stderr=file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
