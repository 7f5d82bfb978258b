"""`arithmetic`: small sums and differences, written as `17+5=`. One turn.

Reward = 1 for the exact integer, else 0.5 * share of characters that are right (the answer is compared from its last
digit on, where a written sum is worked out first), so that a policy that gets the units right is ahead of one that does
not.
"""

from __future__ import annotations

import random
from typing import ClassVar, Literal, Self

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
from fp8rl_workers.orchestrator.environments.reverse_text import overlap


def score(answer: str, target: str) -> float:
    """1 for `target` itself, else half the share of agreeing characters, compared from the right."""
    return 1.0 if answer == target else 0.5 * overlap(answer[::-1], target[::-1])


class Arithmetic(Record):
    """Arguments and rollout. The prompt is `template` with `{expression}` replaced."""

    id: ClassVar[str] = "arithmetic"

    max_operand: int = Field(default=99, ge=9, le=10**9, description="Operands are uniform in 0 to this.")
    operators: list[Literal["+", "-", "*"]] = Field(default=["+", "-"], min_length=1)
    template: str = Field(default="{expression}=", description="Prompt, with {expression} where the sum goes.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "{expression}" not in self.template:
            raise ValueError(f"template {self.template!r} has no {{expression}}")
        return self

    def example(self, seed: int, index: int, split: Split) -> Example:
        """Two operands and an operator, uniform; differences may be negative."""
        expression = draw(self.id, seed, index, split, self._expression)
        prompt = self.template.replace("{expression}", expression)
        return Example(id=f"{split}-{seed}-{index}", prompt=prompt, answer=str(evaluate(expression)))

    async def rollout(self, client: Client, example: Example) -> Trajectory:
        """One completion; its text without surrounding white space is the answer."""
        prompt = given(client.encode(example.prompt))
        completion = await client.generate(prompt.token_ids)
        reward = score(client.decode(completion.token_ids).strip(), example.answer)
        return Trajectory((prompt, sampled(completion)), reward, {"exact": float(reward == 1.0)})

    def context_bound(self, max_tokens: int, prompt_tokens: int | None = None) -> int:
        """The longest prompt plus one completion."""
        if prompt_tokens is None:
            longest = f"{self.max_operand}+{self.max_operand}"
            prompt_tokens = num_bytes(self.template.replace("{expression}", longest))
        return prompt_tokens + max_tokens

    def _expression(self, rng: random.Random) -> str:
        left, right = rng.randint(0, self.max_operand), rng.randint(0, self.max_operand)
        return f"{left}{rng.choice(self.operators)}{right}"


def evaluate(expression: str) -> int:
    """Value of `<integer><+|-|*><integer>` with operands that are not negative.

    Raises:
        ValueError: `expression` is anything else.
    """
    for operator in "+-*":
        left, found, right = expression.partition(operator)
        if found:
            if not (left.isascii() and left.isdigit() and right.isascii() and right.isdigit()):
                break
            a, b = int(left), int(right)
            return {"+": a + b, "-": a - b, "*": a * b}[operator]
    raise ValueError(f"{expression!r} is not <integer>+<integer>, <integer>-<integer> or <integer>*<integer>")
