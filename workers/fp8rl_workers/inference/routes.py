"""Our routes on vLLM's API server (endpoint plugin): state, readiness, epoch, commit, abort, and the engine's metrics.

Everything goes through the engine core by one utility call; a core or worker that does not answer within the deadline is
reported as such instead of being waited for.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY, Gauge, Histogram
from pydantic import BaseModel, ValidationError

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.errors import InvalidInputError, NotYetError, WorkerError
from fp8rl_workers.http import validation_text
from fp8rl_workers.inference.caches import RELEASE, promote_once_ready
from fp8rl_workers.inference.spans import NO_VERSION
from fp8rl_workers.metrics import SYNC_BUCKETS
from fp8rl_workers.protocol import Decision, EngineState, Epoch

CALL_DEADLINE_SECONDS = 10.0
READY_DEADLINE_SECONDS = 5.0


class EngineMetrics:
    """The engine's own figures, on vLLM's registry so that one `/metrics` shows them all."""

    def __init__(self) -> None:
        self.version = Gauge(
            "fp8rl_engine_weight_version",
            "Version of the weights that this engine serves, 0 for none.",
            registry=REGISTRY,
        )
        self.quantized = Gauge(
            "fp8rl_engine_quantized_layers", "Linear layers whose weights are held as codes.", registry=REGISTRY
        )
        self.stage = Histogram(
            "fp8rl_weight_sync_stage_seconds",
            "Weight sync by stage.",
            ["stage"],
            buckets=SYNC_BUCKETS,
            registry=REGISTRY,
        )


class Control:
    """The API server's side of the engine core."""

    def __init__(self, client: Any, pod: PodEnvironment, job: EngineConfig, release: str) -> None:
        self.client = client
        self.pod = pod
        self.job = job
        self.release = release
        self.was_ready = False
        self.metrics = EngineMetrics()

    async def call(self, name: str, payload: str = "", deadline: float = CALL_DEADLINE_SECONDS) -> dict[str, Any]:
        """One call on the engine core.

        Raises:
            WorkerError: the core refuses.
            NotYetError: no answer within the deadline, in seconds.
        """
        try:
            future = self.client.engine_core.call_utility_async(f"fp8rl_{name}", payload)
            answer: dict[str, Any] = await asyncio.wait_for(future, deadline)
        except TimeoutError as error:
            raise NotYetError(f"the engine core has not answered {name!r} within {deadline:g} s") from error
        if "error" in answer and "reason" in answer:
            raise RefusedError(answer)
        return answer

    async def state(self, deadline: float = CALL_DEADLINE_SECONDS) -> EngineState:
        """What the engine is, as its workers say it."""
        return self._state(await self.call("state", deadline=deadline))

    def _state(self, answer: dict[str, Any]) -> EngineState:
        self.metrics.quantized.set(answer["num_quantized"])
        self.metrics.version.set(answer.get("version") or NO_VERSION)
        return EngineState(phase="serving", pod=self.pod.pod_name, uid=self.pod.pod_uid, release=self.release, **answer)

    async def join(self, epoch: Epoch) -> EngineState:
        """Hand an epoch to the workers; they join in their own time."""
        return self._state(await self.call("join", epoch.model_dump_json()))

    async def commit(self, decision: Decision) -> dict[str, Any]:
        """Commit what is prepared, in one turn of the core's loop."""
        if not decision.committed:
            raise InvalidInputError("committed: false; an abort goes to /fp8rl/v1/abort")
        start = time.perf_counter()
        answer = await self.call("commit", decision.model_dump_json(), self.job.weight_sync.timeout_seconds)
        self.metrics.version.set(answer["version"])
        self.metrics.stage.labels("commit").observe(time.perf_counter() - start)
        self.metrics.stage.labels("paused").observe(answer["paused_seconds"])
        return answer

    async def abort(self, decision: Decision) -> EngineState:
        """Forget what is prepared for this sync."""
        return self._state(await self.call("abort", decision.model_dump_json()))

    async def ready(self) -> None:
        """Return if a version is committed and all workers answer.

        Raises:
            NotYetError: says what is missing.
        """
        state = await self.state(READY_DEADLINE_SECONDS)
        if not state.audit_passed:
            raise NotYetError(state.error)
        if state.version is None:
            raise NotYetError("no version of the weights is committed yet")
        if not self.was_ready:
            self.was_ready = True
            release = os.environ.get(RELEASE, self.release)
            work = functools.partial(promote_once_ready, dict(os.environ), self.pod.state_dir, release)
            asyncio.get_running_loop().run_in_executor(None, work)


class RefusedError(WorkerError):
    """Raised when the engine core answers a call with a refusal; carries its reason and status."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["error"])
        self.reason = answer["reason"]
        self.status = answer["status"]


router = APIRouter(prefix="/fp8rl/v1")


def control(request: Request) -> Control:
    """The control object of this app."""
    found: Control = request.app.state.fp8rl
    return found


@router.get("/state")
async def get_state(request: Request) -> JSONResponse:
    return respond(await control(request).state())


@router.get("/layers")
async def get_layers(request: Request) -> JSONResponse:
    return JSONResponse(await control(request).call("layers"))


@router.get("/ready")
async def get_ready(request: Request) -> JSONResponse:
    await control(request).ready()
    return JSONResponse({"status": "ready"})


@router.put("/epoch")
async def put_epoch(request: Request) -> JSONResponse:
    return respond(await control(request).join(Epoch.model_validate_json(await request.body())))


@router.post("/commit")
async def post_commit(request: Request) -> JSONResponse:
    return JSONResponse(await control(request).commit(Decision.model_validate_json(await request.body())))


@router.post("/abort")
async def post_abort(request: Request) -> JSONResponse:
    return respond(await control(request).abort(Decision.model_validate_json(await request.body())))


def respond(record: BaseModel) -> JSONResponse:
    """A record as JSON."""
    return JSONResponse(record.model_dump())


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """A refusal as the control APIs say it."""
    assert isinstance(error, WorkerError)
    return JSONResponse({"error": str(error), "reason": error.reason}, status_code=error.status)


async def refuse_record(_: Request, error: Exception) -> JSONResponse:
    """A body that is no record of the protocol."""
    assert isinstance(error, ValidationError)
    return JSONResponse({"error": validation_text(error), "reason": "InvalidInput"}, status_code=400)


class Fp8rlRoutes:
    """vLLM's endpoint plugin contract; loaded because `VLLM_PLUGINS` names it."""

    name = "fp8rl"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and their error answers."""
        app.include_router(router)
        app.add_exception_handler(WorkerError, refuse)
        app.add_exception_handler(ValidationError, refuse_record)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002
        """Keep the engine client for the routes."""
        from vllm.version import __version__

        pod = PodEnvironment.read()
        state.fp8rl = Control(engine_client, pod, EngineConfig.load(pod.config), __version__)
