"""`python -m fp8rl_operator`: the operator of a cluster, or of a few namespaces. Settings: see `settings.py`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.controller import logs, process
from fp8rl_operator.settings import InvalidSettings, Settings

BAD_SETTINGS = 2


def main() -> int:
    """Run until a signal; the exit code (see `controller.process`)."""
    try:
        settings = Settings.read(os.environ)
    except InvalidSettings as error:
        print(f"the operator's settings cannot be read:\n{error}", file=sys.stderr)
        return BAD_SETTINGS
    logs.set_up(settings.log_format, settings.log_level)
    gc.collect()
    gc.freeze()  # what was imported stays: it need not be looked through again and again
    try:
        return asyncio.run(process.run(settings))
    except (ClusterError, OSError) as error:
        print(f"the operator cannot run: {error}", file=sys.stderr)
        return process.LOST


if __name__ == "__main__":
    sys.exit(main())
