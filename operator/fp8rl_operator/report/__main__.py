"""`python -m fp8rl_operator.report RUN`: summary.json and plots, in a process of its own so that `fp8rl run` stays small."""

from __future__ import annotations

import sys
from pathlib import Path

from fp8rl_operator.report.build import ReportError, build_report
from fp8rl_operator.report.text import summary_text


def main(argv: list[str]) -> int:
    """Build the report of one run; 1 if there is nothing to report."""
    try:
        summary = build_report(Path(argv[0]), plots=True)
    except ReportError as error:
        sys.stderr.write(f"fp8rl: {error}\n")
        return 1
    sys.stdout.write(summary_text(Path(argv[0]), summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
