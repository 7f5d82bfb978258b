"""Kernels of weights/kernels on a GPU: bit-equality with the reference first, then times over launch parameters.

    PYTHONPATH=workers:operator python tests/gpu/tune_kernels.py [--layers 36]

Needs torch, triton and numpy only. Prints a table, writes kernels.json and casts.npz (golden vectors) into $OUT (or
the working directory). The peer is torch's
device-to-device copy of as many bytes as the wire of dense_8b has; `of_copy` is bytes read plus written per second over that
copy's. Takes about 3 minutes, most of it compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from golden_casts import write  # noqa: E402
from kernel_cases import SMALL, SMALL_MASKED, cast_cases, copy_cases, digest_cases, item  # noqa: E402

from fp8rl_workers.weights.cast_rounding import Rounding  # noqa: E402
from fp8rl_workers.weights.digest import digest  # noqa: E402
from fp8rl_workers.weights.kernels.plain import TorchCastPlan, TorchDigestPlan  # noqa: E402
from fp8rl_workers.weights.kernels.plans import CastItem, whole  # noqa: E402
from fp8rl_workers.weights.kernels.tables import Tile  # noqa: E402
from fp8rl_workers.weights.kernels.triton_plans import MASKED, TILES, TritonCastPlan, TritonCopyPlan, TritonDigestPlan  # noqa: E402

ROUNDS = 9
HIDDEN, FEED, KEYS, VOCABULARY = 4096, 12288, 1024, 151936
LINEARS = {"q": (4096, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, 4096)} | {
    "gate": (FEED, HIDDEN),
    "up": (FEED, HIDDEN),
    "down": (HIDDEN, FEED),
}
RESULTS = 0
found: list[dict[str, Any]] = []


def equality() -> int:
    """Every format on the GPU against the reference on the GPU and on the CPU; returns the number of differences."""
    wrong = 0
    for form in ("pow2", "fp32"):
        for rounding in (None, Rounding(3, seed=7)):
            for tiles, masked in ((SMALL, SMALL_MASKED), (TILES, MASKED)):
                cases = cast_cases("cuda")
                fast = [item(*case) for case in cases]
                plan = TritonCastPlan(fast, form, tiles, masked)
                plan.run(rounding)
                digests = plan.finish()
                for device in ("cuda", "cpu"):
                    slow = [item(names, source.to(device), wire) for names, source, wire in cases]
                    reference = TorchCastPlan(slow, form)
                    reference.run(rounding)
                    wrong += compare(f"{form} {rounding} {device}", fast, slow)
                    wrong += tell(f"digests {form} {rounding} {device}", digests == reference.finish())
    return wrong + equality_of_moves()


def compare(what: str, fast: list[CastItem], slow: list[CastItem]) -> int:
    wrong = 0
    for one, two in zip(fast, slow, strict=True):
        for i, (a, b) in enumerate(zip(one.outputs, two.outputs, strict=True)):
            differ = int((a.cpu().view(torch.uint8) != b.cpu().view(torch.uint8)).sum())
            wrong += tell(f"{what} {one.names[0]} output {i}: {differ} bytes of {a.nbytes}", differ == 0)
    return wrong


def equality_of_moves() -> int:
    wrong = 0
    for tiles in (SMALL, TILES):
        pieces = digest_cases("cuda")
        plan, reference = TritonDigestPlan(pieces, tiles["digest"]), TorchDigestPlan(pieces)
        plan.run()
        reference.run()
        pairs = zip(plan.finish(), reference.finish(), strict=True)
        wrong += sum(tell(f"digest of pieces {i}", a == b) for i, (a, b) in enumerate(pairs))
        copies = copy_cases("cuda")
        TritonCopyPlan(copies, tiles["copy"]).run()
        wrong += sum(tell(f"copy {i}", bool(torch.equal(a, b))) for i, (a, b) in enumerate(copies))
    return wrong


def tell(what: str, good: bool) -> int:
    if not good:
        print("DIFFERS", what, flush=True)
    return int(not good)


def clock(run: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds on the device, and on the host until `run` returns."""
    run()
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        at = time.perf_counter()
        run()
        host.append(1000 * (time.perf_counter() - at))
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return sorted(device)[ROUNDS // 2], sorted(host)[ROUNDS // 2]


def measure(what: str, moved: int, run: Callable[[], object], peer: float | None = None) -> float:
    """Time one way and note it; returns bytes per second."""
    device, host = clock(run)
    rate = moved / device * 1000
    line = {"what": what, "ms": round(device, 3), "host_ms": round(host, 3), "tb_s": round(rate / 1e12, 3)}
    if peer:
        line["of_copy"] = round(rate / peer, 3)
    found.append(line)
    print(
        f"{what:58s} {device:8.3f} ms  host {host:6.3f} ms  {rate / 1e12:6.3f} TB/s  {line.get('of_copy', '')}",
        flush=True,
    )
    return rate


def attempt(what: str, run: Callable[[], object]) -> None:
    """One variant; what it cannot do is noted, and the others go on."""
    try:
        run()
    except Exception:  # noqa: BLE001
        found.append({"what": what, "error": traceback.format_exc(limit=3)})
        print("FAILED", what, traceback.format_exc(limit=4), flush=True)


def moved_bytes(items: list[CastItem]) -> int:
    return sum(one.source.nbytes + sum(out.nbytes for out in one.outputs) for one in items)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(std=0.02)


def linears(layers: int, wire: str, dtype: torch.dtype = torch.bfloat16) -> list[CastItem]:
    return [
        item((f"model.layers.{i}.{name}.weight",), random(*shape, dtype=dtype), wire)
        for i in range(layers)
        for name, shape in LINEARS.items()
    ]


def rest(layers: int) -> list[CastItem]:
    names = [f"model.layers.{i}.{n}.weight" for i in range(layers) for n in ("in_norm", "post_norm")]
    heads = [f"model.layers.{i}.{n}.weight" for i in range(layers) for n in ("q_norm", "k_norm")]
    big = [item((name,), random(VOCABULARY, HIDDEN), "bf16") for name in ("embed_tokens", "lm_head")]
    return (
        big
        + [item((name,), random(HIDDEN), "bf16") for name in names]
        + [item((name,), random(128), "bf16") for name in heads]
    )


def casts(peer: float, layers: int) -> list[torch.Tensor]:
    """All casts of dense_8b; returns the outputs."""
    blocks, plain = linears(layers, "blockwise"), rest(layers)
    both = blocks + plain
    choices = [(4, None), (4, 96), (4, 80), (8, None), (8, 64), (8, 48), (2, None), (2, 128)]
    for warps, registers in choices:
        tiles = {**TILES, "blockwise": Tile(128, 128, warps, registers)}
        for form in ("pow2", "fp32"):
            what = f"blockwise {form} {warps} warps, {registers} registers"
            attempt(
                what,
                lambda t=tiles, f=form, w=what: measure(w, moved_bytes(blocks), TritonCastPlan(blocks, f, t).run, peer),
            )
    for tile in (Tile(8, 1024, 4), Tile(4, 1024, 4), Tile(8, 512, 2), Tile(4, 1024, 2)):
        what = f"bf16 copies {tile}"
        tiles = {**TILES, "bf16": tile}
        attempt(
            what, lambda t=tiles, w=what: measure(w, moved_bytes(plain), TritonCastPlan(plain, "pow2", t).run, peer)
        )
    at = time.perf_counter()
    plan = TritonCastPlan(both, "pow2")
    print(f"plan of {len(both)} items made in {1000 * (time.perf_counter() - at):.1f} ms")
    measure("all casts dense_8b pow2", moved_bytes(both), plan.run, peer)
    attempt(
        "finish",
        lambda: measure(
            "all casts dense_8b pow2, run and finish", moved_bytes(both), lambda: (plan.run(), plan.finish()), peer
        ),
    )
    measure("all casts dense_8b fp32 scales", moved_bytes(both), TritonCastPlan(both, "fp32").run, peer)
    attempt(
        "stochastic",
        lambda: measure("all casts dense_8b stochastic", moved_bytes(both), lambda: plan.run(Rounding(1)), peer),
    )
    plan.run()
    digests = plan.finish()
    outputs = [out for one in both for out in one.outputs]
    sample = range(0, len(outputs), 97)
    tell("digests of dense_8b", all(digests[i] == digest(outputs[i].cpu()) for i in sample))
    return outputs


def digests(outputs: list[torch.Tensor], peer: float) -> None:
    """Digest of the whole staging, over tiles."""
    total = sum(out.nbytes for out in outputs)
    pieces = [[whole(out)] for out in outputs]
    for tile in (Tile(16, 1024, 4), Tile(8, 1024, 4)):
        what = f"digest {tile}"
        attempt(what, lambda t=tile, w=what: measure(w, total, TritonDigestPlan(pieces, t).run, peer))


def copies(outputs: list[torch.Tensor], peer: float) -> None:
    """The commit: many segments, over tiles."""
    pairs = [
        (out.view(torch.uint8).view(1, -1), torch.empty_like(out).view(torch.uint8).view(1, -1)) for out in outputs
    ]
    total = 2 * sum(out.nbytes for out in outputs)
    measure(
        "copy torch._foreach_copy_",
        total,
        lambda: torch._foreach_copy_([b for _, b in pairs], [a for a, _ in pairs]),
        peer,
    )
    for tile in (Tile(8, 1024, 8), Tile(4, 1024, 4)):
        what = f"copy {tile}"
        attempt(what, lambda t=tile, w=what: measure(w, total, TritonCopyPlan(pairs, t).run, peer))
    tell("copies of dense_8b", all(torch.equal(a, b) for a, b in pairs))


def others(peer: float, layers: int) -> None:
    """Other formats over the linears, fp32 masters, and stacked experts."""
    for wire, choices in {
        "mxfp8": (Tile(32, 256, 4), Tile(16, 256, 4), Tile(32, 128, 4), Tile(16, 256, 2), Tile(32, 256, 8)),
        "channel": (Tile(2, 2048, 4), Tile(1, 4096, 4), Tile(1, 2048, 4), Tile(1, 4096, 8)),
    }.items():
        items = linears(layers // 2, wire)
        for tile in choices:
            what = f"{wire} {tile}"
            tiles = {**TILES, wire: tile}
            attempt(
                what,
                lambda i=items, t=tiles, w=what: measure(w, moved_bytes(i), TritonCastPlan(i, "pow2", t).run, peer),
            )
        del items
    masters = linears(layers // 4, "blockwise", torch.float32)
    attempt(
        "masters",
        lambda: measure(
            "blockwise pow2 from fp32 masters", moved_bytes(masters), TritonCastPlan(masters, "pow2").run, peer
        ),
    )
    shapes = {"gate": (768, 2048), "up": (768, 2048), "down": (2048, 768)}
    experts = [
        item(tuple(f"layers.{i}.experts.{e}.{name}" for e in range(128)), random(128, *shape), "blockwise")
        for i in range(8)
        for name, shape in shapes.items()
    ]
    attempt(
        "experts",
        lambda: measure(
            "8 MoE layers of 128 experts, pow2", moved_bytes(experts), TritonCastPlan(experts, "pow2").run, peer
        ),
    )


def copy_rate() -> float:
    """The peer: bytes per second of torch's copy."""
    source, target = (torch.empty(9_440_000_000, dtype=torch.uint8, device="cuda") for _ in range(2))
    return measure("torch device-to-device copy of 9.44 GB", 2 * source.nbytes, lambda: target.copy_(source))


def dense(peer: float, layers: int, *, everything: bool) -> None:
    """Casts of dense_8b, and with `everything` digests and copies of its wire."""
    outputs = casts(peer, layers)
    if everything:
        attempt("digests", lambda: digests(outputs, peer))
        attempt("copies", lambda: copies(outputs, peer))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--only", choices=["all", "casts"], default="all", help="casts: equality and casts of dense_8b")
    arguments = parser.parse_args()
    layers = arguments.layers
    torch.manual_seed(0)
    begin = time.perf_counter()
    wrong = [0]
    attempt("equality", lambda: wrong.__setitem__(0, equality()))
    print(f"{wrong[0]} differences; {time.perf_counter() - begin:.0f} s", flush=True)
    out = Path(os.environ.get("OUT", "."))
    attempt("golden vectors", lambda: write(out / "casts.npz"))
    peer = copy_rate()
    dense(peer, layers, everything=arguments.only == "all")
    torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    if arguments.only == "all":
        attempt("others", lambda: others(peer, layers))
    report = {
        "command": " ".join(sys.argv),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "differences": wrong[0],
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": found,
    }
    (out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return int(wrong[0] > 0)


if __name__ == "__main__":
    sys.exit(main())
