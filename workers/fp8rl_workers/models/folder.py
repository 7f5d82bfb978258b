"""A model's folder: what a complete one holds, and making one so that nobody ever sees half of it.

A folder that fp8rl made carries `fp8rl_model.json` with the identity of its content. It is built beside its place in
`.<name>.partial` under an exclusive lock on `.<name>.lock` and moved there by one rename, so several pods at once make it
once and a killed one leaves nothing that looks like a model.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8rl_workers.errors import InvalidInputError

MARKER = "fp8rl_model.json"
INDEX = "model.safetensors.index.json"


def missing_files(folder: Path, *, weights: bool = True) -> list[str]:
    """What `folder` lacks of a Hugging Face model with a fast tokenizer and, with `weights`, safetensors; empty if it is complete."""
    if not folder.is_dir():
        return [f"{folder} is no folder"]
    faults = [f"{name}: {fault}" for name in ("config.json", "tokenizer.json") if (fault := _json_fault(folder / name))]
    index = folder / INDEX
    if not weights:
        return faults
    if index.is_file():
        fault = _json_fault(index)
        faults += [f"{INDEX}: {fault}"] if fault else _missing_shards(index)
    elif not any(folder.glob("*.safetensors")):
        faults.append("*.safetensors: missing")
    return faults


def identity(folder: Path) -> str | None:
    """Identity of a folder that fp8rl made, None for any other."""
    marker = folder / MARKER
    return str(json.loads(marker.read_text())["identity"]) if marker.is_file() else None


def make_once(target: Path, wanted: str, build: Callable[[Path], None], waiting: Callable[[str], None]) -> bool:
    """Make `target` by `build(empty folder)` unless it holds `wanted` already; True if this call built it.

    `waiting` is told once, in words, if another process holds the lock.

    Raises:
        InvalidInputError: `target` exists and is not a folder that fp8rl made with this identity.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock", waiting):
        if _present(target, wanted):
            return False
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        build(partial)
        (partial / MARKER).write_text(json.dumps({"identity": wanted}) + "\n")
        _seal(partial)
        partial.rename(target)
    return True


def link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, atomically; an older link is replaced.

    Raises:
        InvalidInputError: `path` is something other than a link.
    """
    if path.exists() and not path.is_symlink():
        raise InvalidInputError(f"FP8RL_MODEL_PATH: {path} exists and is no link; remove it or name another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.parent / f".{path.name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.resolve())
    fresh.replace(path)


@contextmanager
def locked(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, across processes; it ends with the process that holds it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another process makes this model, waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _present(target: Path, wanted: str) -> bool:
    if not target.exists():
        return False
    found = identity(target)
    if found != wanted:
        content = f"model {found}" if found else "files that fp8rl did not make"
        raise InvalidInputError(
            f"FP8RL_MODEL_PATH: {target} holds {content}, not model {wanted}; remove it or name another path"
        )
    return True


def _json_fault(path: Path) -> str | None:
    if not path.is_file():
        return "missing"
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        return f"no JSON ({error})"
    return None


def _missing_shards(index: Path) -> list[str]:
    shards = sorted(set(json.loads(index.read_bytes()).get("weight_map", {}).values()))
    if not shards:
        return [f"{INDEX}: names no shard in weight_map"]
    return [f"{shard}: missing, {INDEX} names it" for shard in shards if not (index.parent / shard).is_file()]


def _seal(folder: Path) -> None:
    """Readable for every role's user, and on the disk before the rename."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
