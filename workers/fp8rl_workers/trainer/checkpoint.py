"""Checkpoints of the trainer: atomic, fenced by attempt, the newest few kept.

    <folder>/attempt              attempt that may write (the fence)
    <folder>/current              name of the complete checkpoint to resume from
    <folder>/step-<step>-<attempt>/state.pt, meta.json
    <folder>/.step-...            one that is being written, or was when its writer died

A checkpoint is written beside its place, synced, moved there by a rename, and then named in `current` by another rename: a
writer that dies at any moment leaves the previous one current. The fence is raised and checked under one file lock, so a
writer of an old attempt cannot name its checkpoint after a new attempt has begun. A write that fails (no space, no
permission) changes nothing but is reported; the caller goes on and tries again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fp8rl_workers.config import Record, TrainerConfig
from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.protocol import StepResult
from fp8rl_workers.trainer.model_files import model_digest

NAME = re.compile(r"step-(\d+)-(\d+)")


class Meta(Record):
    """What stands beside the tensors. `identity`: values of the config that a resumed run must share."""

    step: int
    attempt: int
    version: int
    identity: dict[str, str]
    orchestrator: dict[str, Any]
    result: StepResult


def identity(config: TrainerConfig) -> dict[str, str]:
    """The fields that make two runs the same run; steps, intervals, limits and the model's place may change between them."""
    return {
        "job uid": config.uid,
        "config.json of model.path": model_digest(Path(config.model_path)),
        "seed": str(config.seed),
        "precision": config.precision.model_dump_json(),
        "trainer.backend": config.backend,
        "trainer.optimizer": config.optimizer.model_dump_json(),
        "rollout.loss": config.loss.model_dump_json(),
    }


def write_synced(path: Path, data: bytes) -> None:
    """Replace a file's content so that a crash leaves the old or the new, and the new is on disk on return."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointStore:
    """The checkpoints of one job, opened for writing by one attempt."""

    def __init__(self, folder: Path, attempt: int, keep: int) -> None:
        """Open the folder and fence off writers of earlier attempts.

        Raises:
            StaleError: a later attempt has opened it already.
        """
        self.folder = folder
        self.attempt = attempt
        self.keep = max(1, keep)
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._check_fence()
            write_synced(folder / "attempt", str(attempt).encode())
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: dict[str, Any], meta: Meta) -> Path:
        """Write a checkpoint and make it current; older ones beyond `keep` go.

        Raises:
            OSError: it could not be written; the previous one is still current.
            StaleError: a later attempt has begun.
        """
        name = f"step-{meta.step:08d}-{meta.attempt}"
        beside, place = self.folder / f".{name}", self.folder / name
        if place == self.current():
            return place
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            with (beside / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            write_synced(beside / "meta.json", meta.model_dump_json().encode())
            with self._locked():
                self._check_fence()
                shutil.rmtree(place, ignore_errors=True)
                beside.rename(place)
                write_synced(self.folder / "current", name.encode())
        except RuntimeError as error:  # torch.save wraps what the disk says
            raise OSError(f"{place}: {str(error).partition(chr(10))[0]}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._prune(name)
        return place

    def current(self) -> Path | None:
        """The checkpoint to resume from, or None."""
        pointer = self.folder / "current"
        return self.folder / pointer.read_text() if pointer.is_file() else None

    def load(self, expected: dict[str, str]) -> tuple[dict[str, Any], Meta] | None:
        """State and meta of the current checkpoint, or None when there is none.

        Raises:
            InvalidInputError: it was made by a job whose `identity` differs; the message names the fields.
        """
        place = self.current()
        if place is None:
            return None
        meta = Meta.model_validate_json((place / "meta.json").read_bytes())
        odd = [
            f"{key} was {meta.identity.get(key)}, is {value}"
            for key, value in expected.items()
            if meta.identity.get(key) != value
        ]
        if odd:
            raise InvalidInputError(
                f"checkpoint {place}: {'; '.join(odd)}; put the job back as it was, or give it an empty volume"
            )
        state: dict[str, Any] = torch.load(place / "state.pt", map_location="cpu", weights_only=True)
        return state, meta

    def _prune(self, current: str) -> None:
        names = sorted((path.name for path in self.folder.iterdir() if NAME.fullmatch(path.name)), key=sort_key)
        for name in [name for name in names if name != current][: -(self.keep - 1) or None]:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _check_fence(self) -> None:
        fence = self.folder / "attempt"
        holder = int(fence.read_text()) if fence.is_file() else 0
        if holder > self.attempt:
            raise StaleError(f"{self.folder} belongs to attempt {holder}; attempt {self.attempt} may not write there")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def sort_key(name: str) -> tuple[int, int]:
    """(step, attempt) of a checkpoint's name."""
    match = NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2])
