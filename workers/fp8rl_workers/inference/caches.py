"""Compile caches of an engine: it compiles in a folder of its own, which is promoted when it is Ready. No torch.

    <state dir>/.fp8rl-<user id>-<release>-at-work   where this process compiles: emptied at its start, then filled with what was
                                                     promoted
    <cache root>/.fp8rl-<user id>-<release>          the last promoted one: whole, never written in place; node-local, and shared
                                                     by engines of one user and release where the root is

A process that is killed while it compiles leaves nothing that the next one reads. Compilers write absolute paths into their
caches, so one is used only at the path where it was made (`MADE_AT`): the state folder, which is the same in all pods.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8rl_workers.errors import InvalidInputError

log = logging.getLogger(__name__)

CACHE_ROOT = "FP8RL_CACHE_ROOT"
"""Environment variable: folder of the promoted caches; unset: the state folder."""
RELEASE = "FP8RL_ENGINE_RELEASE"
"""Environment variable, set by the launcher: the release that it found installed."""
MADE_AT = "fp8rl-made-at"
VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


@dataclass(frozen=True)
class CompileCache:
    """The two folders of one engine process."""

    at_work: Path
    promoted: Path

    @classmethod
    def of(cls, environ: Mapping[str, str], state_dir: Path, release: str) -> CompileCache:
        """The folders of an engine with this environment."""
        name = f".fp8rl-{os.getuid()}-{release}"
        return cls(state_dir / f"{name}-at-work", Path(environ.get(CACHE_ROOT) or state_dir) / name)

    def variables(self) -> dict[str, str]:
        """Where each compiler keeps its cache."""
        return {name: str(self.at_work / folder) for name, folder in VARIABLES.items()}

    def begin(self) -> None:
        """Start from what was promoted; from nothing where that is nothing, or cannot be copied.

        Raises:
            InvalidInputError: a folder cannot be written.
        """
        try:
            shutil.rmtree(self.at_work, ignore_errors=True)
            with self._locked(fcntl.LOCK_SH):
                self._copy_promoted()
            self.at_work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"{self.at_work.parent} and {self.promoted.parent} ({CACHE_ROOT})"
            raise InvalidInputError(
                f"compile caches: {error}; an engine needs {where} on volumes that it can write"
            ) from error

    def promote(self) -> bool:
        """Put a copy of what was compiled in the promoted one's place, by rename; False when that has it all.

        Raises:
            OSError: the copy cannot be made; what was promoted before stays.
        """
        (self.at_work / MADE_AT).write_text(str(self.at_work))
        if self._made_here() and files_in(self.at_work) <= files_in(self.promoted):
            return False
        fresh, old = (self.promoted.with_name(f"{self.promoted.name}.{uuid.uuid4().hex}") for _ in range(2))
        try:
            shutil.copytree(self.at_work, fresh, symlinks=True)
            with self._locked(fcntl.LOCK_EX):
                if self.promoted.exists():
                    self.promoted.rename(old)
                fresh.rename(self.promoted)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        return True

    def _copy_promoted(self) -> None:
        if not self._made_here():
            return
        try:
            shutil.copytree(self.promoted, self.at_work, symlinks=True)
        except OSError as error:
            log.warning("compile caches start empty, %s cannot be copied: %s", self.promoted, error)
            shutil.rmtree(self.at_work, ignore_errors=True)

    def _made_here(self) -> bool:
        made_at = self.promoted / MADE_AT
        return made_at.is_file() and made_at.read_text() == str(self.at_work)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the lock on the promoted folder; a process that ends lets go of it."""
        self.promoted.parent.mkdir(parents=True, exist_ok=True)
        with self.promoted.with_name(f"{self.promoted.name}.lock").open("a") as file:
            fcntl.flock(file, kind)
            yield


def files_in(folder: Path) -> set[Path]:
    """Files below a folder, by their path in it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def promote_once_ready(environ: Mapping[str, str], state_dir: Path, release: str) -> None:
    """Promote what this engine has compiled; one that cannot is slower at its next start, and serves all the same."""
    cache = CompileCache.of(environ, state_dir, release)
    if not cache.at_work.is_dir():
        return
    try:
        done = cache.promote()
    except (OSError, shutil.Error) as error:
        log.warning("compile caches were not promoted to %s: %s", cache.promoted, error)
    else:
        log.info("compile caches %s %s", "promoted to" if done else "are those of", cache.promoted)
