"""The token on every route of vLLM's server."""

from __future__ import annotations

import json

import pytest

from fp8rl_workers.inference.auth import TokenMiddleware


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    for name, value in {
        "CONFIG": "c",
        "TOKEN_FILE": str(tmp_path / "token"),
        "POD_NAME": "p",
        "POD_UID": "u",
        "POD_IP": "127.0.0.1",
        "STATE_DIR": "s",
    }.items():
        monkeypatch.setenv(f"FP8RL_{name}", value)

    async def app(scope, receive, send):
        await send({"type": "passed"})

    return TokenMiddleware(app)


async def ask(guarded, path, header=None, kind="http"):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", header.encode("latin-1"))] if header is not None else []
    await guarded({"type": kind, "path": path, "headers": headers}, None, send)
    return sent


@pytest.mark.parametrize("path", ["/health", "/metrics", "/fp8rl/v1/ready"])
async def test_health_metrics_and_readiness_are_open(guarded, path):
    assert await ask(guarded, path) == [{"type": "passed"}]


@pytest.mark.parametrize(
    "path", ["/fp8rl/v1/commit", "/collective_rpc", "/pause", "/v1/models", "/healthy", "/", "/metrics/x"]
)
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "secret", "Bearer sécret"])
async def test_everything_else_needs_the_token(guarded, path, header):
    start, body = await ask(guarded, path, header)
    assert start["status"] == 401
    assert json.loads(body["body"])["reason"] == "Unauthorized"
    assert await ask(guarded, path, "Bearer secret") == [{"type": "passed"}]


async def test_websockets_are_closed_and_the_lifespan_passes(guarded):
    assert await ask(guarded, "/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert await ask(guarded, "", kind="lifespan") == [{"type": "passed"}]
