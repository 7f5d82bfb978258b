"""Runs in a process of its own with TRITON_INTERPRET=1, which Triton reads when kernels are defined; prints JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from kernel_cases import SMALL, SMALL_MASKED, cast_cases, copy_cases, digest_cases, item

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.kernels.plain import TorchCastPlan, TorchDigestPlan
from fp8rl_workers.weights.kernels.triton_plans import TritonCastPlan, TritonCopyPlan, TritonDigestPlan


def casts(seed: int) -> dict[str, bool]:
    """Each case of each scale format and rounding: equal bytes and digests."""
    same = {}
    for form, rounding in (("pow2", None), ("fp32", Rounding(3, seed=7))):
        cases = cast_cases(seed=seed)
        fast, slow = ([item(*case) for case in cases] for _ in range(2))
        one, two = TritonCastPlan(fast, form, SMALL, SMALL_MASKED), TorchCastPlan(slow, form)
        one.run(rounding)
        two.run(rounding)
        same[f"{form} digests"] = one.finish() == two.finish()
        for a, b in zip(fast, slow, strict=True):
            pairs = zip(a.outputs, b.outputs, strict=True)
            same[f"{form} {a.names[0]}"] = all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)
    return same


def faults() -> str:
    """The error of a plan with two bad tensors, one of them in a stack."""
    bad = torch.zeros(2, 4, 32, dtype=torch.bfloat16)
    bad[1, 2, 3] = float("nan")
    lost = torch.ones(7)
    lost[5] = float("-inf")
    sources = [(("a", "b"), bad, "blockwise"), (("c",), lost, "bf16"), (("d",), torch.ones(4, 32), "mxfp8")]
    plan = TritonCastPlan([item(*source) for source in sources], "pow2", SMALL, SMALL_MASKED)
    plan.run()
    try:
        plan.finish()
    except NonFiniteError as error:
        return str(error)
    return ""


def moves() -> dict[str, bool]:
    """Digests of pieces and copies."""
    pieces = digest_cases()
    one, two = TritonDigestPlan(pieces, SMALL["digest"]), TorchDigestPlan(pieces)
    one.run()
    two.run()
    same = {f"digest {i}": a == b for i, (a, b) in enumerate(zip(one.finish(), two.finish(), strict=True))}
    pairs = copy_cases()
    TritonCopyPlan(pairs, SMALL["copy"]).run()
    return same | {f"copy {i}": bool(torch.equal(a, b)) for i, (a, b) in enumerate(pairs)}


if __name__ == "__main__":
    print(json.dumps({"casts": casts(seed=1), "faults": faults(), "moves": moves()}))
