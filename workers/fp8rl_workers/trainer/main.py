"""`python -m fp8rl_workers.trainer`: serve at once, resolve the precision, load the model, train what is asked for."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from pydantic import ValidationError

from fp8rl_workers.config import TRAINER_PORT, PodEnvironment, TrainerConfig
from fp8rl_workers.errors import InvalidInputError, WorkerError, refuse
from fp8rl_workers.http import serve, validation_text
from fp8rl_workers.metrics import TRAINER_METRICS, WorkerMetrics
from fp8rl_workers.process import leave
from fp8rl_workers.trainer.server import trainer_app
from fp8rl_workers.trainer.service import TrainerService


def read_config(pod: PodEnvironment) -> TrainerConfig:
    """The config that the operator wrote.

    Raises:
        InvalidInputError: every field that is unknown, missing or out of range.
    """
    try:
        return TrainerConfig.load(pod.config)
    except ValidationError as error:
        raise InvalidInputError(f"{pod.config}: {validation_text(error)}") from error


async def run(pod: PodEnvironment) -> None:
    """Serve until SIGTERM or SIGINT."""
    config = read_config(pod)
    metrics = WorkerMetrics(TRAINER_METRICS)
    service = TrainerService(config, pod, metrics)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = await serve(trainer_app(pod.token, metrics, service), pod.pod_ip, TRAINER_PORT)
    starting = asyncio.create_task(service.start())
    await stop.wait()
    starting.cancel()
    service.close()
    await runner.cleanup()


def main() -> None:
    """One line and exit code 1 when the process cannot start, 65 when that is for a wrong input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        with asyncio.Runner() as runner:
            runner.run(run(PodEnvironment.read()))
            leave(0)
    except WorkerError as error:
        sys.exit(refuse(error))
