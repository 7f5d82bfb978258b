"""Prompt cursor, sampling protocol, resume, limits: the orchestrator's small pure parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fp8rl_workers.config import DatasetConfig, LimitsConfig
from fp8rl_workers.errors import InvalidInputError, NonFiniteError, WorkerError
from fp8rl_workers.orchestrator import dataset, health
from fp8rl_workers.orchestrator.client import EngineReleaseError, answer_of, raise_for_release
from fp8rl_workers.orchestrator.dataset import Cursor, order_of, prompt_set, read_examples
from fp8rl_workers.orchestrator.environments import make_environment
from fp8rl_workers.orchestrator.journal import Journal
from fp8rl_workers.orchestrator.sampling import (
    EngineLostError,
    SamplingOptions,
    parse_completion,
    refusal,
    request_body,
    request_seed,
    stop_tokens,
)
from fp8rl_workers.orchestrator.state import RunState, resume
from fp8rl_workers.protocol import StepRequest, TrainerState


def test_a_cursor_hands_out_each_position_once_and_what_was_in_flight_again() -> None:
    cursor = Cursor()
    assert [cursor.take() for _ in range(4)] == [0, 1, 2, 3]
    cursor.consume(1)
    cursor.give_back(2)
    resumed = Cursor.from_json(cursor.to_json())
    assert [resumed.take() for _ in range(4)] == [0, 2, 3, 4]


def test_a_given_back_position_comes_before_new_ones() -> None:
    cursor = Cursor()
    for _ in range(3):
        cursor.take()
    cursor.give_back(1)
    assert cursor.take() == 1
    assert cursor.take() == 3


def test_every_pass_over_a_file_is_another_permutation_of_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"id": "{n}", "prompt": "<{n}>"}}' for n in range(10)))
    at = prompt_set(DatasetConfig(path=str(path)), make_environment("reverse-text", {}), seed=3)
    first, second = [[at(turn * 10 + n).id for n in range(10)] for turn in (0, 1)]
    assert sorted(first) == sorted(second) == [str(n) for n in range(10)]
    assert first != second
    assert first == [str(n) for n in order_of(10, 3, 0, shuffle=True)]
    assert order_of(4, 3, 0, shuffle=False) == [0, 1, 2, 3]


def test_a_pass_over_a_file_is_shuffled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"id": "{n}", "prompt": "<{n}>"}}' for n in range(10)))
    turns: list[int] = []

    def counted(length: int, seed: int, turn: int, *, shuffle: bool) -> list[int]:
        turns.append(turn)
        return order_of(length, seed, turn, shuffle=shuffle)

    monkeypatch.setattr(dataset, "order_of", counted)
    at = prompt_set(DatasetConfig(path=str(path)), make_environment("reverse-text", {}), seed=3)
    for position in (*range(12), 9, *range(12, 20)):
        at(position)
    assert turns == [0, 1]


def test_all_faults_of_a_prompt_file_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "1", "prompt": "a"}\n{"id": "2"}\n{"nonsense": 1}\n')
    with pytest.raises(InvalidInputError, match=r"line 2: prompt: Field required.*line 3"):
        read_examples(path)
    with pytest.raises(InvalidInputError, match=r"cannot read .*missing.jsonl"):
        read_examples(tmp_path / "missing.jsonl")
    path.write_text("")
    with pytest.raises(InvalidInputError, match="it holds no line"):
        read_examples(path)


def test_a_request_asks_for_processed_logprobs_of_sampled_tokens_with_a_seed() -> None:
    options = SamplingOptions(temperature=0.7, top_p=0.9, max_tokens=16, stop=("\n",), stop_token_ids=(2,))
    body = request_body([5, 6], options, max_tokens=99, seed=1, salt="job/3")
    assert body == {
        "token_ids": [5, 6],
        "cache_salt": "job/3",
        "stream": False,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 16,
            "logprobs": 0,
            "detokenize": True,
            "skip_special_tokens": False,
            "stop": ["\n"],
            "stop_token_ids": [2],
            "seed": 1,
        },
    }


def test_seeds_differ_by_place_and_repeat_for_the_same_place() -> None:
    seeds = {request_seed(0, prompt, sample, turn) for prompt in range(8) for sample in range(8) for turn in range(2)}
    assert len(seeds) == 128
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert request_seed(1, 2, 3, 0) == request_seed(1, 2, 3, 0)


def response(logprobs: list[float | None], spans: Any, finish: str = "stop") -> dict[str, Any]:
    content = [{"token": "token_id:1", "logprob": value} for value in logprobs]
    choice = {"index": 0, "token_ids": [7, 8], "finish_reason": finish, "logprobs": {"content": content}}
    return {"choices": [choice], "kv_transfer_params": {"fp8rl": {"spans": spans}}}


def test_a_completion_carries_tokens_logprobs_and_version_spans() -> None:
    completion = parse_completion(response([-0.1, -0.2], [[3, 1], [4, 1]]))
    assert completion.token_ids == (7, 8)
    assert completion.logprobs == (-0.1, -0.2)
    assert completion.spans == ((3, 1), (4, 1))


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0, None])
def test_a_logprob_that_is_not_finite_is_named(value: float | None) -> None:
    with pytest.raises(NonFiniteError):
        parse_completion(response([-0.1, value], [[3, 2]]))


def test_spans_that_do_not_cover_the_tokens_are_refused_and_aborted_requests_are_lost() -> None:
    with pytest.raises(WorkerError, match="version spans over 1"):
        parse_completion(response([-0.1, -0.2], [[3, 1]]))
    with pytest.raises(WorkerError, match="plugin"):
        parse_completion(response([-0.1, -0.2], []))
    with pytest.raises(EngineLostError, match="abort"):
        parse_completion(response([-0.1, -0.2], [[3, 2]], finish="abort"))


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, "Out of range float values are not JSON compliant: nan", NonFiniteError),
        (500, "Out of range float values are not JSON compliant: nan", NonFiniteError),
        (400, "max_tokens must be positive", InvalidInputError),
        (500, "EngineDeadError", EngineLostError),
        (503, "booting", EngineLostError),
        (404, "Not Found", EngineLostError),
    ],
)
def test_a_refused_request_is_bad_input_or_not_finite_or_a_lost_engine(status: int, text: str, kind: type) -> None:
    assert type(refusal(status, text)) is kind


def test_end_tokens_come_from_the_generation_config_then_the_config(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert stop_tokens(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert stop_tokens(tmp_path) == (5, 6)


def test_an_engine_without_the_generate_route_is_refused_with_its_release() -> None:
    raise_for_release(["/health", "/inference/v1/generate"], "0.26.0", "http://e")
    with pytest.raises(EngineReleaseError, match=r"vLLM 0\.19\.0 and lacks /inference/v1/generate.*0\.26"):
        raise_for_release(["/v1/completions"], "0.19.0", "http://e")


def test_a_refusal_keeps_its_reason() -> None:
    with pytest.raises(WorkerError, match="no memory") as caught:
        answer_of("POST x", 500, '{"error": "no memory", "reason": "TrainerOutOfMemory"}')
    assert caught.value.reason == "TrainerOutOfMemory"


def pending(step: int, attempt: int = 0) -> StepRequest:
    state = RunState(cursor={"next": 10 * step}).model_dump()
    return StepRequest(job_uid="job", attempt=attempt, step=step, samples=[], orchestrator=state)


def trainer(step: int, attempt: int = 0) -> TrainerState:
    stored = RunState(cursor={"next": 1000 + step}).model_dump() if step else {}
    return TrainerState(job_uid="job", attempt=attempt, phase="idle", step=step, orchestrator=stored)


@pytest.mark.parametrize(
    ("batch", "seen", "next_position", "again"),
    [
        (None, trainer(0), 0, False),
        (None, trainer(4), 1004, False),
        (pending(4), trainer(4), 40, False),
        (pending(4), trainer(3), 40, True),
        (pending(4), trainer(2), 1002, False),
        (pending(4), trainer(4, attempt=1), 1004, False),
        (pending(4), trainer(3, attempt=1), 1003, False),
    ],
)
def test_a_run_goes_on_from_the_last_batch_or_from_the_trainers_checkpoint(
    batch: StepRequest | None, seen: TrainerState, next_position: int, again: bool
) -> None:
    found = resume(batch, seen)
    assert (found.step, found.cursor.next_position, found.again is not None) == (seen.step, next_position, again)


def test_what_the_journal_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    Journal(tmp_path / "j.json", "job").save(version=5, sync_id=3)
    again = Journal(tmp_path / "j.json", "job")
    assert (again.data.version, again.data.sync_id) == (5, 3)
    with pytest.raises(InvalidInputError, match="belongs to job job, not other"):
        Journal(tmp_path / "j.json", "other")
    (tmp_path / "j.json").write_text("{")
    with pytest.raises(InvalidInputError, match="remove the file"):
        Journal(tmp_path / "j.json", "job")


def test_limits_warn_and_the_stop_limit_ends_the_job() -> None:
    limits = LimitsConfig(mismatch_kl_stop=0.1)
    assert health.judge({"mismatch_kl": 0.001, "ratio_deviation": 0.1}, limits).warnings == {}
    warned = health.judge({"mismatch_kl": 0.02, "ratio_deviation": 0.11, "tis_truncated": 0.03}, limits)
    assert sorted(warned.warnings) == ["mismatch_kl", "ratio_deviation", "tis_truncated"]
    assert warned.reason == ""
    assert health.judge({"mismatch_kl": 0.2}, limits).reason == "MismatchLimit"
    assert health.judge({"loss": math.nan}, limits).reason == "NaN"


def test_waiting_for_over_half_of_the_time_says_to_raise_the_replicas() -> None:
    text = health.waiting_warning([6.0] * 5, [10.0] * 5)
    assert text is not None
    assert "60 %" in text
    assert text.endswith("raise inference.replicas")
    assert health.waiting_warning([5.0] * 5, [10.0] * 5) is None
    assert health.waiting_warning([6.0] * 4, [10.0] * 4) is None


def test_the_context_is_the_longest_prompt_plus_max_tokens_when_it_is_unset() -> None:
    assert health.context_length(None, 42, 16) == 42
    assert health.context_length(64, 42, 16) == 64
    with pytest.raises(ValueError, match=r"longest prompt 26 \+ rollout.maxTokens 16 = 42 tokens is over .* 40"):
        health.context_length(40, 42, 16)
