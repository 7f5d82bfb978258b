"""Stand-ins of a trainer and of engines that speak the protocol, for tests of the orchestrator alone.

They train nothing and hold no weights: the trainer counts steps, an engine reverses the prompt's text with one wrong letter
for every step that its version lacks. The real ones are in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from fp8rl_workers.config import ENGINE_PORT, ORCHESTRATOR_PORT, TRAINER_PORT
from fp8rl_workers.errors import NotYetError, StaleError, WorkerError
from fp8rl_workers.http import Handler, make_app, read_record, record_response, serve
from fp8rl_workers.models.tokenizer import EOS_ID, build_tokenizer
from fp8rl_workers.protocol import (
    CommitReport,
    Decision,
    EngineState,
    Epoch,
    EpochReport,
    GroupDocument,
    GroupMember,
    MemberReport,
    OrchestratorStatus,
    ResolvedPrecision,
    StepRequest,
    StepResult,
    SyncReport,
    SyncRequest,
    TrainerState,
)

TOKEN = "secret"
JOB = "job-uid"
_networks = itertools.count(1)


def address(network: int, host: int) -> str:
    """An address of this machine: `network` counts the clusters of this test process."""
    pid = os.getpid()
    return f"127.{64 + pid % 128}.{(pid // 128 + 37 * network) % 256}.{host}"


async def cut(runner: web.AppRunner) -> None:
    """Close a server as SIGKILL would: connections are reset, nothing is finished."""
    for handler in runner.server.connections if runner.server is not None else ():
        if handler.transport is not None:
            handler.transport.abort()
    runner._shutdown_timeout = 0.0
    await runner.cleanup()


class StandInEngine:
    """One engine. `prepare_error` makes its next prepare fail; `on_commit` runs before a commit is answered.

    While `awake` is clear it takes connections and answers nothing, as after SIGSTOP.
    """

    def __init__(self, pod: str, host: str) -> None:
        self.pod, self.uid, self.host = pod, f"uid-{pod}", host
        self.tokenizer = build_tokenizer(128)
        self.prepare_error = ""
        self.paths = ["/inference/v1/generate"]
        self.audit_error = ""
        self.not_finite = 0
        self.seconds = 0.002
        self.on_commit: Callable[[], Any] = lambda: None
        self.commits: list[Decision] = []
        self.attempts: list[Decision] = []
        self.requests: list[dict[str, Any]] = []
        self.answers: list[int | None] = []  # seeds; none in an evaluation
        self.runner: web.AppRunner | None = None
        self.awake = asyncio.Event()
        self.awake.set()
        self.boot()

    def boot(self) -> None:
        """Forget everything, as a new process does."""
        self.resolved: ResolvedPrecision | None = None
        self.epoch: int | None = None
        self.version: int | None = None
        self.step, self.digest = 0, ""
        self.prepared: tuple[int, int, int, str] | None = None  # sync id, version, step, digest

    def state(self) -> EngineState:
        return EngineState(
            phase="serving" if self.resolved else "waiting",
            pod=self.pod,
            uid=self.uid,
            release="0.26.0",
            epoch=self.epoch,
            version=self.version,
            step=self.step,
            digest=self.digest,
            prepared_sync_id=self.prepared[0] if self.prepared else None,
            prepared_version=self.prepared[1] if self.prepared else None,
            audit_passed=not self.audit_error,
            error=self.audit_error,
        )

    async def start(self) -> None:
        app = make_app(TOKEN, CollectorRegistry(), lambda: None)
        app.middlewares.append(self._only_awake)
        app.add_routes(
            [
                web.get("/openapi.json", self._openapi),
                web.get("/fp8rl/v1/state", self._state),
                web.put("/fp8rl/v1/resolved", self._resolve),
                web.put("/fp8rl/v1/epoch", self._join),
                web.post("/fp8rl/v1/commit", self._commit),
                web.post("/fp8rl/v1/abort", self._abort),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        self.runner = await serve(app, self.host, ENGINE_PORT)

    async def kill(self) -> None:
        """Connections and listener are gone, as after SIGKILL."""
        runner, self.runner = self.runner, None
        if runner is not None:
            await cut(runner)
        self.boot()

    @web.middleware
    async def _only_awake(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await self.awake.wait()
        return await handler(request)

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in self.paths}})

    async def _state(self, _: web.Request) -> web.Response:
        return record_response(self.state())

    async def _resolve(self, request: web.Request) -> web.Response:
        self.resolved = await read_record(request, ResolvedPrecision)
        return record_response(self.state())

    async def _join(self, request: web.Request) -> web.Response:
        epoch = await read_record(request, Epoch)
        self.epoch, self.prepared = epoch.epoch, None
        return record_response(self.state())

    async def _commit(self, request: web.Request) -> web.Response:
        decision = await read_record(request, Decision)
        if self.prepared is None or self.prepared[0] != decision.sync_id or self.epoch != decision.epoch:
            raise StaleError(f"sync {decision.sync_id} is not prepared here")
        self.attempts.append(decision)
        self.on_commit()
        if self.runner is None:
            raise NotYetError("killed")
        _, self.version, self.step, self.digest = self.prepared
        self.prepared = None
        self.commits.append(decision)
        return record_response(CommitReport(version=self.version, digest=self.digest, paused_seconds=0.001))

    async def _abort(self, request: web.Request) -> web.Response:
        decision = await read_record(request, Decision)
        if self.prepared is not None and self.prepared[0] == decision.sync_id:
            self.prepared = None
        return record_response(self.state())

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        await asyncio.sleep(self.seconds)
        self.answers.append(body["sampling_params"].get("seed"))
        if self.version is None:
            raise NotYetError("nothing is committed: this engine has just been started again")
        if self.not_finite > 0:
            self.not_finite -= 1
            text = {"error": {"message": "Out of range float values are not JSON compliant: nan"}}
            return web.json_response(text, status=400)
        prompt = self.tokenizer.decode(body["token_ids"]).strip("<>")
        answer = "!" * max(len(prompt) - self.step * 2, 0) + prompt[::-1][max(len(prompt) - self.step * 2, 0) :]
        tokens = [*self.tokenizer.encode(answer).ids, EOS_ID][: body["sampling_params"]["max_tokens"]]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "stop", "logprobs": {"content": content}}
        spans = {"fp8rl": {"spans": [[self.version, len(tokens)]]}}
        return web.json_response({"request_id": "x", "choices": [choice], "kv_transfer_params": spans})


class StandInTrainer:
    """The trainer. `checkpoints` outlive a restart; `prompts` are the prompts' positions by step that reached it."""

    def __init__(self, host: str, engines: list[StandInEngine]) -> None:
        self.host, self.engines = host, engines
        self.attempt, self.step, self.version = 0, 0, 0
        self.step_seconds = 0.05
        self.sync_seconds = 0.02
        self.syncing = 0
        self.steps_under_syncs: list[int] = []
        self.tokenizer_digest = ""
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.orchestrator: dict[str, Any] = {}
        self.last: StepResult | None = None
        self.requests: dict[int, list[StepRequest]] = {}
        self.decisions: list[Decision] = []
        self.after_prepare: Callable[[], Any] = lambda: None
        self.training = False
        self.failure = ("", "")
        self.metrics = {"loss": 0.1, "mismatch_kl": 0.001, "entropy": 1.0}
        self.checkpoint_error = ""
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = make_app(TOKEN, CollectorRegistry(), lambda: None)
        app.add_routes(
            [
                web.get("/v1/state", self._state),
                web.put("/v1/epoch", self._epoch),
                web.post("/v1/syncs", self._sync),
                web.post("/v1/syncs/decision", self._decide),
                web.post("/v1/steps", self._steps),
            ]
        )
        self.runner = await serve(app, self.host, TRAINER_PORT)

    async def restart(self) -> None:
        """Killed and started again as the next attempt, from its newest checkpoint."""
        runner = self.runner
        assert runner is not None
        self.attempt, self.training, self.last, self.failure = self.attempt + 1, False, None, ("", "")
        await cut(runner)
        self.step = max(self.checkpoints, default=0)
        self.orchestrator = self.checkpoints.get(self.step, {})
        await self.start()

    async def _state(self, _: web.Request) -> web.Response:
        state = TrainerState(
            job_uid=JOB,
            attempt=self.attempt,
            phase="failed" if self.failure[0] else "training" if self.training else "idle",
            reason=self.failure[0],
            message=self.failure[1],
            step=self.step,
            version=self.version,
            resolved=ResolvedPrecision(recipe="bf16", wire="blockwise", scale_format="pow2"),
            orchestrator=self.orchestrator,
            tokenizer_digest=self.tokenizer_digest,
            last_result=self.last,
        )
        return record_response(state)

    async def _epoch(self, request: web.Request) -> web.Response:
        epoch = await read_record(request, Epoch)
        pods = {member.pod for member in epoch.members if member.role == "inference"}
        deadline = time.monotonic() + epoch.timeout_seconds
        while time.monotonic() < deadline:
            joined = {item.pod for item in self.engines if item.epoch == epoch.epoch and item.pod in pods}
            if joined == pods:
                break
            await asyncio.sleep(0.01)
        return record_response(EpochReport(epoch=epoch.epoch, joined=sorted(joined), missing=sorted(pods - joined)))

    async def _sync(self, request: web.Request) -> web.Response:
        sync = await read_record(request, SyncRequest)
        assert sync.version > self.version, "a version was used twice"
        if self.syncing:  # of an orchestrator that was killed since
            raise StaleError(f"sync {sync.sync_id}: sync {self.syncing} is still running")
        self.version, self.syncing = sync.version, sync.sync_id
        try:
            return record_response(await self._publish(sync, self.step, f"digest-{self.attempt}-{self.step}"))
        finally:
            self.syncing = 0

    async def _publish(self, sync: SyncRequest, step: int, digest: str) -> SyncReport:
        started, attempt = time.monotonic(), self.attempt
        members = sorted((item for item in self.engines if item.epoch == sync.epoch), key=lambda item: item.uid)
        reports = await asyncio.gather(
            *(self._report(sync, rank, engine, step, digest) for rank, engine in enumerate(members, 1))
        )
        wired = time.monotonic()
        await asyncio.sleep(self.sync_seconds)
        result = self.after_prepare()
        if asyncio.iscoroutine(result):
            await result
        return SyncReport(
            sync_id=sync.sync_id,
            epoch=sync.epoch,
            version=sync.version,
            step=step,
            attempt=attempt,
            digest=digest,
            wire_bytes=1000,
            stages={"cast": 0.0, "wire": wired - started},
            members=list(reports),
        )

    async def _report(
        self, sync: SyncRequest, rank: int, engine: StandInEngine, step: int, digest: str
    ) -> MemberReport:
        """What an engine says about an offer; nothing within the time limit when it hangs."""
        error, engine.prepare_error = engine.prepare_error, ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sync.timeout_seconds):
                await engine.awake.wait()
        error = error or ("" if engine.awake.is_set() else f"no report within {sync.timeout_seconds:g} s")
        if not error:
            engine.prepared = (sync.sync_id, sync.version, step, digest)
        return MemberReport(
            sync_id=sync.sync_id,
            epoch=sync.epoch,
            rank=rank,
            state="failed" if error else "prepared",
            version=sync.version,
            digest="" if error else digest,
            error=error,
        )

    async def _decide(self, request: web.Request) -> web.Response:
        self.decisions.append(await read_record(request, Decision))
        return web.json_response({})

    async def _steps(self, request: web.Request) -> web.Response:
        step = await read_record(request, StepRequest)
        if self.failure[0]:
            raise WorkerError(self.failure[1])
        if step.attempt != self.attempt:
            raise StaleError("another attempt's batch")
        if self.last is not None and self.last.step == step.step:
            return record_response(self.last)
        if step.step != self.step + 1:
            raise StaleError(f"step {step.step} after {self.step}")
        self.requests.setdefault(step.step, []).append(step)
        if self.syncing:
            self.steps_under_syncs.append(step.step)
        attempt, self.training = self.attempt, True
        await asyncio.sleep(self.step_seconds)
        if attempt != self.attempt:
            raise StaleError("restarted")
        self.step, self.training = step.step, False
        self.checkpoints[step.step] = step.orchestrator
        self.last = StepResult(step=step.step, metrics=self.metrics, checkpoint_error=self.checkpoint_error)
        return record_response(self.last)


class Cluster:
    """A trainer, engines and the orchestrator's process."""

    def __init__(self, folder: Path, engines: int = 2, **config: Any) -> None:
        self.network = next(_networks)
        self.folder = folder
        self.made = 0
        self.engines = [self.engine() for _ in range(engines)]
        self.trainer = StandInTrainer(address(self.network, 1), self.engines)
        self.host = address(self.network, 2)
        self.generation = 0
        self.process: asyncio.subprocess.Process | None = None
        self._write(config)

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        await asyncio.gather(self.trainer.start(), *(engine.start() for engine in self.engines))
        await self.launch()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.session.close()
        for engine in self.engines:
            engine.awake.set()
        for peer in (self.trainer, *self.engines):
            if peer.runner is not None:
                await cut(peer.runner)

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    async def launch(self) -> None:
        """Start the orchestrator's process and tell it who belongs."""
        await self.spawn()
        await self.until(self._told, "the orchestrator to take the group document")

    async def spawn(self) -> None:
        """Start the orchestrator's process; it knows of the group what it has on disk."""
        environ = os.environ | {
            "FP8RL_CONFIG": str(self.folder / "config.json"),
            "FP8RL_TOKEN_FILE": str(self.folder / "token"),
            "FP8RL_POD_NAME": "orchestrator-0",
            "FP8RL_POD_UID": "uid-orchestrator",
            "FP8RL_POD_IP": self.host,
            "FP8RL_ATTEMPT": str(self.trainer.attempt),
            "FP8RL_STATE_DIR": str(self.state_dir),
        }
        with (self.folder / "orchestrator.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fp8rl_workers.orchestrator", env=environ, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL the orchestrator."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)

    async def relaunch(self) -> None:
        """Start the orchestrator again after `kill`."""
        assert self.process is not None
        await self.process.wait()
        await self.launch()

    def engine(self) -> StandInEngine:
        """A new engine at an address of its own; it belongs to nothing yet."""
        self.made += 1
        return StandInEngine(f"engine-{self.made - 1}", address(self.network, 2 + self.made))

    async def tell(self, **changes: Any) -> None:
        """PUT a new group document."""
        self.generation += 1
        async with self.put_group(self.document(**changes)) as response:
            assert response.status == 200, await response.text()

    def put_group(self, document: GroupDocument) -> Any:
        """The request that hands a document over."""
        url = f"http://{self.host}:{ORCHESTRATOR_PORT}/v1/group"
        return self.session.put(url, data=document.model_dump_json())

    def document(self, **changes: Any) -> GroupDocument:
        """The trainer and all engines, in the current generation."""
        members = [GroupMember(pod="trainer-0", uid="uid-trainer", role="trainer", address=self.trainer.host)]
        members += [
            GroupMember(pod=item.pod, uid=item.uid, role="inference", address=item.host) for item in self.engines
        ]
        fields = {"job_uid": JOB, "attempt": self.trainer.attempt, "generation": self.generation, "members": members}
        return GroupDocument.model_validate(fields | changes)

    async def status(self) -> OrchestratorStatus:
        async with self.session.get(f"http://{self.host}:{ORCHESTRATOR_PORT}/v1/status") as response:
            return OrchestratorStatus.model_validate(await response.json())

    async def finish(self, seconds: float = 60.0) -> OrchestratorStatus:
        """Wait for the end of the run."""
        last: OrchestratorStatus | None = None

        async def over() -> bool:
            nonlocal last
            last = await self.status()
            assert last.waiting_for or last.phase in {"complete", "failed"}
            return last.phase in {"complete", "failed"}

        await self.until(over, "the run to end", seconds)
        assert last is not None
        return last

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
        """Wait for a condition (a function, or one that makes a coroutine)."""
        deadline = time.monotonic() + seconds
        while True:
            met = condition()
            if asyncio.iscoroutine(met):
                met = await met
            if met:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds} s for {what}\n{(self.folder / 'orchestrator.log').read_text()}")
            await asyncio.sleep(0.02)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of a file in the state folder."""
        return [json.loads(line) for line in (self.state_dir / name).read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("events.jsonl") if line["kind"] == kind]

    async def _told(self) -> bool:
        try:
            await self.tell()
        except aiohttp.ClientError:
            return False
        return True

    def _write(self, changes: dict[str, Any]) -> None:
        model = self.folder / "model"
        model.mkdir(parents=True)
        build_tokenizer(128).save(str(model / "tokenizer.json"))
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
        (self.folder / "token").write_text(TOKEN)
        config = {
            "name": "test",
            "namespace": "default",
            "uid": JOB,
            "model_path": str(model),
            "environment": {"id": "reverse-text", "args": {"min_length": 8, "max_length": 8}},
            "steps": 5,
            "batch_size": 8,
            "group_size": 4,
            "max_tokens": 12,
            "max_in_flight": 8,
            "max_off_policy_steps": 2,
            "evaluation": {"samples": 4},
            "weight_sync": {"timeout_seconds": 5.0},
        }
        (self.folder / "config.json").write_text(json.dumps(config | changes))
