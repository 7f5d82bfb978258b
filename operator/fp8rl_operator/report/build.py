"""Writes summary.json and the plots of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8rl_operator.report.records import read_records
from fp8rl_operator.report.summary import summarize


class ReportError(Exception):
    """Raised when a folder holds no run that can be reported; the message names the file and the way out."""


def build_report(folder: Path, *, plots: bool) -> dict[str, Any]:
    """Write summary.json and, if asked for, the PNG files; returns the summary.

    Raises:
        ReportError: a file is missing or broken.
    """
    try:
        run = read_records(folder)
    except FileNotFoundError as error:
        raise ReportError(
            f"{error.filename}: not there; name the folder of a run that has done at least one step"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ReportError(f"{folder}: cannot be reported: {error}") from error
    summary = summarize(run)
    try:
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if plots:
            from fp8rl_operator.report.plots import draw

            draw(run, folder)
    except OSError as error:
        raise ReportError(f"{folder}: cannot be written: {error.strerror}") from error
    return summary
