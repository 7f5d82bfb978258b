"""Routes of the trainer's control API (`protocol`)."""

from __future__ import annotations

from aiohttp import web

from fp8rl_workers.http import make_app, read_record, record_response
from fp8rl_workers.metrics import WorkerMetrics
from fp8rl_workers.protocol import Decision, Epoch, StepRequest, SyncRequest
from fp8rl_workers.trainer.service import TrainerService


def trainer_app(token: str, metrics: WorkerMetrics, service: TrainerService) -> web.Application:
    """The application of one trainer."""

    async def state(_: web.Request) -> web.Response:
        return record_response(service.state())

    async def epoch(request: web.Request) -> web.Response:
        record = await read_record(request, Epoch)
        service.require_job(record.job_uid)
        return record_response(await service.members.form(record))

    async def sync(request: web.Request) -> web.Response:
        return record_response(await service.sync(await read_record(request, SyncRequest)))

    async def decision(request: web.Request) -> web.Response:
        record = await read_record(request, Decision)
        service.require_job(record.job_uid)
        await service.members.decide(record)
        return record_response(service.state())

    async def step(request: web.Request) -> web.Response:
        return record_response(await service.step(await read_record(request, StepRequest)))

    app = make_app(token, metrics.registry, service.waiting)
    app.add_routes(
        [
            web.get("/v1/state", state),
            web.put("/v1/epoch", epoch),
            web.post("/v1/syncs", sync),
            web.post("/v1/syncs/decision", decision),
            web.post("/v1/steps", step),
        ]
    )
    return app
