"""The orchestrator's control API: PUT /v1/group, GET /v1/status, health and metrics."""

from __future__ import annotations

from aiohttp import web

from fp8rl_workers.errors import StaleError
from fp8rl_workers.http import make_app, read_record, record_response
from fp8rl_workers.orchestrator.parts import Parts
from fp8rl_workers.orchestrator.status import build_status
from fp8rl_workers.protocol import GroupDocument


def refuse_older(document: GroupDocument, held: GroupDocument) -> web.Response:
    """The 409 to an older document, with what the operator needs to write a newer one."""
    text = (
        f"group document {document.attempt}/{document.generation} (attempt/generation) is older than {held.attempt}/{held.generation}, "
        f"which this orchestrator holds: send it again with a generation over {held.generation}"
    )
    body = {"error": text, "reason": "StaleDocument", "attempt": held.attempt, "generation": held.generation}
    return web.json_response(body, status=409)


def build_app(parts: Parts, token: str) -> web.Application:
    """The application; ready as soon as it answers (what is waited for stands in the status)."""

    async def put_group(request: web.Request) -> web.Response:
        document = await read_record(request, GroupDocument)
        if document.job_uid != parts.config.uid:
            raise StaleError(f"group document of job {document.job_uid}, this is job {parts.config.uid}")
        held = parts.members.document
        if not parts.accept(document) and held is not None:
            return refuse_older(document, held)
        if parts.journal.data.document != document:
            parts.journal.save(document=document)
        return record_response(build_status(parts))

    async def get_status(_: web.Request) -> web.Response:
        return record_response(build_status(parts))

    def ready() -> str | None:
        return parts.progress.reason or None

    app = make_app(token, parts.metrics.registry, ready)
    app.add_routes([web.put("/v1/group", put_group), web.get("/v1/status", get_status)])
    return app
