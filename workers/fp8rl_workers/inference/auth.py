"""ASGI middleware for vLLM's `--middleware`: the job's token on every route but health and metrics."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fp8rl_workers.config import PodEnvironment
from fp8rl_workers.http import token_matches

OPEN_PATHS = frozenset({"/health", "/metrics", "/fp8rl/v1/ready"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenMiddleware:
    """Answers 401 to HTTP requests without the token, and closes websockets; vLLM itself guards only some routes."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.token = PodEnvironment.read().token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self.allows(scope):
            await refuse(scope, send)
        else:
            await self.app(scope, receive, send)

    def allows(self, scope: Scope) -> bool:
        """Whether the request is open to all or carries the token."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            return True
        headers = dict(scope["headers"])
        return token_matches(headers.get(b"authorization", b"").decode("latin-1"), self.token)


async def refuse(scope: Scope, send: Send) -> None:
    """Answer 401."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": "the job's control token is missing or wrong", "reason": "Unauthorized"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
