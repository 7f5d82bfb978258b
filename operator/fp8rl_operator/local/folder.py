"""The folder of a run: opened anew, gone on with, moved aside; held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator.plan_memory import from_time, read_verdict
from fp8rl_operator.spec import FP8RLJob, parse

STATUS_FILE = "status.yaml"
KEPT_OF_STATUS = ("attempt", "version", "step", "precision")


class RunFolderError(Exception):
    """Raised when a run folder cannot be used as asked; the message names the folder and the way out."""


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
        raise RunFolderError(
            f"{folder}: exists and is not empty; --resume goes on with it, --fresh moves it aside and starts anew"
        )
    if job is None:
        raise RunFolderError("no job: name a manifest, or a run folder with --out and --resume")
    metadata = job.metadata.model_copy(update={"uid": job.uid or str(uuid.uuid4()), "generation": 1})
    return job.model_copy(update={"metadata": metadata, "status": {}})


def refuse_used(folder: Path) -> None:
    """Judge a new run's folder once more, now that it is held: another `fp8rl run` may have begun and ended in it meanwhile.

    Raises:
        RunFolderError: a run is there.
    """
    if (folder / STATUS_FILE).exists():
        raise RunFolderError(f"{folder}: another `fp8rl run` has just used it; name another --out")


def resumed(status: dict[str, Any], now: float) -> dict[str, Any]:
    """Status of a run that goes on: a new attempt, the restart budget whole; a complete one stays complete."""
    verdict = read_verdict(status)
    if verdict is not None and verdict.complete:
        return status
    kept = {key: status[key] for key in KEPT_OF_STATUS if key in status}
    begun = {"startTime": from_time(now), "attemptTime": from_time(now)}
    attempt = int(status.get("attempt", 0)) + 1
    return {**kept, **begun, "attempt": attempt, "fleetAttempt": attempt, "restarts": 0}


def move_aside(folder: Path) -> Path | None:
    """Rename a run folder to the first free of `<folder>.1`, `<folder>.2`, ...; None if there is nothing to move.

    Raises:
        RunFolderError: it is being run, or holds something else than a run.
        OSError: it cannot be renamed.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if (process := owner(folder)) is not None:
        raise RunFolderError(f"{folder}: is being run by process {process}; wait for it or end it")
    if not (folder / STATUS_FILE).is_file():
        raise RunFolderError(f"{folder}: holds no run, {STATUS_FILE} is missing; name another --out")
    with locked(folder):
        aside = next(path for number in count(1) if not (path := folder.with_name(f"{folder.name}.{number}")).exists())
        return folder.rename(aside)
