"""`calculator`: a chain of sums, worked out with a tool. Several turns.

The prompt is `12+7-30=`. A turn of the policy ends with one of the two stop strings:

    [12+7]      a call of the tool; what the tool says, `19;` or `error;`, is appended and the next turn begins
    -11#        the answer: what stands before `#`

Reward = 0.8 * (score of the answer as in `arithmetic`) + 0.2 * (share of the calls that had a value; 1 without a call).
A rollout without an answer has reward 0. What the tool says is given, never trained on.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fp8rl_workers.config import Record
from fp8rl_workers.orchestrator.environments.arithmetic import score
from fp8rl_workers.orchestrator.environments.base import (
    Client,
    Example,
    Segment,
    Split,
    Trajectory,
    draw,
    given,
    num_bytes,
    sampled,
)

CALL_END = "]"
ANSWER_END = "#"
ERROR = "error;"
CALL = re.compile(r"\[(-?\d{1,9})([+-])(\d{1,9})\]$", re.ASCII)
LONGEST_REPLY = len("-1999999998;")


def call_tool(turn: str) -> str:
    """What the tool says to a turn that ends in `[<integer><+|-><integer>]`: the value and `;`, else `error;`."""
    call = CALL.search(turn)
    if call is None:
        return ERROR
    left, operator, right = int(call[1]), call[2], int(call[3])
    return f"{left + right if operator == '+' else left - right};"


class Calculator(Record):
    """Arguments and rollout. The prompt is `template` with `{expression}` replaced."""

    id: ClassVar[str] = "calculator"

    terms: int = Field(default=3, ge=2, le=8, description="Numbers in the chain.")
    max_operand: int = Field(default=99, ge=9, le=10**6, description="Numbers are uniform in 0 to this.")
    max_turns: int = Field(default=4, ge=1, le=32, description="Completions of one rollout, the answer included.")
    template: str = Field(default="{expression}=", description="Prompt, with {expression} where the chain goes.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "{expression}" not in self.template:
            raise ValueError(f"template {self.template!r} has no {{expression}}")
        return self

    def example(self, seed: int, index: int, split: Split) -> Example:
        """`terms` numbers joined by + or -, uniform."""
        expression = draw(self.id, seed, index, split, self._expression)
        prompt = self.template.replace("{expression}", expression)
        value = sum(int(term) for term in re.findall(r"[+-]?\d+", expression))
        return Example(id=f"{split}-{seed}-{index}", prompt=prompt, answer=str(value))

    async def rollout(self, client: Client, example: Example) -> Trajectory:
        """Turns until an answer, a completion without stop string, or `max_turns`."""
        segments: list[Segment] = [given(client.encode(example.prompt))]
        replies: list[str] = []
        turn = ""
        for _ in range(self.max_turns):
            context = [token for segment in segments for token in segment.token_ids]
            completion = await client.generate(context, stop=(CALL_END, ANSWER_END))
            segments.append(sampled(completion))
            turn = client.decode(completion.token_ids)
            if not turn.endswith(CALL_END):
                break
            replies.append(call_tool(turn))
            segments.append(given(client.encode(replies[-1])))
        reward = chain_reward(turn, replies, example.answer)
        return Trajectory(tuple(segments), reward, {"calls": float(len(replies))})

    def context_bound(self, max_tokens: int, prompt_tokens: int | None = None) -> int:
        """The longest prompt, and per turn one completion and one reply of the tool."""
        if prompt_tokens is None:
            longest = "+".join([str(self.max_operand)] * self.terms)
            prompt_tokens = num_bytes(self.template.replace("{expression}", longest))
        return prompt_tokens + self.max_turns * (max_tokens + LONGEST_REPLY)

    def _expression(self, rng: random.Random) -> str:
        numbers = [str(rng.randint(0, self.max_operand)) for _ in range(self.terms)]
        return numbers[0] + "".join(f"{rng.choice('+-')}{number}" for number in numbers[1:])


def chain_reward(last_turn: str, replies: list[str], target: str) -> float:
    """The reward in the module's docstring, from the last turn's text and all that the tool said."""
    if not last_turn.endswith(ANSWER_END):
        return 0.0
    valued = sum(reply != ERROR for reply in replies) / len(replies) if replies else 1.0
    return 0.8 * score(last_turn.removesuffix(ANSWER_END).strip(), target) + 0.2 * valued
