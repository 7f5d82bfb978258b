"""Files of a run folder: written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator.spec import FP8RLJob


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file by rename.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    partial.replace(path)


def write_private(path: Path, text: str) -> None:
    """Replace a file that only the user may read."""
    write_text(path, text, 0o600)


def append_json(path: Path, value: Any) -> None:
    """Append one line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def write_job(path: Path, job: FP8RLJob) -> None:
    """Write a job with its status as YAML."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    write_text(path, yaml.safe_dump(document, sort_keys=False))
