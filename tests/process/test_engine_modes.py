"""The other ways to commit (reload, recompute), native FP8, and engines that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from engine_kit import Engine, Load, Trainer, one_token_weights, random_weights, resolved_for

from fp8rl_workers.config import WeightSyncConfig
from fp8rl_workers.errors import SyncError

pytestmark = pytest.mark.vllm

TOKEN_A, TOKEN_B = 65, 66


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Channel codes, every commit through vLLM's reload, running requests recomputed."""
    resolved, _ = resolved_for("channel")
    engine = Engine(
        tmp_path_factory.mktemp("engine"),
        resolved,
        weight_sync=WeightSyncConfig(mode="reload", kv_on_commit="recompute"),
    )
    try:
        engine.start().boot()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def trainer(engine):
    resolved, plan = resolved_for("channel")
    trainer = Trainer(resolved, plan)
    trainer.form([engine], timeout=10.0)
    yield trainer
    trainer.close()


def test_reloads_with_recomputed_kv_label_every_token_too(engine, trainer):
    """A preempted request computes its whole context anew: its later tokens know nothing of the old version."""
    weights = (one_token_weights(TOKEN_B, -1.0), one_token_weights(TOKEN_A, 1.0))
    trainer.publish(engine, weights[1], 1)
    with Load(engine, 4, [7, 8, 9], max_tokens=120) as load:
        for version in range(2, 22):
            trainer.publish(engine, weights[version % 2], version)
            time.sleep(0.05)
    assert not load.errors
    for answer in load.answers:
        labels = [v for v, n in answer["kv_transfer_params"]["fp8rl"]["spans"] for _ in range(n)]
        assert answer["choices"][0]["token_ids"] == [TOKEN_A if v % 2 else TOKEN_B for v in labels]
    assert any(len(answer["kv_transfer_params"]["fp8rl"]["spans"]) > 1 for answer in load.answers)
    state = engine.state()
    assert (state["load_path"], state["load_fallback"]) == ("reload", {"*": "weightSync.mode is reload"})
    assert engine.layers() == list(trainer.plan.quantized)


def test_a_damaged_byte_is_refused_in_reload_mode_too(engine, trainer):
    trainer.publish(engine, random_weights(1), 30)
    (report,) = trainer.prepare(random_weights(2), 31, corrupt="model.layers.0.self_attn.q_proj.weight_scale")
    assert report.state == "failed"
    assert "q_proj.weight_scale" in report.error
    assert engine.state()["version"] == 30


def test_an_engine_killed_in_a_sync_frees_the_trainer_and_comes_back_to_the_current_version(engine, trainer):
    core = children(engine.process.pid)
    assert core
    timer = threading.Timer(0.01, os.kill, (engine.process.pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    try:
        reports = [trainer.prepare(random_weights(seed), 40 + seed) for seed in range(3, 8)]
        assert reports[-1] == []
    except SyncError:
        pass
    assert time.monotonic() - start < 75
    engine.process.wait()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in core):
        assert time.monotonic() < end, "the engine core outlived its server"
        time.sleep(0.1)
    engine.start()
    engine.wait(lambda: engine.call("GET", "/fp8rl/v1/state")[1]["phase"] == "waiting", 30)
    engine.boot()
    assert engine.call("GET", "/fp8rl/v1/ready")[0] == 503
    trainer.form([engine])
    trainer.publish(engine, random_weights(9), 50)
    assert engine.call("GET", "/fp8rl/v1/ready")[0] == 200
    assert engine.generate([1, 2])["kv_transfer_params"]["fp8rl"]["spans"] == [[50, 16]]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
