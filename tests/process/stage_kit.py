"""Two real engines, a real trainer, and the orchestrator's own parts in the test's process, so that it can be struck anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from engine_kit import JOB_UID, MODEL_CONFIG, TOKEN, Engine, resolved_for
from trainer_kit import make_samples

from fp8rl_workers.config import OrchestratorConfig, PodEnvironment, TrainerConfig, WeightSyncConfig
from fp8rl_workers.models.tokenizer import EOS_ID, build_tokenizer
from fp8rl_workers.orchestrator.client import open_session
from fp8rl_workers.orchestrator.parts import Parts, build_parts
from fp8rl_workers.orchestrator.training import Training
from fp8rl_workers.protocol import GroupDocument, GroupMember, StepRequest

TIMEOUT_SECONDS = 8.0
BOOT_SECONDS = 200.0
PRECISION = {"recipe": "blockwise", "wire": "blockwise", "scale_format": "pow2"}


class OrchestratorDiedError(Exception):
    """Stands for SIGKILL of the orchestrator: nothing that comes after it is run."""


def address(host: int) -> str:
    """An address of this machine that no other test process uses."""
    pid = os.getpid()
    return f"127.{192 + (pid >> 8) % 32}.{pid % 256}.{host}"


def write_trainable_model(folder: Path) -> Path:
    """The engine kit's tiny model with random weights and a tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(Qwen3Config(**MODEL_CONFIG), dtype=torch.float32)
    module.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(128).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {EOS_ID}}}')
    return folder


class Stage:
    """The processes, and where the orchestrator's state lies. `attempt`: the trainer's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_trainable_model(folder / "model")
        self.attempt = 0
        self.generation = 0
        self.trainer: subprocess.Popen[bytes] | None = None
        resolved, _ = resolved_for("blockwise")
        sync = WeightSyncConfig(timeout_seconds=TIMEOUT_SECONDS)
        self.engines = [
            Engine(
                self._made(f"engine-{n}"),
                resolved,
                address=address(10 + n),
                name=f"inference-{n}",
                uid=f"engine-uid-{n}",
                weight_sync=sync,
                environ={"OMP_NUM_THREADS": "1"},
            )
            for n in range(2)
        ]
        self.shared = {
            "name": "stage",
            "namespace": "default",
            "uid": JOB_UID,
            "model_path": str(self.model),
            "precision": PRECISION,
            "weight_sync": {"timeout_seconds": TIMEOUT_SECONDS},
        }
        (folder / "token").write_text(TOKEN)

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name

    def start_trainer(self) -> None:
        """Start the trainer of the current attempt."""
        fields = self.shared | {"optimizer": {"learning_rate": 1e-3, "grad_clip": 1.0}, "steps": 1000}
        config = TrainerConfig.model_validate(fields | {"checkpoint": {"every_steps": 1}})
        (self.folder / "trainer.json").write_text(config.model_dump_json())
        environ = os.environ | {
            "FP8RL_CONFIG": str(self.folder / "trainer.json"),
            "FP8RL_TOKEN_FILE": str(self.folder / "token"),
            "FP8RL_POD_NAME": "trainer-0",
            "FP8RL_POD_UID": f"trainer-uid-{self.attempt}",
            "FP8RL_POD_IP": address(5),
            "FP8RL_ATTEMPT": str(self.attempt),
            "FP8RL_STATE_DIR": str(self.folder / "trainer"),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "trainer.log").open("ab") as log:
            command = [sys.executable, "-m", "fp8rl_workers.trainer"]
            self.trainer = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def next_attempt(self) -> None:
        """Start the trainer again, as the operator does after it was lost."""
        assert self.trainer is not None
        self.trainer.wait()
        self.attempt += 1
        self.start_trainer()

    def document(self) -> GroupDocument:
        """The operator's word on who may belong."""
        self.generation += 1
        trainer = GroupMember(pod="trainer-0", uid=f"trainer-uid-{self.attempt}", role="trainer", address=address(5))
        engines = [
            GroupMember(pod=item.name, uid=item.uid, role="inference", address=item.address) for item in self.engines
        ]
        return GroupDocument(
            job_uid=JOB_UID, attempt=self.attempt, generation=self.generation, members=[trainer, *engines]
        )

    @contextlib.asynccontextmanager
    async def orchestrator(self) -> AsyncIterator[Orchestrator]:
        """A new orchestrator on the state that the one before left."""
        fields = self.shared | {
            "environment": {"id": "reverse-text", "args": {"min_length": 8, "max_length": 8}},
            "steps": 1000,
            "batch_size": 8,
            "group_size": 4,
            "max_tokens": 12,
        }
        pod = PodEnvironment(
            config=self.folder / "orchestrator.json",
            token=TOKEN,
            pod_name="orchestrator-0",
            pod_uid="orchestrator-uid",
            pod_ip=address(6),
            attempt=self.attempt,
            state_dir=self.folder / "orchestrator",
        )
        async with open_session(TOKEN) as session:
            parts = build_parts(OrchestratorConfig.model_validate(fields), pod, session)
            parts.members.accept(self.document())
            yield Orchestrator(self, parts)

    def stop(self) -> None:
        """End everything."""
        for engine in self.engines:
            if engine.process is not None and engine.process.poll() is None:
                os.killpg(engine.process.pid, signal.SIGCONT)
            engine.stop()
        if self.trainer is not None:
            self.trainer.kill()
            self.trainer.wait()

    def served(self) -> list[tuple[int, str]]:
        """Version and digest that each engine serves, by its own word."""
        states = [engine.state() for engine in self.engines]
        return [(state["version"], state["digest"]) for state in states]


class Orchestrator:
    """The orchestrator's parts, driven by the test."""

    def __init__(self, stage: Stage, parts: Parts) -> None:
        self.stage = stage
        self.parts = parts
        self.conductor = parts.group.conductor

    async def attach(self) -> list[str]:
        """Attach to the trainer as the loop does; returns what became of a sync that was under way."""
        before = len(self.recovered())
        polling = asyncio.create_task(self.parts.members.run())
        try:
            async with asyncio.timeout(60):
                await Training(self.parts).attach()
        finally:
            polling.cancel()
        return self.recovered()[before:]

    def recovered(self) -> list[str]:
        """Messages of all recoveries in this state folder."""
        path = self.parts.state_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition('"message": "')[2].partition('"')[0] for line in lines if "SyncRecovered" in line]

    async def settle(self, engines: int, seconds: float) -> float:
        """Keep the group until `engines` replicas serve what the trainer holds; returns the seconds that it took."""
        start = time.monotonic()
        async with asyncio.timeout(seconds):
            while True:
                if await self.parts.group.settle() and self.serving() == engines:
                    return time.monotonic() - start
                await asyncio.sleep(0.1)

    def serving(self) -> int:
        """Replicas that get requests."""
        return sum(item.serving for item in self.parts.dispatcher.replicas.values())

    @property
    def newest(self) -> Any:
        """The newest published version."""
        return self.parts.lineage.newest

    async def step(self) -> int:
        """Let the trainer take its next step; returns its number."""
        trainer = self.parts.members.trainer
        assert trainer is not None
        number = (await trainer.state()).step + 1
        request = StepRequest(job_uid=JOB_UID, attempt=self.stage.attempt, step=number, samples=make_samples(8, number))
        await trainer.step(request)
        return number

    def strike(self, place: str, act: Callable[[], Any], *, after: bool) -> None:
        """Run `act` once, before or after the conductor's method `place` (no coroutine)."""
        method = getattr(self.conductor, place)

        def struck(*arguments: Any) -> Any:
            setattr(self.conductor, place, method)
            if not after:
                act()
            result = method(*arguments)
            if after:
                act()
            return result

        setattr(self.conductor, place, struck)

    def die_after_first_commit(self, first: str) -> None:
        """The orchestrator dies once the engine with uid `first` has committed, before any other is told."""
        commit: Callable[..., Awaitable[Any]] = self.conductor._commit
        done = asyncio.Event()

        async def struck(uid: str, *arguments: Any) -> Any:
            if uid == first:
                event = await commit(uid, *arguments)
                done.set()
                return event
            await done.wait()
            raise OrchestratorDiedError

        self.conductor._commit = struck  # type: ignore[method-assign]
