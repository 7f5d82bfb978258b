"""The command line: `fp8rl run | validate | render | status | report`. Heavy modules are imported by the command that needs them.

Exit codes: 0 done, 1 the job or a file is wrong or the run failed, 2 usage, 130 interrupted. `status` ends with 0 whenever it can
show the job, whatever the job's state, and with 1 when it cannot: no such job, no cluster, no permission.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABOUT = "Reinforcement learning of language models, disaggregated and in FP8."


def make_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(prog="fp8rl", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a job on this machine, to its end")
    run.add_argument("job", nargs="?", type=Path, metavar="JOB.yaml", help="manifest; may be left out with --resume")
    run.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<name of the job>)")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with the run in --out from its last checkpoint")
    existing.add_argument(
        "--fresh", action="store_true", help="move a run in --out aside (DIR.1, DIR.2, ...), start anew"
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="replace a field of the manifest, e.g. spec.seed=1 (YAML value; repeatable)",
    )
    validate = commands.add_parser("validate", help="report all faults of a manifest")
    validate.add_argument("file", type=Path, metavar="FILE")
    render = commands.add_parser("render", help="print the Kubernetes objects of a job")
    render.add_argument("file", type=Path, metavar="FILE")
    add_status(commands)
    report = commands.add_parser("report", help="rebuild summary and plots of a run")
    report.add_argument("run", type=Path, metavar="RUN", help="run folder")
    report.add_argument("--json", action="store_true", help="print summary.json only")
    return parser


def add_status(commands: Any) -> None:
    """`fp8rl status`; its flags are kubectl's."""
    status = commands.add_parser("status", help="show the state of a job in a cluster, or of a run on this machine")
    status.add_argument("job", metavar="JOB|RUN", help="name of an FP8RLJob, or a run folder (a path)")
    status.add_argument("-n", "--namespace", metavar="NAME", help="namespace of the job (default: the context's)")
    status.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    status.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, then ~/.kube/config")
    status.add_argument("-o", "--output", choices=["json", "yaml"], help="print the object instead of its story")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = make_parser().parse_args(argv)
    from fp8rl_operator import cli_commands
    from fp8rl_operator.errors import InvalidSpec

    try:
        return int(getattr(cli_commands, f"{arguments.command}_command")(arguments))
    except InvalidSpec as error:
        for fault in error.faults:
            sys.stderr.write(f"fp8rl: {fault}\n")
    except cli_commands.CommandError as error:
        sys.stderr.write(f"fp8rl: {error}\n")
    except BrokenPipeError:
        sys.stderr.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())
