"""Prompts in a fixed order with a saved cursor: each position of the order is consumed once, over restarts too.

The order has no end: position n is task n of the environment's own generator (`builtin`, or no dataset named), or line
`order[n % L]` of a file of L JSON lines, shuffled anew for every pass by the job's seed. What has been handed out and
not yet consumed is `outstanding`; a resumed run hands that out first, in its order.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from fp8rl_workers.config import DatasetConfig
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.http import validation_text
from fp8rl_workers.orchestrator.environments import Environment, Example

ExampleAt = Callable[[int], Example]


@dataclass
class Cursor:
    """Where the prompt set stands. `again`: positions to hand out before `next_position`, sorted."""

    next_position: int = 0
    again: list[int] = field(default_factory=list)
    outstanding: set[int] = field(default_factory=set)

    def take(self) -> int:
        """Hand out a position."""
        if self.again:
            position = self.again.pop(0)
        else:
            position = self.next_position
            self.next_position += 1
        self.outstanding.add(position)
        return position

    def consume(self, position: int) -> None:
        """A position's samples went into a batch, or are given up for good."""
        self.outstanding.discard(position)

    def give_back(self, position: int) -> None:
        """A position's samples were lost: hand it out again."""
        self.outstanding.discard(position)
        self.again = sorted({*self.again, position})

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is outstanding counts as to be handed out again."""
        return {"next": self.next_position, "again": sorted({*self.again, *self.outstanding})}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The cursor of a resumed run; an empty value is a fresh one."""
        return cls(int(value.get("next", 0)), sorted(int(position) for position in value.get("again", [])))


def prompt_set(config: DatasetConfig, environment: Environment, seed: int) -> ExampleAt:
    """The function position -> example.

    Raises:
        InvalidInputError: the file is missing, empty, or a line is no Example.
    """
    if config.path is None:
        return lambda position: environment.example(seed, position, "train")
    examples = read_examples(Path(config.path))

    @functools.lru_cache(maxsize=2)  # the pass under way and the one that begins; shuffling takes time in the length
    def order(turn: int) -> list[int]:
        return order_of(len(examples), seed, turn, shuffle=config.shuffle)

    def at(position: int) -> Example:
        turn, place = divmod(position, len(examples))
        return examples[order(turn)[place]]

    return at


def heldout_set(environment: Environment, seed: int, samples: int) -> list[Example]:
    """The held-out examples of an evaluation: the same for the whole job."""
    return [environment.example(seed, index, "heldout") for index in range(samples)]


def order_of(length: int, seed: int, turn: int, *, shuffle: bool) -> list[int]:
    """Order of the lines in pass number `turn`; a permutation drawn from (seed, turn)."""
    order = list(range(length))
    if shuffle:
        random.Random(f"prompts/{seed}/{turn}").shuffle(order)
    return order


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSON lines file, all faults reported at once.

    Raises:
        InvalidInputError: the file is missing, empty, or a line is no Example.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"rollout.dataset: cannot read {path}: {error}; name a file of JSON lines") from error
    examples: list[Example] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            examples.append(Example.model_validate_json(line))
        except ValidationError as error:
            faults.append(f"line {number}: {validation_text(error)}")
    if faults or not examples:
        reason = "; ".join(faults[:20]) or "it holds no line"
        raise InvalidInputError(f"rollout.dataset: {path}: {reason}; each line is a JSON object with id and prompt")
    return examples
