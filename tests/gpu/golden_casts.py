"""Golden vectors of the casts: made once on a GPU by the Triton kernels, checked for ever by the CPU tests.

    PYTHONPATH=workers:operator python tests/gpu/golden_casts.py tests/golden/casts.npz

Arrays: the bytes of each source under its name; of case i `i.0` and `i.1`, the bytes of codes and scales; `cases` is JSON: names, wire,
scale format, rounding, shape, dtype, digests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from kernel_cases import cast_cases, item

from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.kernels.triton_plans import TritonCastPlan

ROUNDING = Rounding(version=5, seed=11)
KEPT = ("square", "thin", "zeros", "c", "only", "ragged", "five", "conv", "odd", "master", "bf16")
"""Cases by the end of their name: all kinds, and half a megabyte in all."""


def kept(name: str, shape: tuple[int, ...]) -> bool:
    """The case is small enough for a file that is committed."""
    return (name.rsplit(".", 1)[1] in KEPT and torch.Size(shape).numel() <= 16384) or name == "blockwise.zeros"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write(path: Path) -> int:
    """Cast all cases on the GPU and write them; returns the number of cases."""
    arrays: dict[str, np.ndarray] = {}
    cases = []
    for form in ("pow2", "fp32"):
        for rounding in (None, ROUNDING):
            for names, source, wire in cast_cases("cuda", seed=2):
                rounds = wire in ("blockwise", "mxfp8", "channel")
                if (
                    not kept(names[0], source.shape)
                    or (form == "fp32" and wire != "blockwise")
                    or (rounding and not rounds)
                ):
                    continue
                one = item(names, source, wire)
                plan = TritonCastPlan([one], form)
                plan.run(rounding)
                at = str(len(cases))
                arrays[names[0]] = bits(source)
                arrays |= {f"{at}.{i}": bits(out) for i, out in enumerate(one.outputs)}
                cases.append(
                    {
                        "names": names,
                        "wire": wire,
                        "form": form,
                        "stochastic": rounding is not None,
                        "shape": list(source.shape),
                        "dtype": str(source.dtype).removeprefix("torch."),
                        "digests": [f"{value:016x}" for value in plan.finish()],
                    }
                )
    arrays["cases"] = np.frombuffer(json.dumps(cases).encode(), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return len(cases)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "cases")
