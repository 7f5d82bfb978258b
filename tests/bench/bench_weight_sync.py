"""How long does a sync of all weights take, and who notices? A trainer and a real vLLM on one card.

    python tests/bench/bench_weight_sync.py [--transport ipc] [--model dense_8b,moe_30b_a3b] [--device cuda] [--out DIR] [--save]

Two processes. The trainer holds BF16 weights under HF names and runs the real store, group and `publish`. The engine is a real
vLLM (CUDA graphs on, dummy weights) with fp8rl's plugin, its agent and its commit; the process that steps it also plays the
orchestrator: epoch document, sync request, decision once all ranks are prepared, commit. They talk over a pipe, so neither HTTP
nor the orchestrator's journal is part of a figure. Clocks are the machine's monotonic one, medians of one run:

    seconds               offer to visible (digests included; the copy is done), engine idle
    two_phase_seconds     the same while 64 sequences run
    engine_stop_seconds   under load: longest gap between two steps less a normal step
    tokens_share          tokens of the second around a sync over those of a normal second
    trainer_stop_seconds  `weights_lock` held: an optimizer step would wait for so long
    vllm_ipc_seconds      vLLM's own `ipc` backend, into the same FP8 engine, the quantized checkpoint cast by our kernels
    floor_seconds         bytes of casts and commit, read and written, at the rate of a copy on this card
    cast_of_copy, commit_of_copy      bytes per second of the casts, of the commit, over the copy's
    extra_gib_engine, extra_gib_trainer     card memory beyond weights and staging; growth_bytes_50_syncs on both sides
    parameters_equal, generations_equal     against the reference's checkpoint loaded through vLLM's own reload

Several models run one after the other, in processes of their own. On a CPU (`--model tiny --device cpu`) everything but vLLM's
backend and the kernels' rates is run as well; limits count on a card only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import RESULTS, finish, place
from weight_sync.figures import judged, rounded
from weight_sync.models import CONFIGS, Precision

DEFAULT_MODELS = "dense_8b,moe_30b_a3b"


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("ipc", "gloo", "nccl"), default="ipc")
    parser.add_argument("--model", default=DEFAULT_MODELS, help=f"some of {', '.join(CONFIGS)}, with commas")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--wire", choices=("blockwise", "mxfp8", "channel", "bf16"), default="blockwise")
    parser.add_argument("--scale-format", choices=("fp32", "pow2"), default="fp32")
    parser.add_argument("--times", type=int, default=7, help="syncs with the engine idle")
    parser.add_argument("--load-times", type=int, default=5, help="syncs under load")
    parser.add_argument(
        "--compilation", choices=("vllm", "none"), default="vllm", help="none boots sooner, CUDA graphs stay on"
    )
    parser.add_argument("--only", default="", help="stages to measure, with commas; all by default")
    parser.add_argument("--out", type=Path, help="folder for results, timelines and tables")
    parser.add_argument("--plot", action="store_true", help="only plot the timelines of the results in --out")
    parser.add_argument("--save", action="store_true", help="write tests/bench/results/weight_sync_ipc.json")
    return parser.parse_args(words)


def alone(model: str, words: list[str], out: Path) -> dict[str, Any]:
    """One model in a process of its own."""
    file = out / f"{model}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, *words, "--model", model, "--out", str(out)]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    return dict(json.loads(file.read_text())) if file.exists() else {"failed": {"boot": f"exit code {code}"}}


def here(model: str, chosen: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One model in this process."""
    from weight_sync.run import Run

    precision = Precision(wire=chosen.wire, scale_format=chosen.scale_format)
    return Run(model, precision, chosen, out).measure()


def without(words: list[str], *names: str) -> list[str]:
    """A command line without some options and their values (`--save` has none)."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word.partition("=")[0] in names:
            skip = "=" not in word and word != "--save"
        else:
            kept.append(word)
    return kept


def main() -> int:
    """Measure, print, judge; 1 when a limit is passed."""
    chosen = parse(sys.argv[1:])
    if chosen.plot:
        return plot_again(chosen.out)
    models = chosen.model.split(",")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        out = chosen.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        rest = without(sys.argv[1:], "--model", "--out", "--save")
        found = {m: here(m, chosen, out) if len(models) == 1 else alone(m, rest, out) for m in models}
        for model, result in found.items():
            faults += judged(model, chosen.device, result)
    for fault in faults:
        print(fault, file=sys.stderr)
    result = {**place(), **card(), "transport": chosen.transport, "models": found, "over_limit": faults}
    if chosen.save:
        result["models"] = known_models() | found
    finish("weight_sync_ipc", rounded(result), save=chosen.save)
    sys.stdout.flush()
    return bool(faults)


def plot_again(out: Path) -> int:
    """Timelines of results that a machine without matplotlib wrote."""
    from weight_sync.spans import Span, plot

    for file in out.glob("*.json"):
        result = json.loads(file.read_text())
        spans = [Span(process, name, start, start + took) for process, name, start, took in result.get("timeline", [])]
        if spans:
            plot(spans, str(file.with_name(f"{file.stem}_timeline.png")), f"{file.stem}: one sync")
    return 0


def known_models() -> dict[str, Any]:
    """What the saved results say of other models; each names its own command."""
    file = RESULTS / "weight_sync_ipc.json"
    return dict(json.loads(file.read_text())["models"]) if file.exists() else {}


def card() -> dict[str, Any]:
    """The card, its driver and CUDA; nothing without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    memory = round(torch.cuda.get_device_properties(0).total_memory / (1 << 30), 1)
    return {"card": torch.cuda.get_device_name(0), "card_gib": memory, "cuda": torch.version.cuda}


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # vLLM's and CUDA's own ends take seconds and say nothing
