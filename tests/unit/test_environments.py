"""Environments: examples from a seed, exact rewards, token-exact trajectories. The policy is a script of answers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fp8rl_workers.models.tokenizer import EOS_ID, build_tokenizer
from fp8rl_workers.orchestrator.environments import (
    REGISTRY,
    Completion,
    Example,
    Segment,
    Trajectory,
    given,
    make_environment,
    sampled,
)
from fp8rl_workers.orchestrator.environments.arithmetic import evaluate, score
from fp8rl_workers.orchestrator.environments.base import draw, split_of
from fp8rl_workers.orchestrator.environments.calculator import call_tool, chain_reward
from fp8rl_workers.orchestrator.environments.reverse_text import overlap

BUILTIN = ["arithmetic", "calculator", "reverse-text"]


class ScriptedClient:
    """Answers with the given texts in order; log-probability -0.5 for each token, version 7, then 8, ... per call."""

    def __init__(self, *answers: str) -> None:
        self.tokenizer: Tokenizer = build_tokenizer(128)
        self.answers = list(answers)
        self.contexts: list[list[int]] = []

    async def generate(self, token_ids, *, max_tokens=None, stop=()):
        self.contexts.append(list(token_ids))
        text = self.answers.pop(0)
        ids = tuple(self.encode(text)) if text.endswith(tuple(stop) or ("\0",)) else (*self.encode(text), EOS_ID)
        version = 6 + len(self.contexts)
        return Completion(ids, (-0.5,) * len(ids), ((version, len(ids)),), "stop")

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids):
        return self.tokenizer.decode(list(token_ids))


@pytest.mark.parametrize("name", BUILTIN)
def test_examples_depend_on_seed_index_and_split_only(name):
    examples = [make_environment(name, {}).example(3, index, "train") for index in range(50)]
    assert examples == [make_environment(name, {}).example(3, index, "train") for index in range(50)]
    assert examples != [make_environment(name, {}).example(4, index, "train") for index in range(50)]
    assert len({example.id for example in examples}) == 50


def test_the_first_reverse_text_examples_of_seed_0_never_change():
    environment = make_environment("reverse-text", {})
    assert [environment.example(0, index, "train").prompt for index in range(2)] == ["<ftwvlnvs>", "<uwwkirmx>"]


@pytest.mark.parametrize("name", BUILTIN)
def test_held_out_tasks_are_never_training_tasks_for_any_seed(name):
    environment = make_environment(name, {})
    train = {environment.example(seed, index, "train").prompt for seed in range(3) for index in range(300)}
    heldout = {environment.example(seed, index, "heldout").prompt for seed in range(3) for index in range(300)}
    assert len(heldout) > 100
    assert train.isdisjoint(heldout)


def test_a_family_too_small_for_two_splits_says_so():
    with pytest.raises(ValueError, match="none of 10000 tasks drawn belongs to split"):
        draw("coin", 0, 0, "train" if split_of("coin/x") == "heldout" else "heldout", lambda _: "x")


@pytest.mark.parametrize("name", BUILTIN)
@for_all(seed=st.integers(0, 2**31), index=st.integers(0, 10**6))
def test_every_prompt_fits_the_context_bound(name, seed, index):
    environment = make_environment(name, {})
    example = environment.example(seed, index, "train")
    assert len(example.prompt.encode()) + 16 <= environment.context_bound(16)


def test_context_bounds_count_every_turn_and_tool_reply():
    assert make_environment("reverse-text", {"max_length": 12}).context_bound(20) == len("<>") + 12 + 20
    assert make_environment("arithmetic", {}).context_bound(20) == len("99+99=") + 20
    assert make_environment("calculator", {}).context_bound(20) == len("99+99+99=") + 4 * (20 + len("-1999999998;"))


@pytest.mark.parametrize(
    ("answer", "target", "reward"),
    [
        ("dcba", "dcba", 1.0),
        ("dcbx", "dcba", 0.75),
        ("abcd", "dcba", 0.0),
        ("dc", "dcba", 0.5),
        ("dcbaaaaa", "dcba", 0.5),
        ("", "dcba", 0.0),
    ],
)
def test_reverse_text_pays_the_share_of_right_positions(answer, target, reward):
    assert overlap(answer, target) == reward


@pytest.mark.parametrize(
    ("answer", "target", "reward"),
    [("22", "22", 1.0), ("12", "22", 0.25), ("122", "22", 0.5 * 2 / 3), ("", "22", 0.0), ("-3", "3", 0.25)],
)
def test_arithmetic_pays_an_exact_answer_in_full_and_right_digits_in_part(answer, target, reward):
    assert score(answer, target) == pytest.approx(reward, abs=1e-12)


def test_expressions_have_exact_values_and_anything_else_is_refused():
    assert [evaluate(text) for text in ("17+5", "5-17", "12*12", "0+0")] == [22, -12, 144, 0]
    for text in ("17", "1+2+3", "+5", "a+1", "2**3"):
        with pytest.raises(ValueError, match="is not <integer>"):
            evaluate(text)


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("[12+7]", "19;"),
        ("so [-5-30]", "-35;"),
        ("[19-30]", "-11;"),
        ("[12]", "error;"),
        ("12+7]", "error;"),
        ("[1+2+3]", "error;"),
        ("[9999999999+1]", "error;"),
        ("]", "error;"),
    ],
)
def test_the_tool_answers_one_sum_and_calls_all_else_an_error(turn, reply):
    assert call_tool(turn) == reply


@pytest.mark.parametrize(
    ("last", "replies", "reward"),
    [
        ("-11#", ["19;", "-11;"], 1.0),
        ("-11#", [], 1.0),
        ("-11#", ["error;", "-11;"], 0.9),
        ("-12#", [], 0.8 * 0.5 * 2 / 3 + 0.2),
        ("-11", [], 0.0),
        ("[19-30]", ["19;"], 0.0),
    ],
)
def test_a_chain_pays_answer_and_valued_calls(last, replies, reward):
    assert chain_reward(last, replies, "-11") == pytest.approx(reward, abs=1e-12)


async def test_one_turn_gives_a_prompt_and_a_sampled_segment_with_the_end_token():
    client = ScriptedClient("dcbx")
    example = Example(id="x", prompt="<abcd>", answer="dcba")
    trajectory = await make_environment("reverse-text", {}).rollout(client, example)
    assert trajectory.tokens == [*client.encode("<abcd>dcbx"), EOS_ID]
    assert trajectory.loss_mask == [0] * 6 + [1] * 5
    assert trajectory.logprobs == [0.0] * 6 + [-0.5] * 5
    assert trajectory.spans == [(7, 5)]
    assert (trajectory.reward, trajectory.metrics) == (0.75, {"exact": 0.0})


async def test_tool_output_is_context_but_never_trained_on():
    client = ScriptedClient("[12+7]", "[19-30]", "-11#")
    example = Example(id="x", prompt="12+7-30=", answer="-11")
    trajectory = await make_environment("calculator", {}).rollout(client, example)
    text = "12+7-30=" + "[12+7]" + "19;" + "[19-30]" + "-11;" + "-11#"
    assert client.decode(trajectory.tokens) == text
    assert trajectory.loss_mask == [0] * 8 + [1] * 6 + [0] * 3 + [1] * 7 + [0] * 4 + [1] * 4
    assert [client.decode(context) for context in client.contexts] == [text[:8], text[:17], text[:28]]
    assert trajectory.spans == [(7, 6), (8, 7), (9, 4)]
    assert (trajectory.version_min, trajectory.version_max) == (7, 9)
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"calls": 2.0})


async def test_a_policy_that_only_calls_the_tool_stops_after_max_turns_without_reward():
    client = ScriptedClient("[1+1]", "[1+1]", "[1+1]")
    environment = make_environment("calculator", {"max_turns": 3})
    trajectory = await environment.rollout(client, Example(id="x", prompt="1+1=", answer="2"))
    assert (len(client.contexts), trajectory.reward) == (3, 0.0)


def test_spans_of_one_version_are_joined_over_segments():
    first = sampled(Completion((1, 2), (-1.0, -2.0), ((4, 1), (5, 1)), "stop"))
    second = sampled(Completion((3,), (-3.0,), ((5, 1),), "length"))
    trajectory = Trajectory((given([9]), first, given([9, 9]), second), 0.0)
    assert trajectory.spans == [(4, 1), (5, 2)]
    assert trajectory.logprobs == [0.0, -1.0, -2.0, 0.0, 0.0, -3.0]


def test_a_sampled_segment_without_a_logprob_or_version_for_each_token_is_refused():
    with pytest.raises(ValueError, match=r"sampled, 2 tokens, .* got 1 and spans over 2"):
        Segment((1, 2), sampled=True, logprobs=(-1.0,), spans=((1, 2),))
    with pytest.raises(ValueError, match=r"given, 1 tokens, .* got 0 and spans over 1"):
        Segment((1,), spans=((1, 1),))


def test_an_unknown_environment_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"environment\.id: 'chess' is unknown; known are arithmetic, calculator, reverse-text, verifiers:NAME",
    ):
        make_environment("chess", {})


def test_all_wrong_arguments_are_named_at_once_with_their_values():
    with pytest.raises(ValueError, match="environment 'reverse-text'") as caught:
        make_environment("reverse-text", {"alphabet": 99, "length": 3})
    assert "environment.args.alphabet: Input should be less than or equal to 26, got 99" in str(caught.value)
    assert "environment.args.length: Extra inputs are not permitted, got 3" in str(caught.value)


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="min_length 9 > max_length 8"):
        make_environment("reverse-text", {"min_length": 9})
    with pytest.raises(ValueError, match=r"has no \{text\}"):
        make_environment("reverse-text", {"template": "reverse it"})


@pytest.mark.parametrize("name", BUILTIN)
def test_the_id_is_no_argument(name):
    with pytest.raises(ValueError, match=r"environment\.args\.id"):
        make_environment(name, {"id": "other"})


def test_environments_import_no_torch():
    code = (
        "import sys; from fp8rl_workers.orchestrator.environments import REGISTRY, make_environment; "
        f"[make_environment(name, {{}}) for name in {BUILTIN!r}]; "
        "print([m for m in ('torch', 'transformers', 'vllm', 'verifiers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_builtin_environment_is_registered():
    assert set(BUILTIN) <= set(REGISTRY)
