"""The adapter for `verifiers`: its relay and its bookkeeping always, a whole episode where the library is installed."""

from __future__ import annotations

import importlib.util
import json
import sys

import aiohttp
import pytest

from fp8rl_workers.models.tokenizer import build_tokenizer
from fp8rl_workers.orchestrator.environments import Completion, make_environment
from fp8rl_workers.orchestrator.environments.base import Segment, given, sampled
from fp8rl_workers.orchestrator.environments.verifiers_adapter import (
    EpisodeError,
    generate_response,
    relay,
    split_tokens,
)

INSTALLED = importlib.util.find_spec("verifiers") is not None
FIRST = Completion((5, 6, 1), (-1.0, -2.0, -3.0), ((4, 2), (5, 1)), "stop")
SECOND = Completion((7, 1), (-4.0, -5.0), ((5, 2),), "length")
TASKSET = """
import verifiers.v1 as vf

class MirrorData(vf.TaskData):
    answer: str

class MirrorTask(vf.Task[MirrorData]):
    @vf.reward()
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class MirrorTaskset(vf.Taskset[MirrorTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            word = chr(97 + number % 26) + chr(97 + number * 7 % 26) + "x"
            yield MirrorTask(MirrorData(prompt=word, answer=word[::-1]), self.config.task)

__all__ = ["MirrorTaskset"]
"""
TEMPLATE = (
    "{% for message in messages %}<{{ message['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


class Policy:
    """Answers with FIRST, then SECOND, or raises."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    async def generate(self, token_ids, *, max_tokens=None, stop=()):
        self.calls.append((list(token_ids), max_tokens))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def post(url, token_ids, **sampling):
    body = {"token_ids": token_ids, "sampling_params": sampling}
    address = url.removesuffix("/v1") + "/inference/v1/generate"
    async with aiohttp.ClientSession() as session, session.post(address, json=body) as response:
        return response.status, await response.json()


async def test_the_relay_answers_vllms_route_by_the_client_and_keeps_what_it_answered():
    policy = Policy(FIRST, SECOND)
    async with relay(policy) as (url, record):
        assert await post(url, [9, 9]) == (200, generate_response(FIRST))
        assert await post(url, [9], max_tokens=3) == (200, generate_response(SECOND))
    assert policy.calls == [([9, 9], None), ([9], 3)]
    assert (record.completions, record.failure) == ([FIRST, SECOND], None)


async def test_the_relay_keeps_the_first_failure_of_the_client_and_refuses_the_call():
    gone = ConnectionError("engine gone")
    async with relay(Policy(gone, ConnectionError("again"))) as (url, record):
        assert await post(url, [9]) == (400, {"error": {"message": "engine gone"}})
        await post(url, [9])
    assert record.failure is gone


def test_a_response_names_each_token_id_with_its_logprob():
    choice = generate_response(SECOND)["choices"][0]
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:7", "logprob": -4.0},
        {"token": "token_id:1", "logprob": -5.0},
    ]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 1], "length")


def test_sampled_runs_get_back_their_logprobs_and_versions():
    tokens, mask = [9, 9, 5, 6, 1, 8, 7, 1], [False, False, True, True, True, False, True, True]
    segments = list(split_tokens(tokens, mask, [FIRST, SECOND]))
    assert segments == [given([9, 9]), sampled(FIRST), given([8]), sampled(SECOND)]


def test_a_run_that_the_trace_cut_short_keeps_the_versions_of_what_is_left():
    segments = list(split_tokens([9, 5, 6], [False, True, True], [SECOND, FIRST]))
    assert segments[1] == Segment((5, 6), sampled=True, logprobs=(-1.0, -2.0), spans=((4, 2),))


def test_sampled_tokens_that_the_policy_never_gave_are_refused():
    with pytest.raises(EpisodeError, match="2 sampled tokens of the trace were never sampled by the policy"):
        list(split_tokens([9, 5, 7], [False, True, True], [FIRST, SECOND]))


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_library_the_message_names_the_extra():
    with pytest.raises(
        ImportError, match=r"'verifiers:gsm8k' needs the library verifiers: pip install 'fp8rl\[verifiers\]'"
    ):
        make_environment("verifiers:gsm8k", {"tokenizer": "/m", "max_context": 100})


def test_arguments_are_checked_before_the_library_is_asked_for():
    with pytest.raises(ValueError, match=r"environment\.args\.tokenizer: Field required"):
        make_environment("verifiers:gsm8k", {"max_context": 100})


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `verifiers`")
async def test_an_episode_of_verifiers_becomes_a_scored_trajectory(tmp_path, monkeypatch):
    (tmp_path / "mirror_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mirror_words", raising=False)
    tokenizer = build_tokenizer(128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    environment = make_environment("verifiers:mirror-words", {"tokenizer": str(tmp_path), "max_context": 100})
    example = environment.example(0, 0, "train")
    answer = (*tokenizer.encode(example.prompt[::-1]).ids, 1)
    policy = Policy(Completion(answer, (-0.25,) * 4, ((7, 4),), "stop"))
    trajectory = await environment.rollout(policy, example)
    assert tokenizer.decode(trajectory.tokens) == f"<{example.prompt}>={example.prompt[::-1]}"
    assert trajectory.loss_mask == [0] * 6 + [1] * 4
    assert (trajectory.reward, trajectory.spans) == (1.0, [(7, 4)])
