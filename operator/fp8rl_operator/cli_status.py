"""`fp8rl status RUN`: a run's state for people."""

from __future__ import annotations

import json
from pathlib import Path

from fp8rl_operator.cli_commands import CommandError
from fp8rl_operator.local.folder import RunFolderError, owner, read_run
from fp8rl_operator.plan_memory import read_verdict
from fp8rl_operator.spec import FP8RLJob


def status_text(folder: Path) -> str:
    """Conditions, progress and pods of a run.

    Raises:
        CommandError: the folder holds no run.
    """
    try:
        job = read_run(folder)
    except RunFolderError as error:
        raise CommandError(str(error)) from error
    return "\n".join([*head(job), life(job, folder), "", *condition_lines(job), "", *pod_lines(folder), ""])


def head(job: FP8RLJob) -> list[str]:
    """Progress in a few lines."""
    status = job.status
    lines = [
        f"{job.name}: step {status.get('step', 0)} of {job.spec.rollout.steps}, version {status.get('version', 0)}"
    ]
    lines.append(f"attempt {status.get('attempt', 0)}, {status.get('restarts', 0)} restarts")
    if "precision" in status:
        precision = status["precision"]
        lines.append(
            f"recipe {precision['recipe']}, wire {precision['wire']}, {precision['quantizedLayers']} layers quantized"
        )
    return lines


def life(job: FP8RLJob, folder: Path) -> str:
    """Whether anybody runs it now."""
    process = owner(folder)
    if process is not None:
        return f"run by process {process}"
    ended = read_verdict(job.status) is not None
    return "ended" if ended else f"not running; `fp8rl run --resume --out {folder}` goes on"


def condition_lines(job: FP8RLJob) -> list[str]:
    """One line a condition."""
    return [
        f"{item['type']:<22} {item['status']:<8} {item['reason']}: {item['message'].splitlines()[0] if item['message'] else ''}"
        for item in job.status.get("conditions", [])
    ]


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
