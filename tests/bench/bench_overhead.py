"""What does fp8rl itself cost beside vLLM and the trainer? Memory of a real run's other processes, and the command's start.

    python tests/bench/bench_overhead.py --out DIR [--steps 60] [--save]

Must: the peak of the summed memory of everything that is neither an engine nor the trainer nor the making of the model (the
run itself, the orchestrator, the parents of the containers, the report at the end) below 150 MB; `fp8rl --help` below 0.3 s in the median of 10. Memory is PSS: pages
that processes share are counted once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from support import SAMPLE, finish, place

FP8RL = Path(sys.executable).with_name("fp8rl")
MEGABYTE = 1e6
SAMPLE_SECONDS = 0.3
LIMIT_MB = 150
LIMIT_SECONDS = 0.3
HEAVY = ("fp8rl_workers.trainer", "fp8rl_workers.inference", "vllm", "VLLM", "fp8rl_workers.models.prepare")


def parents() -> dict[int, int]:
    """Process id to its parent's."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def family(root: int) -> list[int]:
    """`root` and all that descends from it."""
    above = parents()
    found = [root]
    for pid in found:
        found += [child for child, parent in above.items() if parent == pid]
    return found


def role_of(pid: int) -> str:
    """Which part of the job a process is; empty for engines, trainer and their preparation."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if "shim.py" in words:
        return "parents of containers"
    if "fp8rl_workers.orchestrator" in words:
        return "orchestrator"
    if "fp8rl_operator.report" in words:
        return "report"
    return "" if any(word in words for word in HEAVY) else "run"


def memory_mb(pid: int) -> tuple[float, float]:
    """PSS and RSS in MB (10^6 bytes)."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024 / MEGABYTE
    return fields["Pss"], fields["Rss"]


def weigh(root: int) -> dict[str, dict[str, float]]:
    """PSS and RSS by role, now."""
    sums: dict[str, dict[str, float]] = {}
    for pid in family(root):
        try:
            role = role_of(pid)
            if role:
                pss, rss = memory_mb(pid)
                entry = sums.setdefault(role, {"pss_mb": 0.0, "rss_mb": 0.0})
                entry["pss_mb"] += pss
                entry["rss_mb"] += rss
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return sums


def run_and_weigh(out: Path, steps: int) -> dict[str, Any]:
    """A real run; the heaviest moment while it trains, and while its report is drawn at the end.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [
        str(FP8RL),
        "run",
        str(SAMPLE),
        "--fresh",
        "--out",
        str(out / "overhead"),
        "--set",
        f"spec.rollout.steps={steps}",
    ]
    process = subprocess.Popen(command)
    peaks: dict[str, Any] = {phase: {"pss_mb": 0.0} for phase in ("running", "reporting")}
    while process.poll() is None:
        roles = weigh(process.pid)
        phase = "reporting" if "report" in roles else "running"
        sums = {unit: sum(role[unit] for role in roles.values()) for unit in ("pss_mb", "rss_mb")}
        if sums["pss_mb"] > peaks[phase]["pss_mb"]:
            peaks[phase] = sums | {"roles": roles}
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peaks


def help_seconds(times: int = 10) -> list[float]:
    """Wall seconds of `fp8rl --help`, after one call that warms the disk's cache."""
    seconds = []
    for _ in range(times + 1):
        start = time.monotonic()
        subprocess.run([str(FP8RL), "--help"], check=True, capture_output=True)
        seconds.append(time.monotonic() - start)
    return seconds[1:]


def main() -> int:
    """Run the measurement; exit code 1 when it misses what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="write results/overhead.json")
    arguments = parser.parse_args()
    seconds = median(help_seconds())
    peaks = run_and_weigh(arguments.out, arguments.steps)
    met = all(peak["pss_mb"] < LIMIT_MB for peak in peaks.values()) and seconds < LIMIT_SECONDS
    result = {"steps": arguments.steps, "help_seconds_p50": seconds, "memory": peaks, "met": met}
    finish("overhead", place() | result, save=arguments.save)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
