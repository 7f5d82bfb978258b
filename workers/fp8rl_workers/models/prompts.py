"""`python -m fp8rl_workers.models.prompts`: the orchestrator's init container that fetches its prompts from a hub.

Environment:
    FP8RL_DATASET_SOURCE  `spec.rollout.dataset.hub` with the split, as JSON: `{"repository": "owner/name", "subset": "main",
                          "revision": "v1", "split": "train"}`; subset and revision may be absent
    FP8RL_DATASET_PATH    the file that the orchestrator reads. It is made once: one that is there stays as it is, so that a
                          job that goes on has the prompts that its cursor speaks of
    HF_TOKEN              optional: token of the hub
The split is the file `<split>.jsonl`, or its shards `<split>-*.jsonl` one after the other, of one folder of the repository;
`subset` is the folder's name. Exit codes as in `prepare`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from fp8rl_workers.config import Record
from fp8rl_workers.errors import InvalidInputError, WorkerError, refuse
from fp8rl_workers.http import validation_text
from fp8rl_workers.models.hub import download_dataset, list_dataset
from fp8rl_workers.process import end_on_sigterm

SUFFIX = ".jsonl"
SHOWN_FILES = 20


class Source(Record):
    """A split of a data set on a hub."""

    repository: str
    split: str
    subset: str | None = None
    revision: str | None = None


def choose_files(source: Source, names: Iterable[str]) -> list[str]:
    """Those of a repository's files that make the split, in order.

    Raises:
        InvalidInputError: there are none, or they lie in several folders; the message lists what there is.
    """
    there = sorted(name for name in names if name.endswith(SUFFIX))
    found = [name for name in there if _belongs(PurePosixPath(name), source)]
    folders = sorted({str(PurePosixPath(name).parent) for name in found})
    if len(folders) == 1:
        return found
    shown = ", ".join(there[:SHOWN_FILES]) or "none"
    wanted = f"{source.split}{SUFFIX} or {source.split}-*{SUFFIX}" + (f" in {source.subset}" if source.subset else "")
    if folders:
        raise InvalidInputError(
            f"rollout.dataset.hub: {source.repository} has {wanted} in {len(folders)} folders: {', '.join(folders)};"
            " name one of them as subset"
        )
    raise InvalidInputError(
        f"rollout.dataset.hub: {source.repository} has no {wanted}; its JSON-lines files: {shown};"
        " name another split or subset, or put a file of JSON lines on dataset.volume"
    )


def fetch(source: Source, path: Path) -> bool:
    """Make `path` from the hub's files unless it is there; whether this call made it.

    Raises:
        InvalidInputError: the hub refuses, or has no such split.
        HubUnavailableError: it does not answer.
        OSError: the file cannot be written.
    """
    if path.exists():
        return False
    commit, names = list_dataset(source.repository, source.revision)
    chosen = choose_files(source, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        whole = Path(folder) / "whole"
        with whole.open("wb") as target:
            for part in download_dataset(source.repository, commit, chosen, Path(folder) / "files"):
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, target)
                target.write(b"\n")  # the last line of a part may have no end of its own
            target.flush()
            os.fsync(target.fileno())
        whole.replace(path)
    return True


def _belongs(name: PurePosixPath, source: Source) -> bool:
    own = name.stem == source.split or name.stem.startswith(f"{source.split}-")
    return own and (source.subset is None or source.subset == name.parent.name)


def main() -> int:
    """Run the command; the exit code."""
    end_on_sigterm()
    try:
        source = Source.model_validate_json(os.environ["FP8RL_DATASET_SOURCE"])
        path = Path(os.environ["FP8RL_DATASET_PATH"])
        print(f"{'fetched' if fetch(source, path) else 'found'} {path}", flush=True)
    except ValidationError as error:
        return refuse(InvalidInputError(f"FP8RL_DATASET_SOURCE: {validation_text(error)}"))
    except KeyError as error:
        return refuse(InvalidInputError(f"{error.args[0]}: not set; the operator sets it for this command"))
    except WorkerError as error:
        return refuse(error)
    except OSError as error:
        print(f"prompts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
