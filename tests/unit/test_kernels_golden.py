"""Bytes and digests that the kernels made on a GPU (tests/gpu/golden_casts.py) against the reference on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.digest import to_hex
from fp8rl_workers.weights.kernels import CastItem, cast_plan
from fp8rl_workers.weights.kernels.plans import part_shapes

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))


def cast(case: dict[str, Any], source: np.ndarray) -> tuple[list[bytes], list[str]]:
    """Bytes of the outputs and their digests, by plain torch."""
    shape = tuple(case["shape"])
    weight = torch.from_numpy(source.copy()).view(getattr(torch, case["dtype"])).view(shape)
    if case["wire"] == "fp32":
        outputs = (torch.empty(shape),)
    else:
        outputs = tuple(torch.empty(size, dtype=dtype) for size, dtype in part_shapes(shape, case["wire"]))
    wire = "bf16" if case["wire"] == "fp32" else case["wire"]
    plan = cast_plan([CastItem(tuple(case["names"]), weight, wire, outputs)], case["form"])
    plan.run(Rounding(version=5, seed=11) if case["stochastic"] else None)
    found = [out.reshape(-1).view(torch.uint8).numpy().tobytes() for out in outputs]
    return found, [to_hex(value) for value in plan.finish()]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_reference_gives_the_bytes_and_digests_that_a_gpu_gave(file):
    arrays = np.load(file)
    cases = json.loads(arrays["cases"].tobytes())
    assert len(cases) > 30
    wrong = []
    for i, case in enumerate(cases):
        outputs, digests = cast(case, arrays[case["names"][0]])
        if digests != case["digests"] or outputs != [arrays[f"{i}.{j}"].tobytes() for j in range(len(outputs))]:
            wrong.append((i, case["names"], case["form"], case["stochastic"]))
    assert wrong == []
