"""`python -m fp8rl_workers.trainer`: serve at once, resolve the precision, load the model, train what is asked for."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from fp8rl_workers.config import TRAINER_PORT, PodEnvironment, TrainerConfig
from fp8rl_workers.errors import WorkerError
from fp8rl_workers.http import serve
from fp8rl_workers.metrics import TRAINER_METRICS, WorkerMetrics
from fp8rl_workers.trainer.server import trainer_app
from fp8rl_workers.trainer.service import TrainerService


async def run(pod: PodEnvironment) -> None:
    """Serve until SIGTERM or SIGINT."""
    config = TrainerConfig.load(pod.config)
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
    """Exit code 1 with one line when the process cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(run(PodEnvironment.read()))
    except WorkerError as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    main()
