"""Host memory that the optimizer's state of one trainer pod takes, by arithmetic (rule 20)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from fp8rl_operator.spec.pods import PodTemplate
from fp8rl_operator.spec.quantities import GIB, quantity, words
from fp8rl_operator.spec.trainer import Trainer

MAIN = "main"
BYTES_A_PARAMETER = {"none": 0, "optimizer": 8, "full": 16}
PARTS = {"optimizer": "moments 8", "full": "masters 4, moments 8, gradients 4"}
PROCESS_BYTES = 8 * GIB
"""Of one rank beside the state: Python, CUDA and the buffers of a checkpoint."""


def state_bytes(trainer: Trainer, parameters: int) -> int:
    """Bytes of optimizer state in one pod's host memory: each rank holds that of its own share of the parameters."""
    return -(-BYTES_A_PARAMETER[trainer.offloaded] * parameters // trainer.replicas)


def arithmetic(trainer: Trainer, parameters: int) -> str:
    """`16 bytes (masters 4, moments 8, gradients 4) x 8030261248 parameters / 1 replica = 120 GiB a pod`."""
    kind = trainer.offloaded
    pods = f"{trainer.replicas} replica{'s' if trainer.replicas > 1 else ''}"
    total = words(state_bytes(trainer, parameters))
    return f"{BYTES_A_PARAMETER[kind]} bytes ({PARTS[kind]}) x {parameters} parameters / {pods} = {total} a pod"


def main_resources(template: PodTemplate) -> tuple[int, dict[str, Any]]:
    """(index of container `main` in a template, its resources); (0, {}) where it has none."""
    containers = template.spec.get("containers")
    for index, container in enumerate(containers if isinstance(containers, list) else []):
        if isinstance(container, dict) and container.get("name") == MAIN:
            resources = container.get("resources")
            return index, resources if isinstance(resources, dict) else {}
    return 0, {}


def asked(resources: dict[str, Any], name: str, *kinds: str) -> tuple[str, Fraction] | None:
    """(field, amount) of what a container asks for, None where it says nothing. `kinds`: where to look, requests before limits."""
    for kind in kinds or ("requests", "limits"):
        amounts = resources.get(kind)
        found = quantity(amounts.get(name)) if isinstance(amounts, dict) else None
        if found is not None:
            return f"{kind}.{name}", found
    return None
