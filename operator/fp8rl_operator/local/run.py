"""`fp8rl run`: the reconcile over one job on this machine, until it has ended or somebody interrupts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.local.cluster import LocalCluster
from fp8rl_operator.local.pods import Backoff
from fp8rl_operator.local.volumes import Folders
from fp8rl_operator.manifests.model import MODEL_CACHE_VOLUME
from fp8rl_operator.manifests.pod import STATE_VOLUME
from fp8rl_operator.plan import Verdict
from fp8rl_operator.plan_memory import read_verdict
from fp8rl_operator.reconcile import Pass, reconcile
from fp8rl_operator.spec import FP8RLJob

TICK_SECONDS = 1.0
GRACE_SECONDS = 5.0
INTERRUPTED = "Interrupted"
ENGINES_READY = "EnginesReady"

Show = Callable[[FP8RLJob, Pass], None]


@dataclass(frozen=True)
class Settings:
    """How this machine plays the cluster."""

    backoff: Backoff = field(default_factory=Backoff)
    grace: float = GRACE_SECONDS
    tick: float = TICK_SECONDS


def model_cache(environ: dict[str, str] | None = None) -> Path:
    """Where made and fetched models are kept for all runs of this user."""
    env = dict(os.environ) if environ is None else environ
    root = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".cache")
    return Path(root) / "fp8rl"


def make_cluster(folder: Path, settings: Settings) -> LocalCluster:
    """The local cluster of a run: state volumes are the run folder itself."""
    cache = model_cache()
    shared = {STATE_VOLUME: folder, MODEL_CACHE_VOLUME: cache}
    return LocalCluster(Folders(folder, shared=shared), settings.backoff)


async def run(job: FP8RLJob, folder: Path, show: Show, settings: Settings | None = None) -> Verdict | None:
    """Run a job to its end; None when interrupted. Leaves no process behind.

    Raises:
        OSError: no address block is free, or the run folder cannot be written.
    """
    chosen = settings or Settings()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    cluster = make_cluster(folder, chosen)
    await cluster.write_status(job, job.status)
    try:
        return await until_end(cluster, job, show, stop, chosen.tick)
    finally:
        if stop.is_set():
            cluster.event(job.name, INTERRUPTED, f"fp8rl run --resume --out {folder} goes on")
        await cluster.close(chosen.grace)


async def until_end(
    cluster: LocalCluster, job: FP8RLJob, show: Show, stop: asyncio.Event, tick: float
) -> Verdict | None:
    """Reconcile until a verdict stands in status or `stop` is set."""
    ready: set[int] = set()
    while not stop.is_set():
        done = await reconcile(cluster, job, time.time())
        note_readiness(cluster, done, ready)
        job = job.model_copy(update={"status": done.status})
        show(job, done)
        if done.plan.verdict is not None:
            return done.plan.verdict
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), tick)
    return None


def note_readiness(cluster: LocalCluster, done: Pass, noted: set[int]) -> None:
    """Record once an attempt when its engines were ready: the report counts from then. Those that outlived a trainer stay so."""
    status = done.seen.orchestrator
    if status is None or status.engines_ready_time is None or status.attempt in noted:
        return
    if status.attempt == done.plan.fleet_attempt:
        noted.add(status.attempt)
        cluster.event_at(status.engines_ready_time, ENGINES_READY, str(status.attempt))


def exit_code(verdict: Verdict | None) -> int:
    """0 complete, 1 failed, 130 interrupted."""
    if verdict is None:
        return 128 + signal.SIGINT
    return 0 if verdict.complete else 1


def final_reason(status: dict[str, Any]) -> str:
    """The end of a run in one line."""
    verdict = read_verdict(status)
    if verdict is None:
        return "not ended"
    return f"{names.COMPLETE if verdict.complete else names.FAILED}: {verdict.reason}: {verdict.message}"
