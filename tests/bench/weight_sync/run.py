"""One model: boot both processes, then each measurement by itself; what fails is recorded and the others go on."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support import place

from fp8rl_workers.weights.offer import plan_layout
from weight_sync.conductor import Conductor, Progress, Sync, TrainerProcess, wait_joined
from weight_sync.engine import Engine, EngineSetup, Steps
from weight_sync.figures import load_figures, rounded
from weight_sync.memory import GIB, Memory, copy_rate, memory
from weight_sync.models import CONFIGS, Precision, resolve
from weight_sync.spans import plot, table
from weight_sync.trainer import BUCKET_BYTES, TrainerSetup

ADDRESS = "127.0.0.1"
GROWTH_SYNCS = 50
WARM_SYNCS = 3
BEFORE_SECONDS, AFTER_SECONDS, SETTLE_SECONDS = 1.3, 1.3, 0.4
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
PEER_TIMES = {"dense_8b": 5, "moe_30b_a3b": 1, "tiny": 3, "tiny_moe": 3}


class Run:
    """The measurements of one model, in order. `result` is written after each, so that a cut run leaves what it has."""

    def __init__(self, model: str, precision: Precision, chosen: argparse.Namespace, out: Path) -> None:
        self.model, self.precision, self.chosen, self.out = model, precision, chosen, out
        self.progress = Progress()
        self.result: dict[str, Any] = {"failed": {}, "command": place()["command"]}
        self.conductor: Conductor
        self.before: tuple[Memory, Memory]

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.conductor.engine

    @property
    def device(self) -> torch.device:
        """The card, or the CPU."""
        return self.engine.device

    def measure(self) -> dict[str, Any]:
        """Everything."""
        with tempfile.TemporaryDirectory() as folder:
            self.boot(Path(folder))
            try:
                for name in ("first", "idle", "load", "timeline", "growth", "rates", "peer", "check"):
                    if not self.chosen.only or name in self.chosen.only.split(",") or name == "first":
                        self.stage(name, getattr(self, name))
            finally:
                self.conductor.trainer.kill()
        return self.result

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """One measurement; a failure stands in the result under its name."""
        try:
            self.result |= rounded(work())
        except Exception:  # noqa: BLE001 the process's one boundary: device time is scarce, the other stages go on
            self.result["failed"][name] = traceback.format_exc()
            self.progress.say(f"{self.model} {name} FAILED\n{self.result['failed'][name]}")
        (self.out / f"{self.model}.json").write_text(json.dumps(self.result, indent=1) + "\n")
        self.progress.say(f"{self.model} {name} done")

    def boot(self, folder: Path) -> None:
        """Both processes, an epoch of both, and the trainer's first weights."""
        chosen = self.chosen
        card = "cuda:0" if chosen.device == "cuda" else chosen.device
        trainer = TrainerProcess(TrainerSetup(self.model, self.precision, card, ADDRESS))
        setup = EngineSetup(
            self.model, self.precision, chosen.device, ADDRESS, folder, compiled=chosen.compilation == "vllm"
        )
        self.conductor = Conductor(trainer, Engine(setup), chosen.transport)
        self.progress.say(f"{self.model} engine booted, {self.engine.graphs}, {self.engine.scheduling} scheduling")
        trainer.ready()
        self.weights_bytes = self.conductor.fill()
        self.before = self.memories()
        wait_joined(self.engine, self.conductor.form())
        self.progress.say(f"{self.model} epoch formed, weights of {self.weights_bytes / 1e9:.2f} GB")

    def memories(self) -> tuple[Memory, Memory]:
        """Of the engine's process and of the trainer's."""
        return memory(self.device), self.conductor.trainer.ask("memory")

    def first(self) -> dict[str, Any]:
        """The first sync: vLLM's reload, and learning the layout."""
        done = self.conductor.sync()
        state = self.engine.state()
        extra = memory(self.device).peak - self.before[0].reserved
        sizes = self.wire_sizes()
        return {
            "graphs": self.engine.graphs,
            "scheduling": self.engine.scheduling,
            "first_sync_seconds": done.seconds,
            "first_sync_extra_gib_engine": extra / GIB,
            "load_path": state["load_path"],
            "load_fallback": state["load_fallback"],
            **sizes,
        }

    def wire_sizes(self) -> dict[str, Any]:
        """Bytes of weights and wire, from the layout alone."""
        _, plan = resolve(CONFIGS[self.model], self.precision)
        weights = list(plan.weights())
        layout = plan_layout(weights, self.precision.wire, BUCKET_BYTES)
        codes = {weight.name for weight in weights if weight.quantized}
        plain = {weight.name: 2 * int(torch.Size(weight.shape).numel()) for weight in weights}
        quantized = sum(entry.nbytes for entry in layout.tensors if entry.weight in codes)
        return {
            "bf16_bytes": sum(plain.values()),
            "wire_bytes": sum(layout.buckets),
            "wire_ratio": sum(layout.buckets) / sum(plain.values()),
            "quantized_wire_ratio": quantized / max(1, sum(plain[name] for name in codes)),
        }

    def renewed(self) -> Sync:
        """A sync of new weights, engine idle."""
        self.conductor.fill()
        return self.conductor.sync()

    def idle(self) -> dict[str, Any]:
        """Offer to visible while the engine does nothing."""
        from weight_sync.rates import CopyTimer

        for _ in range(WARM_SYNCS):
            self.renewed()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        timer = CopyTimer(self.engine.transfer.loader, self.device)
        syncs = [self.renewed() for _ in range(self.chosen.times)]
        copies = timer.seconds()
        seconds = [sync.seconds for sync in syncs]
        return {
            "seconds": median(seconds),
            "seconds_all": seconds,
            "trainer_stop_seconds": median(sync.trainer_stop for sync in syncs),
            "commit_copy_seconds": median(copies),
            "stages": stages_of(syncs),
            **self.extra(),
        }

    def extra(self) -> dict[str, float]:
        """Card memory beyond weights and staging, each side's own."""
        engine, trainer = self.memories()
        engine_extra = engine.peak - self.before[0].reserved
        both = engine.card - self.before[0].card - self.result["wire_bytes"]
        return {
            "extra_gib_engine": engine_extra / GIB,
            "extra_gib_trainer": max(0, both - engine_extra) / GIB,
            "card_used_gib": engine.card / GIB,
            "trainer_reserved_gib": trainer.reserved / GIB,
        }

    def load(self) -> dict[str, Any]:
        """Syncs while all sequences run."""
        found, seconds = [], []
        for _ in range(self.chosen.load_times):
            self.conductor.fill()
            self.conductor.step_for(SETTLE_SECONDS, Steps())
            steps = Steps()
            sync = self.conductor.loaded(BEFORE_SECONDS, AFTER_SECONDS, steps)
            found.append(load_figures(steps.times, steps.tokens, sync.start, sync.visible))
            seconds.append(sync.seconds)
            self.engine.clear()
        return {
            "two_phase_seconds": median(seconds),
            "engine_stop_seconds": median(item.stop for item in found),
            "engine_stop_seconds_all": [item.stop for item in found],
            "step_seconds": median(item.step for item in found),
            "tokens_share": median(item.share for item in found),
            "sequences": self.engine.setup.width,
        }

    def timeline(self) -> dict[str, Any]:
        """One sync with every call watched: a plot, a table; on a card, kernels too."""
        self.conductor.fill()
        cuda = self.device.type == "cuda"
        if cuda:
            self.watch_kernels(begin=True)
            self.renewed()
        done = self.conductor.traced()
        spans = done.spans + (self.watch_kernels(begin=False) if cuda else [])
        spans = [span for span in spans if span.end > done.start and span.start < done.visible]
        title = f"{self.model}, {self.chosen.transport}: one sync, {1e3 * done.seconds:.2f} ms"
        if importlib.util.find_spec("matplotlib"):
            plot(spans, str(self.out / f"{self.model}_timeline.png"), title)
        (self.out / f"{self.model}_table.md").write_text(table(spans) + "\n")
        return {"timeline": [[s.process, s.name, s.start - done.start, s.end - s.start] for s in spans]}

    def watch_kernels(self, *, begin: bool) -> list[Any]:
        """Begin to watch both processes' kernels, or tell those seen."""
        from weight_sync.kernels import KernelWatch

        ours = KernelWatch.of("engine").turn(begin=begin)
        return ours + list(self.conductor.trainer.ask("kernels", begin=begin))

    def growth(self) -> dict[str, Any]:
        """Memory before and after 50 syncs."""
        for _ in range(WARM_SYNCS):
            self.conductor.sync()
        before = self.memories()
        for _ in range(GROWTH_SYNCS):
            self.conductor.sync()
        after = self.memories()
        host = [b.resident - a.resident for a, b in zip(before, after, strict=True)]
        card = max(0, after[0].card - before[0].card)
        torch_ = sum(max(0, b.allocated - a.allocated) for a, b in zip(before, after, strict=True))
        return {
            "growth_bytes_50_syncs": max(card, torch_) if self.device.type == "cuda" else sum(map(max0, host)),
            "host_growth_bytes_50_syncs": dict(zip(("engine", "trainer"), host, strict=True)),
        }

    def rates(self) -> dict[str, Any]:
        """Casts and commit against the card's own copy."""
        rate = copy_rate(self.device, COPY_BYTES[self.device.type])
        seconds, moved = self.conductor.trainer.ask("cast_seconds")
        wire = self.result["wire_bytes"]
        return {
            "copy_bytes_per_second": rate,
            "cast_seconds": seconds,
            "floor_seconds": (moved + 2 * wire) / rate,
            "cast_of_copy": moved / seconds / rate,
            "commit_of_copy": 2 * wire / self.result["commit_copy_seconds"] / rate,
        }

    def peer(self) -> dict[str, Any]:
        """vLLM's own backend, into this engine."""
        if self.device.type != "cuda":
            return {"vllm_ipc_seconds": None}
        from weight_sync.peer import peer_sync

        trainer = self.conductor.trainer
        trainer.ask("peer_module")
        ways = {"packed": True} if self.model.startswith("moe") else {"unpacked": False, "packed": True}
        found: dict[str, Any] = {}
        for way, packed in ways.items():
            times = PEER_TIMES[self.model] + 1
            runs = [peer_sync(self.engine, trainer, packed=packed) for _ in range(times)][1:]
            trainer.ask("forget")
            found[f"vllm_ipc_{way}_seconds"] = median(seconds for seconds, _ in runs)
            found[f"vllm_ipc_{way}_cast_seconds"] = median(cast for _, cast in runs)
            self.progress.say(f"{self.model} vLLM's ipc, {way}: {found[f'vllm_ipc_{way}_seconds']:.3f} s")
        best = min(ways, key=lambda way: found[f"vllm_ipc_{way}_seconds"])
        seconds = found[f"vllm_ipc_{best}_seconds"]
        faster = seconds / self.result["seconds"]
        engine = "the same FP8 engine, quantized checkpoint"
        return {
            "vllm_ipc_seconds": seconds,
            "times_faster_than_vllm_ipc": faster,
            "vllm_ipc_way": best,
            "vllm_ipc_engine": engine,
            **found,
        }

    def check(self) -> dict[str, Any]:
        """The engine's parameters and answers after all of these syncs, against the reference."""
        from weight_sync.check import compare

        self.renewed()
        return compare(self.engine, self.conductor.version)


def max0(value: int) -> int:
    """At least 0."""
    return max(0, value)


def stages_of(syncs: list[Sync]) -> dict[str, float]:
    """Medians of the stages of some syncs, in seconds: the trainer's, the engine's, and from the last report to visible."""
    found: dict[str, list[float]] = {}
    for sync in syncs:
        report = sync.published.report
        member = report.members[0]
        parts = {f"trainer_{name}": seconds for name, seconds in report.stages.items()}
        parts |= {
            "engine_receive": member.receive_seconds,
            "engine_load": member.load_seconds,
            "publish": sync.published.end - sync.start,
            "report_to_decision": sync.decided - sync.published.end,
            "decision_to_visible": sync.visible - sync.decided,
            "commit_call": sync.paused,
        }
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds)
    return {name: median(values) for name, values in found.items()}
