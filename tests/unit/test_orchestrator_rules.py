"""Rules that somebody paid for, as far as the orchestrator answers for them; the number is the rule's in the project's list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from fp8rl_workers.config import LimitsConfig, OrchestratorConfig
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.metrics import ORCHESTRATOR_METRICS, STEP_METRICS, WorkerMetrics
from fp8rl_workers.models.tokenizer import build_tokenizer
from fp8rl_workers.orchestrator import health
from fp8rl_workers.orchestrator.dataset import order_of
from fp8rl_workers.orchestrator.dispatch import Replica
from fp8rl_workers.orchestrator.endings import JobFailedError, raise_if_broken
from fp8rl_workers.orchestrator.environments import Example, Trajectory, make_environment
from fp8rl_workers.orchestrator.evaluation import EvaluationError, evaluate
from fp8rl_workers.orchestrator.lineage import Lineage, Published
from fp8rl_workers.orchestrator.parts import drop_recorder, policy_of
from fp8rl_workers.orchestrator.progress import Progress
from fp8rl_workers.orchestrator.sampling import request_seed
from fp8rl_workers.orchestrator.staleness import Candidate, drop_reason


def config(folder: Path, **changes: Any) -> OrchestratorConfig:
    """A job whose prompts have 10 tokens and whose completions at most 12."""
    folder.mkdir(exist_ok=True)
    build_tokenizer(128).save(str(folder / "tokenizer.json"))
    fields = {
        "name": "j",
        "namespace": "n",
        "uid": "u",
        "model_path": str(folder),
        "environment": {"id": "reverse-text", "args": {"min_length": 8, "max_length": 8}},
        "steps": 5,
        "batch_size": 8,
        "group_size": 4,
        "max_tokens": 12,
    }
    return OrchestratorConfig.model_validate(fields | changes)


def replica(uid: str, nan_faults: int) -> Replica:
    return Replica(uid, uid, None, version=1, nan_faults=nan_faults)  # type: ignore[arg-type]


def test_rule_13_all_engines_not_finite_twice_fail_with_reason_nan_and_one_of_them_does_not() -> None:
    raise_if_broken([], [replica("a", 2), replica("b", 1)], "")
    with pytest.raises(JobFailedError, match="also after its weights were sent again") as caught:
        raise_if_broken([], [replica("a", 2), replica("b", 2)], "")
    assert caught.value.reason == "NaN"


def test_rule_14_an_unset_max_model_len_is_the_longest_prompt_plus_max_tokens(tmp_path: Path) -> None:
    job = config(tmp_path)
    environment = make_environment(job.environment.id, job.environment.args)
    assert policy_of(job, environment).max_model_len == 10 + 12
    assert policy_of(config(tmp_path, max_model_len=64), environment).max_model_len == 64
    with pytest.raises(InvalidInputError, match=r"longest prompt 10 \+ rollout.maxTokens 12 = 22 tokens is over .* 21"):
        policy_of(config(tmp_path, max_model_len=21), environment)


def test_rule_14_holds_for_every_turn_over_prompts_of_a_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "1+1="}\n{"id": "b", "prompt": "123+45+678="}\n')
    job = config(
        tmp_path / "model",
        environment={"id": "calculator", "args": {"max_turns": 3}},
        dataset={"path": str(prompts)},
        evaluation={"samples": 0},
    )
    environment = make_environment(job.environment.id, job.environment.args)
    assert policy_of(job, environment).max_model_len == len("123+45+678=") + 3 * (12 + len("-1999999998;"))


def test_rule_14_holds_for_the_prompts_of_the_evaluation_too(tmp_path: Path) -> None:
    longer = {"environment": {"id": "reverse-text", "args": {"min_length": 20, "max_length": 20}}}
    job = config(tmp_path, evaluation=longer)
    environment = make_environment(job.environment.id, job.environment.args)
    assert policy_of(job, environment).max_model_len == 22 + 12
    with pytest.raises(InvalidInputError, match=r"longest prompt 22 .* = 34 tokens is over .* 33"):
        policy_of(config(tmp_path, evaluation=longer, max_model_len=33), environment)
    unused = config(tmp_path, evaluation=longer | {"samples": 0})
    assert policy_of(unused, environment).max_model_len == 10 + 12


def test_rule_17_the_seed_drives_sampling_data_order_and_prompts(tmp_path: Path) -> None:
    environment = make_environment("reverse-text", {})

    def drawn(seed: int) -> tuple[object, ...]:
        return (
            request_seed(seed, 1, 2, 0),
            order_of(50, seed, 0, shuffle=True),
            [environment.example(seed, index, "train").prompt for index in range(8)],
            [environment.example(seed, index, "heldout").prompt for index in range(8)],
        )

    assert drawn(3) == drawn(3)
    assert all(one != other for one, other in zip(drawn(3), drawn(4), strict=True))
    assert policy_of(config(tmp_path, seed=7), environment).seed == 7


def test_rule_17_ratio_deviation_warns_over_a_tenth() -> None:
    limits = LimitsConfig()
    assert health.judge({"ratio_deviation": 0.1}, limits).warnings == {}
    assert health.judge({"ratio_deviation": 0.101}, limits).warnings == {
        "ratio_deviation": "ratio_deviation 0.101 is over limits.ratioDeviation 0.1"
    }


def test_rule_25_an_episode_over_too_many_versions_is_counted_by_its_length_and_the_warning_names_the_field(
    tmp_path: Path,
) -> None:
    assert drop_reason(Candidate(0, oldest_step=1, newest_step=3, finished=True), step=4, limit=2) is None
    assert drop_reason(Candidate(0, oldest_step=1, newest_step=4, finished=True), step=4, limit=2) == "tooLong"
    metrics, progress = WorkerMetrics(ORCHESTRATOR_METRICS), Progress(steps=5)
    drop_recorder(config(tmp_path, max_off_policy_steps=2), metrics, progress)("tooLong", 4, 300)
    text = generate_latest(metrics.registry).decode()
    assert 'fp8rl_dropped_samples_total{reason="tooLong"} 4.0' in text
    assert 'fp8rl_dropped_episode_tokens_sum{reason="tooLong"} 300.0' in text
    assert progress.warnings["tooLong"].endswith("maxOffPolicySteps 2: raise rollout.maxOffPolicySteps")


def test_rule_26_memory_utilization_the_parts_of_a_step_and_large_differences_are_exported() -> None:
    wanted = {
        "peak_memory_bytes",
        "mfu",
        "wait_seconds",
        "forward_backward_seconds",
        "optimizer_seconds",
        "cast_seconds",
        "checkpoint_seconds",
        "step_seconds",
        "logprob_diff_over_one",
    }
    assert wanted <= set(STEP_METRICS)
    names = [name for name, _ in STEP_METRICS.values()]
    assert len(names) == len(set(names))
    assert all(name.startswith("fp8rl_") for name in names)


def test_rule_26_a_trainer_that_waits_over_half_of_its_time_is_told_to_raise_the_replicas() -> None:
    assert health.waiting_warning([5.0] * 5, [10.0] * 5) is None
    text = health.waiting_warning([5.1] * 5, [10.0] * 5)
    assert text is not None
    assert "51 %" in text
    assert text.endswith("raise inference.replicas")


@pytest.mark.parametrize(("limit", "oldest"), [(8, 1001 - 264), (900, 1)])
def test_versions_that_samples_may_still_be_of_are_not_forgotten(limit: int, oldest: int) -> None:
    lineage = Lineage.of([], max_off_policy_steps=limit)
    for version in range(1, 1001):
        lineage.add(Published(version=version, attempt=0, step=version))
    assert next(iter(lineage.entries)) == oldest
    assert lineage.step_of(1000 - limit, attempt=0) == 1000 - limit


class Fails:
    """An environment whose first `failing` examples cannot be played; the others have reward 1."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    async def rollout(self, _: Any, example: Example) -> Trajectory:
        if int(example.id) < self.failing:
            raise ValueError("the context is full")
        return Trajectory((), 1.0)


async def test_an_evaluation_of_which_more_than_a_tenth_fails_has_no_reward(tmp_path: Path) -> None:
    job = config(tmp_path)
    policy = policy_of(job, make_environment(job.environment.id, job.environment.args))
    examples = [Example(id=str(number), prompt="<a>") for number in range(20)]
    figures = await evaluate(Fails(2), policy, examples)  # type: ignore[arg-type]
    assert (figures["reward_heldout"], figures["eval_samples"], figures["eval_failed"]) == (1.0, 18.0, 2.0)
    with pytest.raises(EvaluationError, match=r"^3 of 20 examples failed, over 10%; .*the context is full"):
        await evaluate(Fails(3), policy, examples)  # type: ignore[arg-type]
