"""HTTP clients of trainer and engines: one method a route of `protocol`, time limits from the job, no retries here.

A refusal becomes the WorkerError that its status and reason name; a peer that cannot be reached becomes
`PeerLostError`. `raise_for_release` refuses an engine whose routes are not the ones that this client speaks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from fp8rl_workers.config import ENGINE_PORT, TRAINER_PORT
from fp8rl_workers.errors import (
    InvalidInputError,
    InvalidModelError,
    NonFiniteError,
    NotYetError,
    OutOfMemoryError,
    StaleError,
    SyncError,
    WorkerError,
)
from fp8rl_workers.http import base_url, validation_text
from fp8rl_workers.orchestrator import sampling
from fp8rl_workers.orchestrator.environments import Completion
from fp8rl_workers.protocol import (
    CommitReport,
    Decision,
    EngineState,
    Epoch,
    EpochReport,
    ResolvedPrecision,
    StepRequest,
    StepResult,
    SyncReport,
    SyncRequest,
    TrainerState,
)

RecordT = TypeVar("RecordT", bound=BaseModel)

STATE_SECONDS = 10.0
GENERATE_ROUTE = "/inference/v1/generate"
NEEDED_ROUTES = (GENERATE_ROUTE,)  # the plugin's own routes answered before: the engine's state was read from them
OLDEST_RELEASE = "0.26"
BY_REASON: dict[str, type[WorkerError]] = {
    error.reason: error
    for error in (
        InvalidInputError,
        InvalidModelError,
        StaleError,
        NotYetError,
        NonFiniteError,
        OutOfMemoryError,
        SyncError,
    )
}
BY_STATUS: dict[int, type[WorkerError]] = {400: InvalidInputError, 409: StaleError, 503: NotYetError}


class PeerLostError(WorkerError):
    """Raised when a trainer or an engine cannot be reached or answers no HTTP. `late`: it may only be slow."""

    reason = "PeerLost"
    status = 503
    late = False


class EngineReleaseError(WorkerError):
    """Raised when an engine lacks a route that the orchestrator needs."""

    reason = "EngineReleaseUnsupported"
    status = 400


@dataclass(frozen=True)
class Peer:
    """One worker's control API. `seconds` is the limit of a call; None waits for as long as the peer lives."""

    session: aiohttp.ClientSession
    url: str

    async def call(self, method: str, path: str, body: BaseModel | None = None, seconds: float | None = None) -> Any:
        """One call; the answer's JSON.

        Raises:
            PeerLostError: no connection, no answer in time, or no JSON.
            WorkerError: the subclass that the refusal's reason names.
        """
        data = None if body is None else body.model_dump_json()
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=STATE_SECONDS)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            lost = PeerLostError(f"{method} {self.url}{path}: {type(error).__name__} {error}")
            lost.late = isinstance(error, TimeoutError)
            raise lost from error
        return answer_of(f"{method} {self.url}{path}", response.status, text)

    async def record(
        self, model: type[RecordT], method: str, path: str, body: BaseModel | None = None, seconds: float | None = None
    ) -> RecordT:
        """One call whose answer is a record.

        Raises:
            PeerLostError: the answer does not fit `model`; other errors as `call`.
        """
        answer = await self.call(method, path, body, seconds)
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            raise PeerLostError(f"{method} {self.url}{path}: {validation_text(error)}") from error


def answer_of(what: str, status: int, text: str) -> Any:
    """The JSON of an answer.

    Raises:
        PeerLostError: it is no JSON.
        WorkerError: it is a refusal; the class that its reason (else its status) names.
    """
    try:
        answer = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise PeerLostError(f"{what}: {status} with a body that is no JSON: {text[:200]}") from error
    if status < 400:
        return answer
    fields = answer if isinstance(answer, dict) else {}
    reason = str(fields.get("reason", ""))
    message = fields.get("error") or fields.get("detail") or text[:500]
    refused = BY_REASON.get(reason, BY_STATUS.get(status, WorkerError))(f"{what}: {status} {message}")
    refused.reason = reason or refused.reason
    raise refused


@dataclass(frozen=True)
class Trainer:
    """The trainer's control API."""

    peer: Peer

    @classmethod
    def at(cls, session: aiohttp.ClientSession, address: str) -> Trainer:
        return cls(Peer(session, base_url(address, TRAINER_PORT)))

    async def state(self) -> TrainerState:
        return await self.peer.record(TrainerState, "GET", "/v1/state", seconds=STATE_SECONDS)

    async def join(self, epoch: Epoch) -> EpochReport:
        return await self.peer.record(EpochReport, "PUT", "/v1/epoch", epoch, epoch.timeout_seconds + STATE_SECONDS)

    async def sync(self, request: SyncRequest) -> SyncReport:
        seconds = request.timeout_seconds + STATE_SECONDS
        return await self.peer.record(SyncReport, "POST", "/v1/syncs", request, seconds)

    async def decide(self, decision: Decision) -> None:
        await self.peer.call("POST", "/v1/syncs/decision", decision, STATE_SECONDS)

    async def step(self, request: StepRequest) -> StepResult:
        return await self.peer.record(StepResult, "POST", "/v1/steps", request)


@dataclass(frozen=True)
class Engine:
    """One engine's control API and its generate route."""

    peer: Peer

    @classmethod
    def at(cls, session: aiohttp.ClientSession, address: str) -> Engine:
        return cls(Peer(session, base_url(address, ENGINE_PORT)))

    async def state(self) -> EngineState:
        return await self.peer.record(EngineState, "GET", "/fp8rl/v1/state", seconds=STATE_SECONDS)

    async def resolve(self, resolved: ResolvedPrecision) -> None:
        await self.peer.call("PUT", "/fp8rl/v1/resolved", resolved, STATE_SECONDS)

    async def join(self, epoch: Epoch) -> None:
        await self.peer.call("PUT", "/fp8rl/v1/epoch", epoch, epoch.timeout_seconds + STATE_SECONDS)

    async def commit(self, decision: Decision, seconds: float) -> CommitReport:
        return await self.peer.record(CommitReport, "POST", "/fp8rl/v1/commit", decision, seconds)

    async def abort(self, decision: Decision) -> None:
        await self.peer.call("POST", "/fp8rl/v1/abort", decision, STATE_SECONDS)

    async def check_release(self, release: str) -> None:
        """Read the engine's routes.

        Raises:
            EngineReleaseError: a needed one is missing; the message names the engine's release.
        """
        schema = await self.peer.call("GET", "/openapi.json", seconds=STATE_SECONDS)
        raise_for_release(sorted(schema.get("paths", {})), release, self.peer.url)

    async def generate(self, body: dict[str, Any]) -> Completion:
        """Sample one completion.

        Raises:
            NonFiniteError, EngineLostError, InvalidInputError: see `sampling`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STATE_SECONDS)
        try:
            async with self.peer.session.post(self.peer.url + GENERATE_ROUTE, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise sampling.EngineLostError(f"{self.peer.url}: {type(error).__name__} {error}") from error
        if response.status != 200:
            raise sampling.refusal(response.status, text)
        return sampling.parse_completion(json.loads(text))


def raise_for_release(paths: list[str], release: str, url: str) -> None:
    """Refuse an engine without the needed routes.

    Raises:
        EngineReleaseError: a route is missing.
    """
    missing = [route for route in NEEDED_ROUTES if route not in paths]
    if missing:
        raise EngineReleaseError(
            f"the engine at {url} is vLLM {release or 'of unknown release'} and lacks {', '.join(missing)}: "
            f"fp8rl needs vLLM {OLDEST_RELEASE} or newer with fp8rl's plugin installed in the engine's image"
        )


def open_session(token: str) -> aiohttp.ClientSession:
    """A session that carries the job's token; connections are not limited (dispatch limits what is in flight)."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"}, connector=aiohttp.TCPConnector(limit=0), trust_env=False
    )
