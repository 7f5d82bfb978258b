"""`python -m fp8rl_workers.orchestrator`: reads the role's config, serves the control API, runs the loop, stays for its status.

After the last step, or a failure, the process goes on answering GET /v1/status until it is told to end: the operator
decides what happens next. One line and exit code 65 when the config cannot work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

from pydantic import ValidationError

from fp8rl_workers.config import ORCHESTRATOR_PORT, OrchestratorConfig, PodEnvironment
from fp8rl_workers.errors import InvalidInputError, WorkerError, refuse
from fp8rl_workers.http import serve, validation_text
from fp8rl_workers.orchestrator.client import open_session
from fp8rl_workers.orchestrator.loop import Loop, fail
from fp8rl_workers.orchestrator.parts import Parts, build_parts
from fp8rl_workers.orchestrator.server import build_app
from fp8rl_workers.process import leave

log = logging.getLogger(__name__)

SUPERSEDED_SECONDS = 0.5


async def run(pod: PodEnvironment) -> None:
    """Run until told to end.

    Raises:
        WorkerError: the config, the model folder or the address cannot be used.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = OrchestratorConfig.load(pod.config)
    async with open_session(pod.token) as session:
        parts = build_parts(config, pod, session)
        document = parts.journal.data.document
        if document is not None:
            parts.accept(document)
        runner = await serve(build_app(parts, pod.token), pod.pod_ip, ORCHESTRATOR_PORT)
        try:
            while not stop.is_set():
                await work(parts, stop)
                await superseded(parts, stop)
        finally:
            await parts.rollouts.stop()
            await runner.cleanup()


async def work(parts: Parts, stop: asyncio.Event) -> None:
    """Run loop, group and member polling until the loop ends, one of them fails, or `stop` is set."""
    loop = asyncio.create_task(Loop(parts).run())
    tasks = {loop, asyncio.create_task(parts.members.run()), asyncio.create_task(parts.group.run())}
    ended = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, ended):
        task.cancel()
    await asyncio.gather(*tasks, ended, return_exceptions=True)
    for task in done - {ended}:
        error = task.exception()
        if isinstance(error, WorkerError):
            fail(parts, error.reason, str(error))
        elif error is not None:
            raise error


async def superseded(parts: Parts, stop: asyncio.Event) -> None:
    """Wait for a newer attempt than the one that has ended (it starts over from its checkpoint), or for `stop`."""
    progress = parts.progress
    while not stop.is_set():
        document = parts.members.document
        if document is not None and document.attempt > progress.attempt:
            progress.phase, progress.reason, progress.message = "waiting", "", ""
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SUPERSEDED_SECONDS):
                await stop.wait()


def main() -> None:
    """One line and exit code 1 when the process cannot start, 65 when that is for a wrong input."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s orchestrator %(message)s", stream=sys.stderr
    )
    try:
        with asyncio.Runner() as runner:
            runner.run(run(PodEnvironment.read()))
            leave(0)
    except ValidationError as error:
        sys.exit(refuse(InvalidInputError(f"{os.environ['FP8RL_CONFIG']}: {validation_text(error)}")))
    except WorkerError as error:
        sys.exit(refuse(error))
    except OSError as error:
        sys.exit(f"orchestrator: {error}")
    except KeyError as error:
        sys.exit(f"orchestrator: environment variable {error} is missing")
