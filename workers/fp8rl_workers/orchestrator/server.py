"""The orchestrator's control API: PUT /v1/group, GET /v1/status, health and metrics."""

from __future__ import annotations

from aiohttp import web

from fp8rl_workers.errors import StaleError
from fp8rl_workers.http import make_app, read_record, record_response
from fp8rl_workers.orchestrator.parts import Parts
from fp8rl_workers.orchestrator.status import build_status
from fp8rl_workers.protocol import GroupDocument


def same_members(known: GroupDocument | None, document: GroupDocument) -> bool:
    """Whether a document says what is known already (its generation grows all the same)."""
    return known is not None and known.model_copy(update={"generation": document.generation}) == document


def build_app(parts: Parts, token: str) -> web.Application:
    """The application; ready as soon as it answers (what is waited for stands in the status)."""

    async def put_group(request: web.Request) -> web.Response:
        document = await read_record(request, GroupDocument)
        if document.job_uid != parts.config.uid:
            raise StaleError(f"group document of job {document.job_uid}, this is job {parts.config.uid}")
        known = parts.journal.data.document
        if parts.members.accept(document) and not same_members(known, document):
            parts.journal.save(document=document)
        return record_response(build_status(parts))

    async def get_status(_: web.Request) -> web.Response:
        return record_response(build_status(parts))

    def ready() -> str | None:
        return parts.progress.reason or None

    app = make_app(token, parts.metrics.registry, ready)
    app.add_routes([web.put("/v1/group", put_group), web.get("/v1/status", get_status)])
    return app
