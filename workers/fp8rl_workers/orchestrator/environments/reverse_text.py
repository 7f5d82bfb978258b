"""`reverse-text`: write a random lowercase string backwards. One turn.

Reward = (positions where answer and target agree) / max(length of answer, length of target): 1 for the exact reverse,
and every missing or surplus character costs as much as a wrong one.
"""

from __future__ import annotations

import random
import string
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fp8rl_workers.config import Record
from fp8rl_workers.orchestrator.environments.base import (
    Client,
    Example,
    Split,
    Trajectory,
    draw,
    given,
    num_bytes,
    sampled,
)


def overlap(answer: str, target: str) -> float:
    """Share of positions that agree, in [0, 1], over the longer of the two; `target` is not empty."""
    agreeing = sum(a == b for a, b in zip(answer, target, strict=False))
    return agreeing / max(len(answer), len(target))


class ReverseText(Record):
    """Arguments and rollout. The prompt is `template` with `{text}` replaced."""

    id: ClassVar[str] = "reverse-text"

    min_length: int = Field(default=8, ge=1, le=256)
    max_length: int = Field(default=8, ge=1, le=256)
    alphabet: int = Field(default=26, ge=2, le=26, description="The first so many lowercase letters.")
    template: str = Field(default="<{text}>", description="Prompt, with {text} where the string goes.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} > max_length {self.max_length}")
        if "{text}" not in self.template:
            raise ValueError(f"template {self.template!r} has no {{text}}")
        return self

    @property
    def letters(self) -> str:
        """The alphabet."""
        return string.ascii_lowercase[: self.alphabet]

    def example(self, seed: int, index: int, split: Split) -> Example:
        """A string of min_length to max_length letters, lengths and letters uniform."""
        text = draw(self.id, seed, index, split, self._text)
        prompt = self.template.replace("{text}", text)
        return Example(id=f"{split}-{seed}-{index}", prompt=prompt, answer=text[::-1])

    async def rollout(self, client: Client, example: Example) -> Trajectory:
        """One completion; the reward compares its text, without surrounding white space, with the reverse."""
        prompt = given(client.encode(example.prompt))
        completion = await client.generate(prompt.token_ids)
        reward = overlap(client.decode(completion.token_ids).strip(), example.answer)
        return Trajectory((prompt, sampled(completion)), reward, {"exact": float(reward == 1.0)})

    def context_bound(self, max_tokens: int, prompt_tokens: int | None = None) -> int:
        """The longest prompt plus one completion."""
        if prompt_tokens is None:
            prompt_tokens = num_bytes(self.template.replace("{text}", "x" * self.max_length))
        return prompt_tokens + max_tokens

    def _text(self, rng: random.Random) -> str:
        length = rng.randint(self.min_length, self.max_length)
        return "".join(rng.choices(self.letters, k=length))
