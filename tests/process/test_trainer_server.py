"""The trainer's control API with real receivers: steps, syncs, epochs, faults."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from trainer_kit import make_config, make_folder, make_pod, make_samples

from fp8rl_workers.config import PodEnvironment, TrainerConfig
from fp8rl_workers.metrics import TRAINER_METRICS, WorkerMetrics
from fp8rl_workers.protocol import (
    Decision,
    Epoch,
    EpochReport,
    Member,
    StepRequest,
    StepResult,
    SyncReport,
    SyncRequest,
    TrainerState,
)
from fp8rl_workers.trainer.server import trainer_app
from fp8rl_workers.trainer.service import TrainerService
from fp8rl_workers.weights.cast import dequantize, quantize
from fp8rl_workers.weights.group import JoinError, join_group

PEER = Path(__file__).with_name("weight_peer.py")
HEADERS = {"Authorization": "Bearer token"}
addresses = itertools.count(1)


class Trainer:
    """A served trainer and the calls that tests make."""

    def __init__(self, service: TrainerService, client: Any, ip: str, port: int) -> None:
        self.service, self.client, self.ip, self.port = service, client, ip, port

    async def call(self, method: str, path: str, record: Any = None) -> tuple[int, str]:
        data = None if record is None else record.model_dump_json()
        response = await self.client.request(method, path, data=data, headers=HEADERS)
        return response.status, await response.text()

    async def state(self) -> TrainerState:
        return TrainerState.model_validate_json((await self.call("GET", "/v1/state"))[1])

    async def step(self, number: int, attempt: int = 0, **changes: Any) -> tuple[int, str]:
        samples = make_samples(8, number)
        request = StepRequest(
            job_uid="job-uid", attempt=attempt, step=number, samples=samples, orchestrator={"cursor": number}
        )
        return await self.call("POST", "/v1/steps", request.model_copy(update=changes))

    def epoch(self, number: int, engines: int, timeout: float = 60.0) -> Epoch:
        network = self.ip.rpartition(".")[0]
        engine = [
            Member(pod=f"engine-{r}", uid=f"uid-{r}", role="inference", address=f"{network}.{100 + r}", ranks=[r])
            for r in range(1, engines + 1)
        ]
        trainer = Member(pod="trainer-0", uid="uid-0", role="trainer", address=self.ip, ranks=[0])
        return Epoch(
            job_uid="job-uid",
            attempt=0,
            epoch=number,
            world_size=engines + 1,
            store_host=self.ip,
            store_port=self.port,
            timeout_seconds=timeout,
            members=[trainer, *engine],
        )

    async def sync(self, epoch: int, number: int, version: int) -> tuple[int, str]:
        request = SyncRequest(job_uid="job-uid", epoch=epoch, sync_id=number, version=version, timeout_seconds=60)
        return await self.call("POST", "/v1/syncs", request)


def make_address() -> str:
    """An address that no other test process of this machine uses."""
    pid = os.getpid()
    return f"127.{64 + pid % 128}.{pid // 128 % 256}.{next(addresses) % 90 + 1}"


@contextlib.asynccontextmanager
async def serving(config: TrainerConfig, pod: PodEnvironment) -> AsyncIterator[Trainer]:
    metrics = WorkerMetrics(TRAINER_METRICS)
    service = TrainerService(config, pod, metrics)
    async with TestClient(TestServer(trainer_app("token", metrics, service), host=pod.pod_ip)) as client:
        await service.start()
        yield Trainer(service, client, pod.pod_ip, config.weight_sync.port)
        service.close()


@contextlib.contextmanager
def peer(epoch: Epoch, rank: int, folder: Path, mode: str = "keep") -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    address = epoch.members[rank].address
    process = subprocess.Popen(
        [sys.executable, str(PEER), epoch.model_dump_json(), str(rank), address, str(folder), mode]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def trainer(model: Path, tmp_path: Path) -> AsyncIterator[Trainer]:
    config = make_config(model, checkpoint={"every_steps": 2}, weight_sync={"bucket_bytes": 100_000})
    async with serving(config, make_pod(tmp_path, ip=make_address())) as served:
        yield served


async def test_a_loaded_trainer_says_what_auto_became_and_asks_for_the_token(trainer: Trainer) -> None:
    state = await trainer.state()
    assert (state.phase, state.step, state.version) == ("idle", 0, 0)
    assert state.resolved is not None
    assert (state.resolved.recipe, state.resolved.wire, state.resolved.scale_format) == (
        "blockwise",
        "blockwise",
        "pow2",
    )
    assert len(state.resolved.quantized_layers) == 14
    assert len(state.tokenizer_digest) == 64
    assert (await trainer.client.get("/v1/state")).status == 401
    assert (await trainer.client.get("/readyz")).status == 200


async def test_steps_are_idempotent_and_in_order(trainer: Trainer) -> None:
    status, text = await trainer.step(1)
    assert status == 200, text
    assert (await trainer.step(1))[1] == text
    status, refusal = await trainer.step(3)
    assert (status, "step 3 is not the next one: 1 steps are done" in refusal) == (409, True)
    assert (await trainer.step(2, attempt=4))[0] == 409
    assert (await trainer.step(2, job_uid="other"))[0] == 409
    first, second = await asyncio.gather(trainer.step(2), trainer.step(2))
    assert first == second
    assert first[0] == 200
    assert (await trainer.state()).step == 2


async def test_a_living_trainer_gives_back_what_the_orchestrator_sent_with_the_last_step(trainer: Trainer) -> None:
    assert (await trainer.state()).orchestrator == {}
    for number in (1, 2, 3):
        assert (await trainer.step(number))[0] == 200
        state = await trainer.state()
        assert (state.step, state.orchestrator, state.resumed_step) == (number, {"cursor": number}, 0)


async def test_a_step_reports_and_exports_its_metrics(trainer: Trainer) -> None:
    result = StepResult.model_validate_json((await trainer.step(1))[1])
    missing = set(TRAINER_METRICS) - set(result.metrics)
    assert missing <= {"mfu"}
    assert result.metrics["train_tokens"] == sum(len(sample.tokens) for sample in make_samples(8, 1))
    text = await (await trainer.client.get("/metrics")).text()
    assert "fp8rl_step 1.0" in text
    assert f"fp8rl_loss {result.metrics['loss']}" in text


async def test_a_bad_sample_is_refused_and_changes_nothing(trainer: Trainer) -> None:
    bad = make_samples(1)[0].model_copy(update={"logprobs": [0.0]})
    status, text = await trainer.step(1, samples=[bad])
    assert (status, "samples[0]" in text) == (400, True)
    assert (await trainer.state()).phase == "idle"
    assert (await trainer.step(1))[0] == 200


async def test_two_receivers_get_weights_that_dequantize_to_what_the_trainer_computes_with(
    trainer: Trainer, tmp_path: Path
) -> None:
    epoch = trainer.epoch(1, 2)
    with peer(epoch, 1, tmp_path / "a"), peer(epoch, 2, tmp_path / "b"):
        status, text = await trainer.call("PUT", "/v1/epoch", epoch)
        assert EpochReport.model_validate_json(text).joined == ["trainer-0", "engine-1", "engine-2"], (status, text)
        for version in (1, 2):
            report = SyncReport.model_validate_json((await trainer.sync(1, version, version))[1])
            assert [(m.state, m.digest) for m in report.members] == [("prepared", report.digest)] * 2, report
            assert (report.step, report.version) == (version - 1, version)
            check_received(trainer, tmp_path / "a" / f"{version}.pt")
            check_received(trainer, tmp_path / "b" / f"{version}.pt")
            decision = Decision(job_uid="job-uid", epoch=1, sync_id=version, version=version, committed=True)
            assert (await trainer.call("POST", "/v1/syncs/decision", decision))[0] == 200
            assert (await trainer.step(version))[0] == 200
    assert (await trainer.state()).version == 2
    text = await (await trainer.client.get("/metrics")).text()
    assert 'fp8rl_weight_sync_stage_seconds_count{stage="cast"} 2.0' in text
    assert "fp8rl_policy_version 2.0" in text


async def appears(path: Path) -> None:
    def wait() -> None:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.05)

    await asyncio.to_thread(wait)


def check_received(trainer: Trainer, path: Path) -> None:
    received = torch.load(path)
    loaded = trainer.service._loaded
    assert loaded is not None
    policy = loaded.trainer.policy
    parameters = dict(policy.module.named_parameters())
    for name, weight in policy.weights():
        form = "blockwise" if name in policy.quantized else "bf16"
        parts = quantize(name, weight, form)
        assert all(
            torch.equal(received[name + suffix].view(torch.uint8), part.view(torch.uint8))
            for suffix, part in parts.items()
        )
        assert torch.equal(dequantize({suffix: received[name + suffix] for suffix in parts}, form), parameters[name])


async def test_a_sync_is_idempotent_and_versions_are_never_used_twice(trainer: Trainer, tmp_path: Path) -> None:
    epoch = trainer.epoch(1, 1)
    assert (await trainer.sync(1, 1, 1))[0] == 503
    with peer(epoch, 1, tmp_path / "a"):
        await trainer.call("PUT", "/v1/epoch", epoch)
        status, text = await trainer.sync(1, 1, 5)
        assert status == 200
        assert await trainer.sync(1, 1, 5) == (200, text)
        for refused, reason in (
            (trainer.sync(1, 2, 5), "version 5 was used before"),
            (trainer.sync(1, 1, 6), "not after sync 1"),
            (trainer.sync(2, 3, 7), "this trainer is in epoch 1"),
        ):
            status, text = await refused
            assert (status, reason in text) == (409, True), text
        again = SyncReport.model_validate_json((await trainer.sync(1, 2, 6))[1])
        first = SyncReport.model_validate_json((await trainer.sync(1, 3, 7))[1])
        assert (again.digest, again.step) == (first.digest, first.step)
    assert (tmp_path / "version").read_text() == "7"


async def test_a_sync_is_answered_while_a_step_runs(trainer: Trainer, tmp_path: Path) -> None:
    epoch = trainer.epoch(1, 1)
    loaded = trainer.service._loaded
    assert loaded is not None
    with peer(epoch, 1, tmp_path / "a"):
        await trainer.call("PUT", "/v1/epoch", epoch)
        forward = loaded.trainer._forward_backward

        def slow(*arguments: Any) -> Any:
            time.sleep(1.5)
            return forward(*arguments)

        loaded.trainer._forward_backward = slow
        step = asyncio.create_task(trainer.step(1))
        await asyncio.sleep(0.2)
        assert (await trainer.state()).phase == "training"
        report = SyncReport.model_validate_json((await trainer.sync(1, 1, 1))[1])
        assert not step.done()
        assert (report.step, report.members[0].state) == (0, "prepared")
        assert (await step)[0] == 200


async def test_a_receiver_killed_in_the_middle_ends_the_sync_and_the_next_epoch_works(
    trainer: Trainer, tmp_path: Path
) -> None:
    first = trainer.epoch(1, 2)
    with peer(first, 1, tmp_path / "a", "hang") as lost, peer(first, 2, tmp_path / "b"):
        await trainer.call("PUT", "/v1/epoch", first)
        sync = asyncio.create_task(trainer.sync(1, 1, 1))
        await appears(tmp_path / "a" / "offered")
        start = time.monotonic()
        lost.send_signal(signal.SIGKILL)
        status, text = await sync
        assert time.monotonic() - start < 10
        assert status == 200
        report = SyncReport.model_validate_json(text)
        assert report.members[0].state == "failed"
    second = trainer.epoch(2, 1)
    with peer(second, 1, tmp_path / "c"):
        status, text = await trainer.call("PUT", "/v1/epoch", second)
        assert status == 200, text
        report = SyncReport.model_validate_json((await trainer.sync(2, 2, 2))[1])
        assert report.members[0].state == "prepared"
    assert (await trainer.call("PUT", "/v1/epoch", first))[0] == 409


async def test_an_aborted_sync_frees_the_publication(trainer: Trainer, tmp_path: Path) -> None:
    epoch = trainer.epoch(1, 1)
    with peer(epoch, 1, tmp_path / "a", "hang"):
        await trainer.call("PUT", "/v1/epoch", epoch)
        sync = asyncio.create_task(trainer.sync(1, 1, 1))
        await appears(tmp_path / "a" / "offered")
        start = time.monotonic()
        decision = Decision(job_uid="job-uid", epoch=1, sync_id=1, version=1, committed=False)
        assert (await trainer.call("POST", "/v1/syncs/decision", decision))[0] == 200
        report = SyncReport.model_validate_json((await sync)[1])
        assert time.monotonic() - start < 3
        assert report.members[0].state == "failed"


async def test_missing_members_are_named_by_pod(trainer: Trainer) -> None:
    epoch = trainer.epoch(1, 2, timeout=3.0)
    engine = asyncio.create_task(
        asyncio.to_thread(join_group, epoch, 1, "uid-1", epoch.members[1].address, token="token")
    )
    report = EpochReport.model_validate_json((await trainer.call("PUT", "/v1/epoch", epoch))[1])
    assert (report.joined, report.missing) == (["trainer-0", "engine-1"], ["engine-2"])
    with pytest.raises(JoinError, match=r"ranks \[2\] are missing"):
        await engine


async def test_a_new_epoch_does_not_wait_for_one_that_never_forms(trainer: Trainer) -> None:
    hopeless = asyncio.create_task(trainer.call("PUT", "/v1/epoch", trainer.epoch(1, 1, timeout=60.0)))
    await asyncio.sleep(0.5)
    start = time.monotonic()
    status, text = await trainer.call("PUT", "/v1/epoch", trainer.epoch(2, 0))
    assert (status, EpochReport.model_validate_json(text).joined) == (200, ["trainer-0"])
    assert time.monotonic() - start < 5
    assert (await hopeless)[0] == 500


async def test_a_resumed_trainer_continues_bit_for_bit_and_answers_the_last_step_again(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, checkpoint={"every_steps": 2})
    through = tmp_path / "through"
    async with serving(config, make_pod(through, ip=make_address())) as whole:
        for number in range(1, 6):
            assert (await whole.step(number))[0] == 200
        assert whole.service._loaded is not None
        expected = whole.service._loaded.trainer.state()
    stopped = tmp_path / "stopped"
    async with serving(config, make_pod(stopped, ip=make_address())) as first:
        for number in range(1, 4):
            await first.step(number)
        last = await first.step(3)
    async with serving(config, make_pod(stopped, attempt=1, ip=make_address())) as second:
        state = await second.state()
        assert (state.step, state.resumed_step, state.orchestrator) == (2, 2, {"cursor": 2})
        assert (await second.step(2, attempt=1))[0] == 200
        again = StepResult.model_validate_json((await second.step(3, attempt=1))[1])
        assert again.metrics["loss"] == StepResult.model_validate_json(last[1]).metrics["loss"]
        for number in (4, 5):
            await second.step(number, attempt=1)
        assert second.service._loaded is not None
        resumed = second.service._loaded.trainer.state()
    assert same(expected, resumed)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


async def test_failed_checkpoints_are_reported_and_the_third_in_a_row_is_fatal(model: Path, tmp_path: Path) -> None:
    config = make_config(model, checkpoint={"every_steps": 1})
    async with serving(config, make_pod(tmp_path, ip=make_address())) as trainer:
        assert StepResult.model_validate_json((await trainer.step(1))[1]).checkpoint_error == ""
        loaded = trainer.service._loaded
        assert loaded is not None
        save = loaded.checkpoints.save

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        loaded.checkpoints.save = full
        error = StepResult.model_validate_json((await trainer.step(2))[1]).checkpoint_error
        assert "checkpoint of step 2: [Errno 28] No space left on device; the previous one is still current" in error
        await trainer.step(3)
        loaded.checkpoints.save = save
        assert StepResult.model_validate_json((await trainer.step(4))[1]).checkpoint_error == ""
        loaded.checkpoints.save = full
        for number in (5, 6):
            assert (await trainer.step(number))[0] == 200
        status, text = await trainer.step(7)
        assert (status, "CheckpointFailed" in text) == (500, True)
        state = await trainer.state()
        assert (state.phase, state.reason) == ("failed", "CheckpointFailed")
        assert (await trainer.step(8))[0] == 500


async def test_a_loss_that_is_not_finite_fails_the_trainer_with_reason_nan(trainer: Trainer) -> None:
    loaded = trainer.service._loaded
    assert loaded is not None
    next(loaded.trainer.policy.module.parameters()).data[0, 0] = float("nan")
    status, text = await trainer.step(1)
    assert (status, '"NaN"' in text) == (500, True), text
    state = await trainer.state()
    assert (state.phase, state.reason) == ("failed", "NaN")


async def test_a_folder_that_does_not_fit_is_reason_invalid_model(model: Path, tmp_path: Path) -> None:
    async with serving(make_config(tmp_path / "nowhere"), make_pod(tmp_path / "s", ip=make_address())) as trainer:
        state = await trainer.state()
        assert (state.phase, state.reason) == ("failed", "InvalidModel")
        assert "config.json does not exist" in state.message
        assert (await trainer.client.get("/readyz")).status == 503
        assert (await trainer.client.get("/healthz")).status == 200
        assert (await trainer.step(1))[0] == 500
