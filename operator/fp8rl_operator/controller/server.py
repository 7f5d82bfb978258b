"""/metrics, /healthz and /readyz over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from fp8rl_operator.controller.metrics import Metrics
from fp8rl_operator.settings import Settings

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Check = Callable[[], tuple[bool, str]]


@dataclass(frozen=True)
class Pages:
    """What is answered. A check gives whether all is well, and one line of why."""

    metrics: Metrics
    healthy: Check
    ready: Check

    async def get_metrics(self, _: web.Request) -> web.Response:
        """All series."""
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def get_health(self, _: web.Request) -> web.Response:
        """Whether this process should live on."""
        return answer(self.healthy())

    async def get_ready(self, _: web.Request) -> web.Response:
        """Whether this process does its part: leads with all lists in, or stands by."""
        return answer(self.ready())


def answer(found: tuple[bool, str]) -> web.Response:
    """200 or 503, with the line."""
    well, text = found
    return web.Response(status=200 if well else 503, text=f"{text}\n")


async def serve(settings: Settings, pages: Pages) -> list[web.AppRunner]:
    """Start the two servers; they run until their runners are cleaned up.

    Raises:
        OSError: an address is taken or not of this machine.
    """
    metrics, health = web.Application(), web.Application()
    metrics.router.add_get("/metrics", pages.get_metrics)
    health.router.add_get("/healthz", pages.get_health)
    health.router.add_get("/readyz", pages.get_ready)
    return [
        await listen(metrics, settings.metrics_address, settings.metrics_port, "/metrics"),
        await listen(health, settings.health_address, settings.health_port, "/healthz and /readyz"),
    ]


async def listen(app: web.Application, address: str, port: int, what: str) -> web.AppRunner:
    """Serve one application; where is told in the log."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    for place in runner.addresses:
        log.info("%s at %s:%d", what, place[0], place[1])
    return runner
