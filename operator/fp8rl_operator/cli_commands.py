"""What each command does. A command returns its exit code or raises `CommandError` with one sentence for the user."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator.environment_args import validate_environments
from fp8rl_operator.model_files import model_folder
from fp8rl_operator.not_built import not_built
from fp8rl_operator.spec import FP8RLJob, inspect
from fp8rl_operator.validate import format_fault, load, validate_local_files, with_lines


class CommandError(Exception):
    """Raised when a command cannot do what it was asked for; the message names the file, why, and the way out."""


def run_command(arguments: argparse.Namespace) -> int:
    """`fp8rl run`."""
    from fp8rl_operator.local.folder import RunFolderError, locked, move_aside, open_run, read_run, refuse_used
    from fp8rl_operator.local.run import exit_code, final_reason, run

    if arguments.job is None and not (arguments.resume and arguments.out):
        raise CommandError("run: name a manifest, or a run folder with --out DIR --resume")
    if arguments.resume and arguments.set and arguments.job is None:
        raise CommandError("run: --set needs the manifest beside --resume")
    asked = None if arguments.job is None else anchored(load_job(arguments.job, arguments.set, here=True))
    folder = absolute(arguments.out or Path("runs") / (asked.name if asked is not None else "run"))
    try:
        if arguments.fresh and (aside := move_aside(folder)) is not None:
            sys.stdout.write(f"run folder {folder} is now {aside}\n")
        job = open_run(asked, folder, resume=arguments.resume, now=time.time())
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not arguments.resume:
                refuse_used(folder)
            from fp8rl_operator.cli_progress import screen

            sys.stdout.write(f"run folder {folder}\n")
            with screen(folder, job.name, job.spec.rollout.steps) as shown:
                verdict = asyncio.run(run(job, folder, shown.show))
            ended = read_run(folder)
    except RunFolderError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(unusable(folder, error)) from error
    if verdict is None:
        sys.stdout.write(f"interrupted; `fp8rl run --resume --out {arguments.out or folder}` goes on\n")
        return exit_code(None)
    print_end(folder, final_reason(ended.status))
    return exit_code(verdict)


def unusable(folder: Path, error: OSError) -> str:
    """Why a run folder cannot be used, and the way out."""
    if error.errno is None:
        return f"{folder}: {error}"
    way = "a run needs a folder that it can write: name another --out, or make room"
    return f"{error.filename or folder}: {error.strerror}; {way}"


def print_end(folder: Path, reason: str) -> None:
    """Build summary and plots in a process of its own, then say how it ended."""
    if (folder / "metrics.jsonl").is_file():
        subprocess.run([sys.executable, "-m", "fp8rl_operator.report", str(folder)], check=False)  # noqa: S603 - our own module
    sys.stdout.write(f"{reason}\n")


def validate_command(arguments: argparse.Namespace) -> int:
    """`fp8rl validate`."""
    load_job(arguments.file, [], here=False)
    sys.stdout.write(f"{arguments.file}: valid\n")
    return 0


def render_command(arguments: argparse.Namespace) -> int:
    """`fp8rl render`: the objects as the operator would apply them, with placeholders for uid and token."""
    from fp8rl_operator.manifests import build_objects
    from fp8rl_operator.observed import Observed
    from fp8rl_operator.plan import compute_plan

    job = load_job(arguments.file, [], here=False)
    metadata = job.metadata.model_copy(update={"uid": job.uid or "00000000-0000-0000-0000-000000000000"})
    job = job.model_copy(update={"metadata": metadata})
    objects = build_objects(job, compute_plan(job, Observed(), 0.0), "made-by-the-operator")
    yaml.safe_dump_all(objects, sys.stdout, sort_keys=False, width=120)
    return 0


def status_command(arguments: argparse.Namespace) -> int:
    """`fp8rl status`."""
    from fp8rl_operator.cli_status import status_text

    sys.stdout.write(status_text(arguments))
    return 0


def report_command(arguments: argparse.Namespace) -> int:
    """`fp8rl report`."""
    from fp8rl_operator.report.build import ReportError, build_report

    try:
        summary = build_report(arguments.run, plots=not arguments.json)
    except ReportError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        from fp8rl_operator.report.text import summary_text

        sys.stdout.write(summary_text(arguments.run, summary))
    return 0


def load_job(path: Path, settings: list[str], *, here: bool) -> FP8RLJob:
    """Read a manifest, all of its faults told on stderr. `here`: its files must lie on this machine.

    Raises:
        CommandError: it is no valid job.
    """
    job, faults = load(path) if not settings else inspect(changed(path, settings))
    if job is not None:
        folder = model_folder(job)
        local = validate_local_files(job) if here or (folder is not None and folder[1].is_dir()) else []
        found = [*local, *validate_environments(job), *not_built(job, "machine" if here else "cluster")]
        faults = [*faults, *(found if settings else with_lines(path, found))]
    for fault in faults:
        sys.stderr.write(f"{format_fault(path, fault)}\n")
    errors = sum(fault.level == "error" for fault in faults)
    if job is None or errors:
        raise CommandError(f"{path}: {errors} fault{'s' if errors > 1 else ''}")
    return job


def changed(path: Path, settings: list[str]) -> dict[str, Any]:
    """The body of a manifest with its `--set` applied.

    Raises:
        CommandError: the file cannot be read, or a setting has no place.
    """
    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(body, dict):
        raise CommandError(f"{path}: holds {type(body).__name__}, a mapping with kind: FP8RLJob is needed")
    for setting in settings:
        put(body, setting)
    return body


def anchored(job: FP8RLJob) -> FP8RLJob:
    """The job with paths of this machine made absolute: its processes run in other folders."""
    spec = job.spec
    model, data = spec.model, spec.rollout.dataset
    if model.source is None and model.path is not None:
        spec = spec.model_copy(update={"model": model.model_copy(update={"path": str(absolute(Path(model.path)))})})
    if data.volume is not None and data.volume.claim_name is None and data.volume.host_path is None:
        volume = data.volume.model_copy(update={"path": str(absolute(Path(data.volume.path)))})
        dataset = data.model_copy(update={"volume": volume})
        spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"dataset": dataset})})
    return job.model_copy(update={"spec": spec})


def put(body: dict[str, Any], setting: str) -> None:
    """Apply one `--set PATH=VALUE`.

    Raises:
        CommandError: it has no `=`, or its path leads through something that is no mapping.
    """
    path, mark, value = setting.partition("=")
    if not mark:
        raise CommandError(f"--set {setting}: write PATH=VALUE, e.g. spec.seed=1")
    *parents, last = path.split(".")
    place: Any = body
    for name in parents:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise CommandError(f"--set {setting}: {name} is no mapping")
    place[last] = yaml.safe_load(value)


def absolute(path: Path) -> Path:
    """The path as given by the user, from the root."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - links stay as the user wrote them
