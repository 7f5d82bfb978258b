"""The images that a release ships, built by their Dockerfiles and run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testcluster import build_images

CLUSTER = Path(__file__).resolve().parents[1] / "cluster"
ENGINE = """
import importlib.metadata, json, os, vllm
plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps({"user": os.getuid(), "vllm": bool(vllm.__version__), "plugins": [p.name for p in plugins if p.name == "fp8rl" and p.load()]}))
"""
OPERATOR = """
import json, os, sys, fp8rl_operator.__main__
heavy = {"torch", "vllm", "transformers", "numpy"} & set(sys.modules)
print(json.dumps({"user": os.getuid(), "heavy": sorted(heavy)}))
"""


def imports(module: str, sought: str) -> str:
    """A program that imports a module and says whether another one came with it."""
    return f"import json, os, sys, {module}; print(json.dumps({{'user': os.getuid(), 'there': {sought!r} in sys.modules}}))"


def built(*role: str) -> str:
    """Name of a shipped image. Built in the network of this process's parent: its own may be a cluster's, which leads nowhere."""
    command = ["nsenter", f"--target={os.getppid()}", "--net", sys.executable, str(CLUSTER), "image", *role]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def told(image: str, program: str) -> dict:
    """What a Python program prints in a container of an image, as its own user."""
    container = build_images.buildah("from", image)
    try:
        values = {"HOME": "/tmp", "USER": "fp8rl"}  # what the operator gives to every container
        flags = [flag for name, value in values.items() for flag in ("--env", f"{name}={value}")]
        return json.loads(
            build_images.buildah("run", *flags, container, "--", "python", "-c", program).splitlines()[-1]
        )
    finally:
        build_images.buildah("rm", container)


def test_the_operator_image_imports_the_operator_and_nothing_heavy() -> None:
    assert told(built("operator"), OPERATOR) == {"user": 10001, "heavy": []}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_inference_image_for_cpus_has_vllm_and_the_plugin_of_fp8rl() -> None:
    image = built("inference", "--requirements", "cpu")
    assert told(image, ENGINE) == {"user": 10001, "vllm": True, "plugins": ["fp8rl"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_trainer_image_for_cpus_imports_the_trainer() -> None:
    image = built("trainer", "--requirements", "cpu")
    assert told(image, imports("fp8rl_workers.trainer.main", "torch")) == {"user": 10001, "there": True}


def test_the_orchestrator_image_imports_the_orchestrator_and_has_no_torch() -> None:
    image = built("orchestrator")
    assert told(image, imports("fp8rl_workers.orchestrator.main", "torch")) == {"user": 10001, "there": False}
