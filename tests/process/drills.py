"""One real `fp8rl run` as a process, and what drills ask of it: its pods, its records, the weights that its engines serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from offers import offer_of
from trainer_kit import make_config

from fp8rl_workers.config import ENGINE_PORT
from fp8rl_workers.protocol import ResolvedPrecision
from fp8rl_workers.trainer.loop import TorchTrainer
from fp8rl_workers.trainer.model import load_module
from fp8rl_workers.trainer.model_files import read_config
from fp8rl_workers.trainer.precision import Device, resolve_precision
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.digest import digest
from fp8rl_workers.weights.offer import make_seal, plan_layout
from fp8rl_workers.weights.specs import plan_precision

SAMPLE = Path(__file__).resolve().parents[2] / "deploy/samples/reverse-text.yaml"
BOOT_SECONDS = 280.0
GO_ON_SECONDS = 60.0


class RealRun:
    """`fp8rl run` of the sample with some fields replaced."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.log = out.with_name(f"{out.name}.log")
        self.manifest = out.with_name("job.yaml")
        self.manifest.write_text(SAMPLE.read_text())
        self.process: subprocess.Popen[bytes] | None = None
        self.times: dict[str, float] = {}

    def start(self, *more: str, **settings: Any) -> None:
        """Start; `settings` are dotted paths below `spec` with `__` for the dot."""
        words = [str(Path(sys.executable).with_name("fp8rl")), "run", str(self.manifest), "--out", str(self.out), *more]
        for path, value in settings.items():
            words += ["--set", f"spec.{path.replace('__', '.')}={value}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def stop(self) -> None:
        """End the run if it still goes."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def until(self, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait for something and return it; the failure holds the run's last words."""
        assert self.process is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := true():
                return value
            assert self.process.poll() is None, f"the run ended before: {what}\n{self.story()}"
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {what}\n{self.story()}")

    def timed(self, name: str, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """As `until`, and keep the seconds that it took under `name`."""
        start = time.monotonic()
        value = self.until(true, seconds, what)
        self.times[name] = round(time.monotonic() - start, 1)
        return value

    def story(self) -> str:
        """The end of the log and the last events."""
        events = [f"{item['source']} {item['kind']}: {item['message']}" for item in self.lines("events.jsonl")[-25:]]
        return "\n".join([self.log.read_text()[-1500:], *events])

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a JSON-lines file of the run folder."""
        path = self.out / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def records(self, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        return [
            item
            for item in self.lines("metrics.jsonl")
            if item["kind"] == kind and (attempt is None or item["attempt"] == attempt)
        ]

    def step(self) -> int:
        """The step of the last step record."""
        steps = self.records("step")
        return steps[-1]["step"] if steps else 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [item for item in self.lines("events.jsonl") if item["kind"] == kind]

    def published(self) -> dict[int, dict[str, Any]]:
        """The orchestrator's journal of published versions."""
        data = json.loads((self.out / "orchestrator.json").read_text())
        return {item["version"]: item for item in data["published"]}

    def status(self) -> dict[str, Any]:
        """The job's status."""
        return yaml.safe_load((self.out / "status.yaml").read_text())["status"]

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Rows of pods.json of a role, by address."""
        path = self.out / ".local" / "pods.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        return sorted((row for row in rows if f"-{role}-" in row["name"]), key=lambda row: row["address"])

    def places(self, role: str) -> dict[str, int]:
        """Address to number of restarts of a role's pods: unchanged where nothing was started again."""
        return {row["address"]: row["restarts"] for row in self.pods(role)}

    def kill(self, role: str) -> dict[str, Any]:
        """SIGKILL the main process of the role's first pod that runs; returns its row."""
        pod = self.until(
            lambda: next((row for row in self.pods(role) if "main" in row["pids"]), None), 5.0, "its process id"
        )
        os.kill(pod["pids"]["main"], signal.SIGKILL)
        return pod

    def engine_state(self, address: str) -> dict[str, Any]:
        """An engine's own word; empty while it does not answer."""
        token = (self.out / ".local" / "token").read_text()
        request = urllib.request.Request(f"http://{address}:{ENGINE_PORT}/fp8rl/v1/state")
        request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, OSError):
            return {}

    def processes(self) -> list[int]:
        """Every process whose environment or arguments name the run folder."""
        mark = f"{self.out}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if mark in words:
                    found.append(int(entry.name))
        return found

    def checkpoint(self) -> Path:
        """The trainer's current checkpoint."""
        folder = self.out / "checkpoints"
        return folder / (folder / "current").read_text()


def digest_of_checkpoint(place: Path, model: Path, resolved: ResolvedPrecision) -> str:
    """The digest under which the masters of a checkpoint are published: BF16, cast, summed. No part of the trainer's process."""
    masters = torch.load(place / "state.pt", map_location="cpu", weights_only=True)["masters"]
    plan = plan_precision(json.loads((model / "config.json").read_text()), resolved.wire)
    offer = offer_of(plan_layout(plan.weights(), resolved.wire, 1 << 28))
    digests: dict[str, int] = {}
    for weight in plan.weights():
        wire = resolved.wire if weight.quantized else "bf16"
        parts = quantize(weight.name, masters[weight.name].bfloat16(), wire, scale_format=resolved.scale_format)
        digests |= {weight.name + suffix: digest(part) for suffix, part in parts.items()}
    return make_seal(offer, [digests[entry.name] for entry in offer.tensors]).total


def state_after_loading(place: Path, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state in a checkpoint, and that of a trainer of the sample which has just loaded it."""
    config = make_config(model, optimizer={"learning_rate": 5e-5, "grad_clip": 1.0})
    shape = read_config(model)
    module = load_module(model, torch.device("cpu"), trust_remote_code=False)
    resolved = resolve_precision(config, shape, Device("cpu", None))
    trainer = TorchTrainer(module, None, shape, config, resolved)
    saved = torch.load(place / "state.pt", map_location="cpu", weights_only=True)
    trainer.load_state(saved)
    return torch.load(place / "state.pt", map_location="cpu", weights_only=True), trainer.state()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and plain values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        bits = [item.reshape(-1).contiguous().view(torch.uint8) for item in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)
