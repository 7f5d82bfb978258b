"""One real job, `fp8rl run` with two vLLM engines and a trainer, that lives through the loss of each of its parts, in order."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from typing import Any

import pytest
from drills import BOOT_SECONDS, GO_ON_SECONDS, RealRun, digest_of_checkpoint, same_bits, state_after_loading

from fp8rl_operator.local.run import model_cache
from fp8rl_workers.models.recipe import RECIPES
from fp8rl_workers.protocol import ResolvedPrecision

pytestmark = pytest.mark.vllm

EVERY_STEPS = 5
BATCH, GROUP = 16, 4
LIMIT = 2
RESOLVED = ResolvedPrecision(recipe="blockwise", wire="blockwise", scale_format="pow2")
SUMMARY = {
    "reward_first",
    "reward_last",
    "steps",
    "mismatch_kl_mean",
    "mismatch_kl_max",
    "entropy_mean",
    "off_policy_max",
    "dropped",
    "weight_sync_seconds_p50",
    "weight_versions",
    "wire",
    "wall_seconds",
}


def settings(steps: int) -> dict[str, Any]:
    """Small batches that the rollout dump holds whole; no waiting between attempts."""
    return {
        "rollout__steps": steps,
        "rollout__batchSize": BATCH,
        "rollout__groupSize": GROUP,
        "rollout__maxOffPolicySteps": LIMIT,
        "trainer__checkpoint__everySteps": EVERY_STEPS,
        "evaluation__everySteps": 0,
        "evaluation__samples": 16,
        "weightSync__timeoutSeconds": 20,
        "failurePolicy__backoffSeconds": 0,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = RealRun(tmp_path_factory.mktemp("drills") / "run")
    run.start(**settings(1_000_000))
    try:
        run.timed("boot", lambda: run.step() >= 3 and whole_group(run), BOOT_SECONDS, "the first steps")
        yield run
    finally:
        run.stop()
        print(f"seconds: {json.dumps(run.times)}")


def whole_group(run: RealRun) -> bool:
    """Whether the last epoch has all members: a trainer and two engines."""
    formed = run.events("EpochFormed")
    return bool(formed) and "world of 3" in formed[-1]["message"]


def same_everywhere(run: RealRun, versions: int) -> None:
    """Poll both engines until they have shown `versions` versions each; versions and digests are the published ones."""
    addresses = [pod["address"] for pod in run.pods("inference")]
    assert len(set(addresses)) == 2
    seen: dict[str, dict[int, str]] = {address: {} for address in addresses}

    def poll() -> bool:
        for address in addresses:
            state = run.engine_state(address)
            if state.get("version"):
                seen[address][state["version"]] = state["digest"]
        return len(seen[addresses[0]].keys() & seen[addresses[1]].keys()) >= versions

    run.until(poll, GO_ON_SECONDS, f"{versions} versions on both engines")
    published = {version: item["digest"] for version, item in run.published().items()}
    for served in seen.values():
        assert served == {version: published[version] for version in served}


def test_two_engines_on_different_addresses_serve_the_same_version_and_digest_after_every_sync(run):
    same_everywhere(run, 8)
    since = run.events("EpochFormed")[-1]["time"]
    assert {item["metrics"]["fenced"] for item in run.records("sync") if item["time"] > since} == {0.0}
    assert all("on 2 engines" in item["message"] for item in run.events("Published") if item["time"] > since)


def test_a_killed_engine_is_shed_and_comes_back_with_the_current_weights(run):
    before, killed, other = run.step(), *run.pods("inference")
    run.kill("inference")
    run.timed(
        "engine killed: three more steps", lambda: run.step() >= before + 3, GO_ON_SECONDS, "steps with one engine"
    )
    assert "world of 2" in run.events("EpochFormed")[-1]["message"]
    run.timed(
        "engine killed: back in the group",
        lambda: whole_group(run) and run.engine_state(killed["address"]),
        BOOT_SECONDS,
        "the engine to rejoin",
    )
    same_everywhere(run, 3)
    assert run.places("inference") == {killed["address"]: 1, other["address"]: 0}
    assert run.status()["attempt"] == 0


def test_a_killed_trainer_goes_on_from_its_checkpoint_and_first_publishes_what_it_holds(run):
    run.until(lambda: run.step() % EVERY_STEPS == 2, GO_ON_SECONDS, "a step between two checkpoints")
    engines = run.places("inference")
    run.kill("trainer")
    run.timed("trainer killed: new attempt", lambda: run.status()["attempt"] == 1, GO_ON_SECONDS, "the new attempt")
    place = run.checkpoint()
    held = digest_of_checkpoint(place, builtin_model(), RESOLVED)
    run.timed("new attempt: first step", lambda: run.records("step", 1), GO_ON_SECONDS, "the first step again")
    first = run.records("sync", 1)[0]
    assert run.places("inference") == engines
    last = max(item["step"] for item in run.records("step", 0))
    assert place.name == f"step-{first['step']:08d}-0"
    assert 0 <= last - first["step"] <= EVERY_STEPS - 1
    assert run.records("step", 1)[0]["step"] == first["step"] + 1
    assert digests_of(run, attempt=0, step=first["step"]) == {held}
    assert digests_of(run, attempt=1, step=first["step"]) == {held}


def test_a_killed_orchestrator_comes_back_and_nobody_else_is_restarted(run):
    before_all = [run.places(role) for role in ("inference", "trainer")]
    done_again = max(item["step"] for item in run.records("step", 0)) + 1
    run.until(lambda: run.step() > done_again, GO_ON_SECONDS, "steps that were never done before")
    for number in (1, 2):
        before = run.step()
        run.kill("orchestrator")
        name = f"orchestrator killed: three more steps ({number})"
        run.timed(name, lambda before=before: run.step() >= before + 3, GO_ON_SECONDS, "the run to go on")
    assert [run.places(role) for role in ("inference", "trainer")] == before_all
    assert run.status()["attempt"] == 1
    same_everywhere(run, 3)


def test_ctrl_c_ends_every_process_and_resume_goes_on_with_the_state_that_was_saved(run):
    run.until(lambda: run.step() % EVERY_STEPS == 3, GO_ON_SECONDS, "a step between two checkpoints")
    assert len(run.processes()) >= 2 * 4  # a shim and a worker for each of four pods
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 130
    run.times["ctrl-c"] = round(time.monotonic() - start, 1)
    assert run.times["ctrl-c"] < 10
    assert run.processes() == []
    place, last = run.checkpoint(), run.step()
    held = digest_of_checkpoint(place, builtin_model(), RESOLVED)
    assert same_bits(*state_after_loading(place, builtin_model()))
    run.start("--resume", **settings(last + 2 * EVERY_STEPS))
    first = run.timed("resume: boot", lambda: run.records("sync", 2), BOOT_SECONDS, "the first weights")[0]
    assert place.name == f"step-{first['step']:08d}-1"
    assert digests_of(run, attempt=1, step=first["step"]) == {held}
    assert digests_of(run, attempt=2, step=first["step"]) == {held}
    assert run.process.wait(GO_ON_SECONDS) == 0
    assert run.processes() == []
    assert run.step() == last + 2 * EVERY_STEPS


def test_the_end_is_complete_and_the_summary_holds_what_it_must(run):
    conditions = {item["type"]: (item["status"], item["reason"]) for item in run.status()["conditions"]}
    assert conditions["Complete"] == ("True", "StepsDone")
    assert conditions["Failed"][0] == "False"
    summary = json.loads((run.out / "summary.json").read_text())
    assert set(summary) >= SUMMARY
    assert summary["steps"] == run.step()
    assert 0 <= summary["off_policy_max"] <= LIMIT
    assert 0 <= summary["mismatch_kl_mean"] <= summary["mismatch_kl_max"] < 1.5e-2
    assert summary["wire"] == "blockwise"
    ages = [item["metrics"]["off_policy_max"] for item in run.records("step") if "off_policy_max" in item["metrics"]]
    assert max(ages) <= LIMIT
    assert len(run.records("step")) - len(ages) <= 2  # done by a trainer whose next attempt met a new orchestrator


def test_versions_only_grow_over_all_attempts_and_samples_name_only_published_ones(run):
    versions = [item["version"] for item in run.records("sync")]
    assert versions == sorted(set(versions))
    attempt_of = {item["version"]: item["attempt"] for item in run.records("sync")}
    assert set(attempt_of.values()) == {0, 1, 2}
    for row in run.lines("rollouts.jsonl"):
        spans = [version for version, _ in row["versions"]]
        assert spans == sorted(set(spans))
        assert len({attempt_of[version] for version in spans if version in attempt_of}) <= 1
        assert sum(tokens for _, tokens in row["versions"]) == sum(row["mask"])
        assert row["age"] <= LIMIT


def test_no_step_is_skipped_and_every_prompt_is_trained_once(run):
    steps = run.step()
    assert {item["step"] for item in run.records("step")} == set(range(1, steps + 1))
    again = Counter(item["step"] for item in run.records("step"))
    assert sum(again.values()) - len(again) <= 2 * (EVERY_STEPS - 1)  # a killed trainer, a stopped run
    dumps: dict[int, list[int]] = {}
    for row in run.lines("rollouts.jsonl"):
        if row["sample"] == 0:
            dumps[row["step"]] = [*dumps.get(row["step"], []), row["position"]][-BATCH // GROUP :]
    trained = Counter(position for positions in dumps.values() for position in positions)
    missing = steps - len(dumps)  # trained, but their orchestrator was killed before it wrote them down
    assert missing <= 4
    assert set(trained.values()) == {1}
    untold = set(range(steps * BATCH // GROUP)) - set(trained)
    assert len(untold) == missing * BATCH // GROUP


def builtin_model():
    """The folder of the sample's model."""
    recipe = RECIPES["reverse-text-tiny"]
    return model_cache() / "models" / f"{recipe.name}-{recipe.digest()}"


def digests_of(run: RealRun, attempt: int, step: int) -> set[str]:
    """Digests under which an attempt published a step."""
    return {item["digest"] for item in run.published().values() if (item["attempt"], item["step"]) == (attempt, step)}


def test_times_of_recovery_are_told(run):
    assert all(
        seconds < GO_ON_SECONDS for name, seconds in run.times.items() if re.search(r"killed: (three|new)", name)
    )
