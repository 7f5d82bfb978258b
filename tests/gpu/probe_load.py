"""Learning and loading in a real vLLM with dummy weights, without trainer and wire: seconds, memory, fallbacks, size of the plan.

python tests/gpu/probe_load.py MODEL [--device cpu]   MODEL: tiny, tiny_moe, dense_2 (2 layers of dense_8b), moe_2, dense_8b, moe_30b_a3b

The last line of stdout is JSON; exit 1 where the parameters differ from vLLM's own reload of the same bytes, or a flipped byte passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "bench")]

from offers import offer_of  # noqa: E402
from weight_sync.check import checksums  # noqa: E402
from weight_sync.engine import Engine, EngineSetup  # noqa: E402
from weight_sync.models import CONFIGS, CONTEXT_TOKENS, Precision, resolve  # noqa: E402

from fp8rl_workers.errors import DigestError  # noqa: E402
from fp8rl_workers.inference.kv_scales import restore_kv_scales  # noqa: E402
from fp8rl_workers.weights.kernels import digest_plan, whole  # noqa: E402
from fp8rl_workers.weights.load import Loader, Staging  # noqa: E402
from fp8rl_workers.weights.offer import Offer, Seal, make_seal, plan_layout, stacked  # noqa: E402

GIB = float(1 << 30)
BUCKET_BYTES = 1 << 30
SHORT = {"dense_2": "dense_8b", "moe_2": "moe_30b_a3b"}
CONFIGS.update({name: CONFIGS[whole_model] | {"num_hidden_layers": 2} for name, whole_model in SHORT.items()})
CONTEXT_TOKENS.update({name: CONTEXT_TOKENS[whole_model] for name, whole_model in SHORT.items()})


class Probe:
    """One booted engine and a staging that stands for the sender's memory."""

    def __init__(self, model: str, device: str, folder: Path) -> None:
        start = time.monotonic()
        self.engine = Engine(EngineSetup(model, Precision(), device, "127.0.0.1", folder, compiled=False))
        self.loader: Loader = self.engine.transfer.loader
        _, plan = resolve(CONFIGS[model], Precision())
        self.offer: Offer = offer_of(plan_layout(stacked(plan.weights()), "blockwise", BUCKET_BYTES))
        buckets = [torch.zeros(size, dtype=torch.uint8, device=self.engine.device) for size in self.offer.buckets]
        self.staging = Staging(self.offer, self.engine.transfer.agent.hold, buckets, shared=True)
        self.found: dict[str, Any] = {"model": model, "boot_seconds": time.monotonic() - start}

    def fill(self, seed: int) -> Seal:
        """Random bytes of every kind of tensor, and their seal."""
        torch.manual_seed(seed)
        for entry in self.offer.tensors:
            tensor = self.staging.tensor(entry)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).random_(0, 127)
            else:
                tensor.uniform_(0.001, 0.03) if tensor.is_floating_point() else tensor.random_(100, 130)
        plan = digest_plan([[whole(self.staging.tensor(entry))] for entry in self.offer.tensors])
        plan.run()
        return make_seal(self.offer, plan.finish())

    def timed(self, what: str, work: Callable[[], object]) -> float:
        """Keep the seconds and the highest memory of some work, in GiB beyond what was held before."""
        cuda = self.engine.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.monotonic()
        work()
        if cuda:
            torch.cuda.synchronize()
            self.found[f"{what}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB
            self.found[f"{what}_left_gib"] = (torch.cuda.memory_allocated() - before) / GIB
        self.found[f"{what}_seconds"] = time.monotonic() - start
        return float(self.found[f"{what}_seconds"])

    def sync(self, what: str, seed: int) -> None:
        """Both phases."""
        seal = self.fill(seed)
        self.timed(f"{what}_prepare", lambda: self.loader.prepare(self.staging, seal))
        self.timed(f"{what}_verify", self.loader.verify)
        seconds = self.timed(f"{what}_apply", self.loader.apply)
        self.found[f"{what}_apply_tb_s"] = 2 * self.offer.wire_bytes / seconds / 1e12

    def learned(self) -> None:
        """What the first sync came to."""
        layout = self.loader.layout
        blocks = list(layout.blocks.values()) if layout else []
        self.found |= {
            "load_path": self.loader.path,
            "load_fallback": dict(list(self.loader.fallback.items())[:5]),
            "tensors": len(self.offer.tensors),
            "blocks": sum(len(items) for items in blocks),
            "most_blocks_of_a_tensor": max((len(items) for items in blocks), default=0),
            "storages": len(layout.storages) if layout else 0,
        }

    def equal_to_reload(self) -> bool:
        """Whether vLLM's own reload of the staged bytes leaves the parameters as they are."""
        before = checksums(self.engine.model)
        self.loader.reload(self.staging.inputs())
        restore_kv_scales(self.engine.model)
        return before == checksums(self.engine.model)

    def refused(self) -> bool:
        """Whether one flipped bit of the staging is found."""
        seal = self.fill(9)
        self.staging.buckets[-1][self.offer.tensors[-1].offset] ^= 1
        try:
            self.loader.prepare(self.staging, seal)
        except DigestError:
            return True
        return False


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(asked.model, asked.device, Path(folder))
        probe.sync("first", 1)
        probe.learned()
        for name, seed in (("second", 2), ("third", 3)):
            probe.sync(name, seed)
        probe.found |= {"equal_to_reload": probe.equal_to_reload(), "flip_refused": probe.refused()}
    found = {name: round(value, 5) if isinstance(value, float) else value for name, value in probe.found.items()}
    print(json.dumps(found), flush=True)
    return 0 if found["equal_to_reload"] and found["flip_refused"] else 1


if __name__ == "__main__":
    sys.exit(main())
