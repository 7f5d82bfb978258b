"""The builtin model `reverse-text-tiny` as data: shape, warm-up and the digest that names its folder. Imports no torch.

The warm-up makes a policy that prefers the wrong answer but tries the right one often enough for RL to find it: at
position i of a completion it puts probability `copy_share` on the prompt's i-th letter, `reverse_share` on the i-th letter of
the reverse, and the rest evenly on the alphabet. Greedy decoding then copies (held-out reward near 0), sampling at
temperature 1 is right at about `reverse_share` of the positions, and the entropy is far from 0. The first `drill_steps`
steps put DRILL on copy and reverse instead: attending to the mirrored position is the harder half, and at its final share
two of eight positions were not learned in 250 steps (seed 0).
"""

from __future__ import annotations

import hashlib
from typing import Self

from pydantic import Field, model_validator

from fp8rl_workers.config import Record
from fp8rl_workers.orchestrator.environments.reverse_text import ReverseText

BLOCK = 128
DRILL = (0.2, 0.7)


class ModelShape(Record):
    """A Qwen3 decoder; every linear's dimensions are multiples of 128, so that blockwise FP8 takes all of them."""

    vocabulary: int = 128
    hidden: int = 256
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 512

    @model_validator(mode="after")
    def _blocks(self) -> Self:
        widths = {
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "heads*head_dim": self.heads * self.head_dim,
            "kv_heads*head_dim": self.kv_heads * self.head_dim,
        }
        odd = [f"{name} {width} % {BLOCK} = {width % BLOCK}" for name, width in widths.items() if width % BLOCK]
        if odd:
            raise ValueError(f"not a multiple of {BLOCK}: {', '.join(odd)}")
        return self


class Recipe(Record):
    """Everything that the weights depend on. Two equal recipes share one folder."""

    name: str = "reverse-text-tiny"
    revision: int = Field(default=1, description="Raised when code that the weights depend on changes.")
    shape: ModelShape = ModelShape()
    task: ReverseText = ReverseText()
    seed: int = 0
    steps: int = Field(default=300, ge=1)
    drill_steps: int = Field(default=150, ge=0)
    batch: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    copy_share: float = Field(default=0.5, ge=0, le=1)
    reverse_share: float = Field(default=0.35, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.task.min_length != self.task.max_length:
            raise ValueError(f"task: one length is needed, got {self.task.min_length} to {self.task.max_length}")
        if self.copy_share + self.reverse_share > 1.0:
            raise ValueError(f"copy_share {self.copy_share} + reverse_share {self.reverse_share} > 1")
        return self

    def shares(self, step: int) -> tuple[float, float]:
        """Probability of copy and of reverse in the targets of `step` (0-based)."""
        return DRILL if step < self.drill_steps else (self.copy_share, self.reverse_share)

    def digest(self) -> str:
        """16 hex characters over all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


RECIPES: dict[str, Recipe] = {"reverse-text-tiny": Recipe()}
