"""`fp8rl run`: the reconcile over one job on this machine, until it has ended or somebody interrupts it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator import names
from fp8rl_operator.local.cluster import LocalCluster
from fp8rl_operator.local.pods import Backoff
from fp8rl_operator.local.volumes import Folders
from fp8rl_operator.manifests.model import MODEL_CACHE_VOLUME
from fp8rl_operator.manifests.pod import STATE_VOLUME
from fp8rl_operator.plan import Verdict
from fp8rl_operator.plan_memory import from_time, read_verdict
from fp8rl_operator.reconcile import Pass, reconcile
from fp8rl_operator.spec import FP8RLJob, parse

TICK_SECONDS = 1.0
GRACE_SECONDS = 5.0
STATUS_FILE = "status.yaml"
INTERRUPTED = "Interrupted"
ENGINES_READY = "EnginesReady"
KEPT_OF_STATUS = ("attempt", "version", "step", "precision")

Show = Callable[[FP8RLJob, Pass], None]


class RunFolderError(Exception):
    """Raised when a run folder cannot be used as asked; the message names the folder and the way out."""


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


def owner(folder: Path) -> str | None:
    """Process id of who runs a folder now, None if nobody does."""
    path = folder / ".local" / "lock"
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "?"
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder.

    Raises:
        RunFolderError: another process runs it.
    """
    (folder / ".local").mkdir(parents=True, exist_ok=True)
    with (folder / ".local" / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise RunFolderError(
                f"{folder}: is being run by process {file.read().strip()}; wait for it or end it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def read_run(folder: Path) -> FP8RLJob:
    """The job of a run folder, with its status.

    Raises:
        RunFolderError: it is no run folder.
        InvalidSpec: its job is not valid any more.
    """
    path = folder / STATUS_FILE
    if not path.is_file():
        raise RunFolderError(f"{folder}: no run folder, {STATUS_FILE} is missing; name the --out of a run")
    return parse(yaml.safe_load(path.read_text()))


def open_run(job: FP8RLJob | None, folder: Path, *, resume: bool, now: float) -> FP8RLJob:
    """The job to run in `folder`: a new one with a uid of its own, or the folder's one going on.

    Raises:
        RunFolderError: a run is there and `resume` is not asked for, or the other way round.
        InvalidSpec: the folder's job is not valid any more.
    """
    if resume:
        old = read_run(folder)
        if job is not None and job.name != old.name:
            raise RunFolderError(f"{folder}: holds the run of {old.name}, not of {job.name}; name another --out")
        spec = old.spec if job is None else job.spec
        generation = old.metadata.generation + (spec != old.spec)
        metadata = old.metadata.model_copy(update={"generation": generation})
        return old.model_copy(update={"spec": spec, "metadata": metadata, "status": resumed(old.status, now)})
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder}: exists and is not empty; --resume goes on with it, --out names another folder")
    if job is None:
        raise RunFolderError("no job: name a manifest, or a run folder with --out and --resume")
    metadata = job.metadata.model_copy(update={"uid": job.uid or str(uuid.uuid4()), "generation": 1})
    return job.model_copy(update={"metadata": metadata, "status": {}})


def resumed(status: dict[str, Any], now: float) -> dict[str, Any]:
    """Status of a run that goes on: a new attempt, the restart budget whole; a complete one stays complete."""
    verdict = read_verdict(status)
    if verdict is not None and verdict.complete:
        return status
    kept = {key: status[key] for key in KEPT_OF_STATUS if key in status}
    begun = {"startTime": from_time(now), "attemptTime": from_time(now)}
    return {**kept, **begun, "attempt": int(status.get("attempt", 0)) + 1, "restarts": 0}


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
    """Record once an attempt when its engines were ready: the report counts from then."""
    status = done.seen.orchestrator
    if status is not None and status.engines_ready_time is not None and status.attempt not in noted:
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
