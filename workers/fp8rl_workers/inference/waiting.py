"""The engine's port before vLLM holds it: says that it waits, takes the resolved precision, then makes room."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CollectorRegistry

from fp8rl_workers.config import ENGINE_PORT, PodEnvironment
from fp8rl_workers.http import make_app, read_record, record_response, serve
from fp8rl_workers.protocol import EngineState, ResolvedPrecision

WAITING = "waits for the resolved precision"


async def wait_for_precision(pod: PodEnvironment, release: str) -> ResolvedPrecision:
    """Serve on the engine's port until the orchestrator has PUT the precision. `auto` is no value of the record: 400.

    Raises:
        InvalidInputError: the port is in use.
    """
    taken: asyncio.Future[ResolvedPrecision] = asyncio.get_running_loop().create_future()
    state = EngineState(phase="waiting", pod=pod.pod_name, uid=pod.pod_uid, release=release)

    async def get_health(_: web.Request) -> web.Response:
        return web.json_response({"status": WAITING})

    async def get_ready(_: web.Request) -> web.Response:
        return web.json_response({"error": WAITING, "reason": "NotYet"}, status=503)

    async def get_state(_: web.Request) -> web.Response:
        return record_response(state)

    async def put_resolved(request: web.Request) -> web.Response:
        resolved = await read_record(request, ResolvedPrecision)
        if not taken.done():
            taken.set_result(resolved)
        return record_response(state.model_copy(update={"phase": "booting"}))

    app = make_app(pod.token, CollectorRegistry(), lambda: WAITING)
    app.add_routes(
        [
            web.get("/health", get_health),
            web.get("/fp8rl/v1/ready", get_ready),
            web.get("/fp8rl/v1/state", get_state),
            web.put("/fp8rl/v1/resolved", put_resolved),
        ]
    )
    runner = await serve(app, pod.pod_ip, ENGINE_PORT)
    try:
        return await taken
    finally:
        await runner.cleanup()
