"""What an environment is: examples from a seed, and a rollout that turns one example into a scored trajectory.

    example = environment.example(seed, index, "train")        # pure, the same on every machine
    trajectory = await environment.rollout(client, example)    # talks to the policy through `client` only

A trajectory is one sequence of tokens, cut into segments: *given* ones (prompt, what a tool said) and *sampled* ones
(what an engine generated, with its log-probabilities and the weight versions that produced it). The context of each turn
is exactly the concatenation of the segments before it, token for token: nothing is decoded and encoded again in between.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from fp8rl_workers.config import Record

Split = Literal["train", "heldout"]
FinishReason = Literal["stop", "length"]

HELDOUT_SHARE = 8  # one key in eight belongs to the held-out split
MAX_DRAWS = 10_000


class Example(Record):
    """One task. Also the schema of a line in a prompt set's JSON lines file."""

    id: str = Field(description="Unique in its split; rollout dumps and the saved cursor name it.")
    prompt: str
    answer: str = Field(default="", description="What the reward compares with; environments say how.")
    info: dict[str, Any] = Field(default={}, description="Whatever else the environment needs to score.")


@dataclass(frozen=True)
class Completion:
    """What an engine sampled.

    `token_ids` holds the stop token where there is one. `logprobs[t]` is the engine's processed log-probability (nat) of
    `token_ids[t]` at the client's temperature. `spans` are runs of (weight version, number of tokens) in order; the
    numbers add up to the number of tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int], ...]
    finish_reason: FinishReason


class Client(Protocol):
    """The policy as an environment sees it. Temperature, top-p and seed belong to the client (greedy in evaluation)."""

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Sample a continuation of `token_ids`.

        Args:
            token_ids: the whole context.
            max_tokens: at most so many tokens; the job's `rollout.maxTokens` if None or larger than that.
            stop: strings that end the completion, added to the job's; the tokens of the string found are kept.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens are read where the text spells them, none are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        ...


@dataclass(frozen=True)
class Segment:
    """A run of tokens that were all given (`logprobs` and `spans` empty) or all sampled.

    Raises:
        ValueError: a sampled segment's log-probabilities or spans do not cover its tokens.
    """

    token_ids: tuple[int, ...]
    sampled: bool = False
    logprobs: tuple[float, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.sampled else 0
        covered = sum(count for _, count in self.spans)
        if len(self.logprobs) != expected or covered != expected:
            kind = "sampled" if self.sampled else "given"
            raise ValueError(
                f"segment: {kind}, {len(self.token_ids)} tokens, so {expected} log-probabilities and spans over {expected} "
                f"tokens are needed; got {len(self.logprobs)} and spans over {covered}"
            )


def given(token_ids: Sequence[int]) -> Segment:
    """Segment of tokens that the policy did not sample: prompt or tool output."""
    return Segment(tuple(token_ids))


def sampled(completion: Completion) -> Segment:
    """Segment of what an engine generated."""
    return Segment(completion.token_ids, sampled=True, logprobs=completion.logprobs, spans=completion.spans)


@dataclass(frozen=True)
class Trajectory:
    """A finished rollout. `tokens`, `loss_mask` and `logprobs` have equal length and the meaning of `protocol.Sample`."""

    segments: tuple[Segment, ...]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def loss_mask(self) -> list[int]:
        return [int(segment.sampled) for segment in self.segments for _ in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probability (nat) of each sampled token, 0 elsewhere."""
        return [
            value
            for segment in self.segments
            for value in (segment.logprobs if segment.sampled else (0.0,) * len(segment.token_ids))
        ]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version, number of sampled tokens) in order; neighbours of one version are joined."""
        joined: list[tuple[int, int]] = []
        for version, count in (span for segment in self.segments for span in segment.spans):
            if joined and joined[-1][0] == version:
                joined[-1] = (version, joined[-1][1] + count)
            else:
                joined.append((version, count))
        return joined

    @property
    def version_min(self) -> int:
        """Oldest version that produced any of the sampled tokens."""
        return min(version for version, _ in self.spans)

    @property
    def version_max(self) -> int:
        """Newest version that produced any of the sampled tokens."""
        return max(version for version, _ in self.spans)


class Environment(Protocol):
    """A task family. `id` is what `rollout.environment.id` names."""

    @property
    def id(self) -> str: ...

    def example(self, seed: int, index: int, split: Split) -> Example:
        """The `index`-th task (0, 1, 2, ... without end); pure in its arguments. No task is in both splits."""
        ...

    async def rollout(self, client: Client, example: Example) -> Trajectory:
        """Play one example. Raises only what `client` raises: a wrong answer is a low reward."""
        ...

    def context_bound(self, max_tokens: int, prompt_tokens: int | None = None) -> int:
        """Upper bound on a trajectory's tokens when a completion has at most `max_tokens`.

        `prompt_tokens`: the longest prompt where it is known, as of a file; else it is that of the own tasks. Given text
        counts one token per UTF-8 byte, which no byte-level or character-level tokenizer exceeds.
        """
        ...


def num_bytes(text: str) -> int:
    """Bytes of `text` in UTF-8: an upper bound on its tokens."""
    return len(text.encode())


def split_of(key: str) -> Split:
    """The split that a task belongs to, from a digest of what makes it unique: disjoint for all seeds."""
    return "heldout" if hashlib.blake2s(key.encode()).digest()[0] % HELDOUT_SHARE == 0 else "train"


def draw(name: str, seed: int, index: int, split: Split, make: Callable[[random.Random], str]) -> str:
    """Draw keys by `make` from a generator of (name, seed, index, split) until one belongs to `split`.

    Raises:
        ValueError: the family has (almost) no task in that split.
    """
    rng = random.Random(f"{name}/{seed}/{split}/{index}")
    for _ in range(MAX_DRAWS):
        key = make(rng)
        if split_of(f"{name}/{key}") == split:
            return key
    raise ValueError(
        f"environment {name}: none of {MAX_DRAWS} tasks drawn belongs to split {split}: the args allow too few different tasks, widen them"
    )
