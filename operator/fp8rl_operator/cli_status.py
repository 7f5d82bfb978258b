"""`fp8rl status JOB|RUN`: a job's state for people, from a cluster or from a run folder, or the object itself."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator.cli_commands import CommandError
from fp8rl_operator.cli_story import story
from fp8rl_operator.local.folder import RunFolderError, owner, read_run
from fp8rl_operator.plan_memory import read_verdict

Body = dict[str, Any]


def status_text(arguments: argparse.Namespace) -> str:
    """What `fp8rl status` prints.

    Raises:
        CommandError: there is no such job or run, or it cannot be read.
    """
    folder = run_folder(arguments)
    if folder is None:
        from fp8rl_operator.cli_cluster import Place, read_job

        place = Place(arguments.kubeconfig, arguments.context, arguments.namespace)
        return text_of(read_job(arguments.job, place), arguments.output, [])
    body = read_body(folder)
    return text_of(body, arguments.output, ["", life(body, folder), *pod_lines(folder)])


def run_folder(arguments: argparse.Namespace) -> Path | None:
    """The folder that is meant: a path, or the name of one that is there; None for a job of the cluster."""
    word: str = arguments.job
    if arguments.kubeconfig is not None or arguments.context is not None or arguments.namespace is not None:
        return None
    is_path = os.sep in word or word.startswith(".") or Path(word).is_dir()
    return Path(word) if is_path else None


def text_of(body: Body, output: str | None, more: list[str]) -> str:
    """The object in a format, or its story and what else is known."""
    if output == "json":
        return json.dumps(body, indent=2) + "\n"
    if output == "yaml":
        return yaml.safe_dump(body, sort_keys=False)
    return "\n".join([*story(body, time.time()), *more, ""])


def read_body(folder: Path) -> Body:
    """The job of a run, with its status.

    Raises:
        CommandError: the folder holds no run.
    """
    try:
        job = read_run(folder)
    except RunFolderError as error:
        raise CommandError(str(error)) from error
    return job.model_dump(mode="json", by_alias=True)


def life(body: Body, folder: Path) -> str:
    """Whether anybody runs it now."""
    process = owner(folder)
    if process is not None:
        return f"run by process {process}"
    ended = read_verdict(body.get("status") or {}) is not None
    return "ended" if ended else f"not running; `fp8rl run --resume --out {folder}` goes on"


def pod_lines(folder: Path) -> list[str]:
    """One line a process of a running run."""
    path = folder / ".local" / "pods.json"
    rows = json.loads(path.read_text()) if path.is_file() else []
    if not rows:
        return ["no pods"]
    return [
        f"{row['name']:<48} {row['phase']:<12} {'ready' if row['ready'] else '-':<6} {row['address']:<16}"
        f" restarts {row['restarts']} pids {row['pids']}"
        for row in rows
    ]
