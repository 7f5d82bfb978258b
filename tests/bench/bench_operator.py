"""How much does the operator cost the API server, and how much time does it take? Many jobs at once, no node.

    python tests/bench/bench_operator.py [--jobs 1000] [--save]

Two control planes of real parts, one after the other. On the first a bare script makes the jobs and applies the same objects with the
same client and the same concurrency, and writes one status for each job. On the second the operator's process does it.
Must: the operator takes at most 1.5 times as long until all children are there; then no write a minute but the Lease's; p99 of a
pass below 1 s; resident memory below 150 MiB and 20 KiB a job; a restart writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from builders import make_body
from control_plane_kit import ControlPlane
from operator_kit import CHILDREN, OperatorProcess, operators
from support import finish, place

from fp8rl_operator.kube.api import Api, Call
from fp8rl_operator.kube.kinds import CHILDREN as KINDS
from fp8rl_operator.kube.kinds import DEPLOYMENT, Kind
from fp8rl_operator.manifests import build_objects
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.settings import Settings
from fp8rl_operator.spec import parse
from fp8rl_operator.status import next_status

NAMESPACE = "default"
NOT_OURS = 2  # ServiceAccount default and ConfigMap kube-root-ca.crt
AT_ONCE = Settings().concurrency
REST_SECONDS = 60.0
PATIENCE_SECONDS = 1800.0
PROGRESS_SECONDS = 10.0
MOST_RATIO = 1.5
MOST_P99_SECONDS = 1.0
FIXED_MIB = 150
JOB_KIB = 20


def manifest(number: int) -> dict[str, Any]:
    """One of many equal jobs."""
    return {**make_body(), "metadata": {"name": f"job-{number:05}", "namespace": NAMESPACE}}


async def created(api: Api, jobs: int) -> list[dict[str, Any]]:
    """Make the jobs, as fast as the client can."""
    return await asyncio.gather(*(api.create(manifest(number)) for number in range(jobs)))


async def bare(jobs: int) -> float:
    """Seconds that the bare script takes for the jobs, their children and one status each."""
    api = await Api.connect()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict[str, Any]) -> None:
        async with gate:
            job = parse(body)
            plan = compute_plan(job, Observed(), time.time())
            objects = build_objects(job, plan, "token", None)
            await asyncio.gather(*(api.apply(item) for item in objects))
            status = next_status(job, Observed(), plan, time.time())
            await api.replace_status({**body, "status": status})

    begun = time.monotonic()
    telling = asyncio.create_task(progress(api, jobs, begun))
    made = await created(api, jobs)
    await asyncio.gather(*(one(body) for body in made))
    took = time.monotonic() - begun
    telling.cancel()
    await api.close()
    return took


async def progress(api: Api, jobs: int, begun: float) -> None:
    """A line on stderr every `PROGRESS_SECONDS`: the children so far."""
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        told(await children(api), jobs, begun)


def told(count: int, jobs: int, begun: float) -> None:
    """One line of progress."""
    print(f"{time.monotonic() - begun:4.0f} s: {count} of {jobs * CHILDREN} children", file=sys.stderr, flush=True)


async def children(api: Api) -> int:
    """Children in the namespace, counted without reading them."""
    return sum([await counted(api, kind) for kind in KINDS]) - NOT_OURS


async def counted(api: Api, kind: Kind) -> int:
    """Objects of a kind in the namespace."""
    page = await api.request(Call("GET", "count", kind, kind.path(NAMESPACE), {"limit": "1"}))
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))


async def complete(api: Api, jobs: int) -> bool:
    """Whether all children are there. One kind is asked for first: a question to the server costs what is measured."""
    return await counted(api, DEPLOYMENT) >= jobs and await children(api) >= jobs * CHILDREN


async def until_children(jobs: int) -> float:
    """Make the jobs beside a running operator; seconds until all their children are there."""
    api = await Api.connect()
    begun = time.monotonic()
    telling = asyncio.create_task(progress(api, jobs, begun))
    await created(api, jobs)
    while not await complete(api, jobs):
        if time.monotonic() - begun > PATIENCE_SECONDS:
            raise TimeoutError(f"{await children(api)} of {jobs * CHILDREN} children after {PATIENCE_SECONDS:.0f} s")
        await asyncio.sleep(0.25)
    took = time.monotonic() - begun
    telling.cancel()
    await api.close()
    return took


def quantile(process: OperatorProcess, share: float) -> float:
    """A quantile of the passes so far, in seconds, linear within a bucket of the histogram."""
    name = "fp8rl_operator_reconcile_seconds"
    found = process.samples(f"{name}_bucket")
    buckets = sorted((float(key.split('"')[1].replace("+Inf", "inf")), count) for key, count in found.items())
    wanted, low, before = buckets[-1][1] * share, 0.0, 0.0
    for edge, count in buckets:
        if count >= wanted:
            return edge if count == before else low + (edge - low) * (wanted - before) / (count - before)
        low, before = edge, count
    return float("inf")


def memory_mib(process: OperatorProcess, field: str) -> float:
    """Resident memory now (VmRSS) or at its highest (VmHWM)."""
    text = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) / 1024


def cpu_seconds(process: OperatorProcess) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def restarted(process: OperatorProcess, jobs: int) -> dict[str, float]:
    """What a new process writes that finds all jobs done, and how long it takes to have seen them all."""
    begun = time.monotonic()
    process.wait_leading(PATIENCE_SECONDS)
    name = "fp8rl_operator_reconcile_seconds_count"
    while process.samples(name).get(name, 0) < jobs:
        time.sleep(0.5)
    took = time.monotonic() - begun
    return {
        "restart_writes": process.at_rest(10, PATIENCE_SECONDS),
        "restart_seconds": took,
        "restart_rss_mib": memory_mib(process, "VmRSS"),
    }


def measure_bare(jobs: int) -> float:
    """The bare script as a process of its own, on a control plane of its own."""
    plane = ControlPlane(f"bench-bare-{os.getpid()}")
    try:
        plane.up()
        command = [sys.executable, __file__, "--jobs", str(jobs), "--bare"]
        environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        return float(done.stdout)
    finally:
        plane.down()


def measure_operator(jobs: int, folder: Path) -> dict[str, float]:
    """The operator's process, on a control plane of its own."""
    plane = ControlPlane(f"bench-{os.getpid()}")
    try:
        plane.up()
        os.environ["KUBECONFIG"] = str(plane.kubeconfig)
        with operators(plane.kubeconfig, folder) as start:
            process = start(lease_seconds=15).wait_leading()
            idle, started = memory_mib(process, "VmRSS"), cpu_seconds(process)
            took = asyncio.run(until_children(jobs))
            cpu = cpu_seconds(process) - started
            writes = process.at_rest(20, PATIENCE_SECONDS)
            busy = cpu_seconds(process)
            time.sleep(REST_SECONDS)
            found = {
                "seconds_to_children": took,
                "cpu_seconds_to_children": cpu,
                "cpu_seconds_to_rest": busy - started,
                "writes_per_minute_at_rest": (process.writes() - writes) * 60 / REST_SECONDS,
                "cpu_share_at_rest": (cpu_seconds(process) - busy) / REST_SECONDS,
                "pass_p50_seconds": quantile(process, 0.5),
                "pass_p99_seconds": quantile(process, 0.99),
                "writes_per_job": writes / jobs,
                "rss_mib": memory_mib(process, "VmRSS"),
                "rss_peak_mib": memory_mib(process, "VmHWM"),
                "rss_idle_mib": idle,
            }
            assert process.stop(30) == 0
            return found | restarted(start(lease_seconds=15), jobs)
    finally:
        plane.down()


def judged(result: dict[str, Any]) -> list[str]:
    """What is over its limit."""
    limits = (
        ("ratio", MOST_RATIO),
        ("pass_p99_seconds", MOST_P99_SECONDS),
        ("rss_mib", FIXED_MIB + JOB_KIB * result["jobs"] / 1024),
        ("writes_per_minute_at_rest", 0),
        ("restart_writes", 0),
    )
    return [f"{name} {result[name]:.3g} is over {limit:.4g}" for name, limit in limits if result[name] > limit]


def main() -> int:
    """Measure, print, judge; 1 when a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="write tests/bench/results/operator.json")
    parser.add_argument("--bare", action="store_true", help="only the bare script, on the cluster of KUBECONFIG")
    chosen = parser.parse_args()
    if chosen.bare:
        print(asyncio.run(bare(chosen.jobs)))
        return 0
    seconds = measure_bare(chosen.jobs)
    print(f"bare: {seconds:.1f} s", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        found = measure_operator(chosen.jobs, Path(folder))
    result = {
        **place(),
        "jobs": chosen.jobs,
        "children": chosen.jobs * CHILDREN,
        "bare_apply_seconds": seconds,
        **found,
    }
    result["ratio"] = found["seconds_to_children"] / seconds
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}
    faults = judged(rounded)
    for fault in faults:
        print(fault, file=sys.stderr)
    finish("operator", rounded, save=chosen.save)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
