"""Our routes on a FastAPI app, against a stand-in of vLLM's engine client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.inference import routes
from fp8rl_workers.inference.routes import Control, Fp8rlRoutes
from fp8rl_workers.protocol import Decision, EngineState

RANKS = {
    "world_size": 1,
    "epoch": 3,
    "prepared_sync_id": None,
    "prepared_version": None,
    "load_path": "plan",
    "load_fallback": {},
    "num_quantized": 2,
    "audit_passed": True,
    "error": "",
    "version": 7,
    "step": 6,
    "digest": "d",
}


class Core:
    """Answers utility calls; `answers` maps a name to an answer, an error to raise, or None: never."""

    def __init__(self):
        self.answers = {"fp8rl_state": RANKS, "fp8rl_join": RANKS, "fp8rl_abort": RANKS | {"error": "late"}}
        self.calls = []

    async def call_utility_async(self, name, payload):
        self.calls.append((name, payload))
        answer = self.answers[name]
        if answer is None:
            await asyncio.sleep(60)
        return answer


@pytest.fixture(scope="module")
def control():
    pod = PodEnvironment(Path("c"), "t", "inference-0", "uid-0", "127.0.0.1", 0, Path("s"))
    client = type("Client", (), {})()
    return Control(client, pod, EngineConfig(name="n", namespace="n", uid="job", model_path="m"), "0.26.0")


@pytest.fixture
def core(control):
    control.client.engine_core = Core()
    return control.client.engine_core


@pytest.fixture
def app(control):
    app = FastAPI()
    Fp8rlRoutes().attach_router(app)
    app.state.fp8rl = control
    return app


async def call(app, method, path, body=None):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.request(method, path, content=None if body is None else json.dumps(body))
        return answer.status_code, answer.json()


def decision(**fields):
    values = {"job_uid": "job", "epoch": 3, "sync_id": 4, "version": 8, "digest": "d", "committed": True} | fields
    return Decision.model_validate(values).model_dump()


async def test_the_state_is_what_the_workers_say(app, core):
    status, state = await call(app, "GET", "/fp8rl/v1/state")
    assert status == 200
    assert EngineState.model_validate(state) == EngineState(
        phase="serving", pod="inference-0", uid="uid-0", release="0.26.0", **RANKS
    )
    assert REGISTRY.get_sample_value("fp8rl_engine_quantized_layers") == 2.0


async def test_the_names_of_the_quantized_layers_have_a_route_of_their_own(app, core):
    core.answers["fp8rl_layers"] = {"quantized_layers": ["a", "b"]}
    assert await call(app, "GET", "/fp8rl/v1/layers") == (200, {"quantized_layers": ["a", "b"]})


async def test_an_engine_without_a_version_shows_none_in_its_metrics(app, core):
    await call(app, "GET", "/fp8rl/v1/state")
    assert REGISTRY.get_sample_value("fp8rl_engine_weight_version") == 7.0
    core.answers["fp8rl_state"] = {name: value for name, value in RANKS.items() if name != "version"}
    assert (await call(app, "GET", "/fp8rl/v1/state"))[1]["version"] is None
    assert REGISTRY.get_sample_value("fp8rl_engine_weight_version") == 0.0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RANKS | {"version": None}, "no version of the weights is committed yet"),
        (RANKS | {"audit_passed": False, "error": "1 layers differ: x"}, "1 layers differ: x"),
        (None, "has not answered 'state' within 0.05 s"),
    ],
)
async def test_readiness_needs_a_version_an_audit_and_workers_that_answer(app, core, monkeypatch, answer, says):
    monkeypatch.setattr(routes, "READY_DEADLINE_SECONDS", 0.05)
    assert (await call(app, "GET", "/fp8rl/v1/ready"))[0] == 200
    core.answers["fp8rl_state"] = answer
    status, body = await call(app, "GET", "/fp8rl/v1/ready")
    assert (status, body["reason"]) == (503, "NotYet")
    assert says in body["error"]


async def test_a_commit_answers_its_report_and_shows_in_the_metrics(app, core):
    report = {"version": 8, "digest": "d", "running": {"r": 3}, "paused_seconds": 0.002}
    core.answers["fp8rl_commit"] = report
    before = REGISTRY.get_sample_value("fp8rl_weight_sync_stage_seconds_count", {"stage": "commit"}) or 0.0
    assert await call(app, "POST", "/fp8rl/v1/commit", decision()) == (200, report)
    assert Decision.model_validate_json(core.calls[-1][1]).version == 8
    assert REGISTRY.get_sample_value("fp8rl_engine_weight_version") == 8.0
    assert REGISTRY.get_sample_value("fp8rl_weight_sync_stage_seconds_count", {"stage": "commit"}) == before + 1


async def test_refusals_of_the_core_keep_their_reason_and_status(app, core):
    core.answers["fp8rl_commit"] = {"error": "comes late", "reason": "Stale", "status": 409}
    status, body = await call(app, "POST", "/fp8rl/v1/commit", decision())
    assert (status, body) == (409, {"error": "comes late", "reason": "Stale"})
    assert (await call(app, "POST", "/fp8rl/v1/abort", decision(committed=False)))[1]["error"] == "late"


async def test_bodies_that_are_no_records_are_refused_by_field(app, core):
    status, body = await call(app, "POST", "/fp8rl/v1/commit", {"version": "x"})
    assert (status, body["reason"]) == (400, "InvalidInput")
    assert "job_uid" in body["error"]
    assert (await call(app, "POST", "/fp8rl/v1/commit", decision(committed=False)))[0] == 400
    assert (await call(app, "PUT", "/fp8rl/v1/epoch", {"auto": 1}))[0] == 400
    assert core.calls == []
