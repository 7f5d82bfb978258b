"""The control APIs' common half: an aiohttp application with the job's token, JSON errors, health and metrics.

Every route but health, readiness and metrics asks for `Authorization: Bearer <token>`. Errors are
`{"error": sentence, "reason": CamelCase}` (see `protocol`).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError

from fp8rl_workers.errors import InvalidInputError, WorkerError

log = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/fp8rl/v1/ready"})
MAX_BODY_BYTES = 1 << 30
CLOSE_SECONDS = 1.0
"""How long an ending process waits for its open requests: a step or a sync may take minutes, a pod has 30 s to go."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RecordT = TypeVar("RecordT", bound=BaseModel)


def error_response(status: int, message: str, reason: str) -> web.Response:
    """The JSON error of the control APIs."""
    return web.json_response({"error": message, "reason": reason}, status=status)


def base_url(address: str, port: int) -> str:
    """URL of a control API; an IPv6 address stands in brackets."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def token_matches(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries the token; compares in constant time."""
    return hmac.compare_digest((header or "").encode(), f"Bearer {token}".encode())


def make_app(token: str, registry: CollectorRegistry, ready: Callable[[], str | None]) -> web.Application:
    """An application with health, metrics, token check and JSON errors; the caller adds its routes.

    Args:
        token: The job's control token.
        registry: What `/metrics` shows.
        ready: Returns None when ready, else what is waited for (shown with 503).
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_ROUTES and not token_matches(request.headers.get("Authorization"), token):
            return error_response(401, "the job's control token is missing or wrong", "Unauthorized")
        try:
            return await handler(request)
        except WorkerError as error:
            return error_response(error.status, str(error), error.reason)
        except ValidationError as error:
            return error_response(400, validation_text(error), "InvalidInput")

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        waiting = ready()
        return web.json_response({"status": waiting or "ready"}, status=503 if waiting else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app


async def read_record(request: web.Request, model: type[RecordT]) -> RecordT:
    """Parse the request's body.

    Raises:
        InvalidInputError: the body is no JSON.
        pydantic.ValidationError: it does not fit `model`.
    """
    try:
        body: Any = await request.json()
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"the body of {request.path} is no JSON: {error}") from error
    return model.model_validate(body)


def record_response(record: BaseModel, status: int = 200) -> web.Response:
    """A record as JSON."""
    return web.Response(text=record.model_dump_json(), content_type="application/json", status=status)


def validation_text(error: ValidationError) -> str:
    """All faults of a record in one line: `field: reason (value)`."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']} (got {fault.get('input')!r:.80})"
        for fault in error.errors()
    )


async def serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Start `app` on one address; the caller cleans the runner up.

    Raises:
        InvalidInputError: the address is in use or not this machine's.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        message = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; end the process that holds it or use another address"
        raise InvalidInputError(message) from error
    return runner
