"""What a cross-field check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.job import FP8RLJob

Find = Callable[[FP8RLJob], Iterator[Fault]]


@dataclass(frozen=True)
class Cel:
    """A check as the API server does it: `rule` is true for a good object at schema path `at` ("" is the root).

    `message` stands in the refusal; `filled`, with a %d or %s for each CEL expression of `values`, replaces it where the
    arithmetic needs them. (`format` is the one way: the API server puts no bound on the length of `string(int)`, and refuses
    what it cannot bound.)
    """

    at: str
    rule: str
    message: str
    filled: str = ""
    values: tuple[str, ...] = ()

    @property
    def expression(self) -> str:
        """The messageExpression, empty for a message without values."""
        return f"'{self.filled}'.format([{', '.join(self.values)}])" if self.filled else ""


@dataclass(frozen=True)
class Check:
    """One rule over several fields, shared by command line and controller.

    `find` yields the faults of a job. `reads` are the fields that it looks at: where one of them is faulty by itself the
    check is skipped. `cel` says the same to the API server; `beyond_cel` is what it cannot say, and why. `by_schema`: the
    schema alone says it, and how.
    """

    find: Find
    reads: tuple[str, ...]
    cel: tuple[Cel, ...] = ()
    beyond_cel: str = ""
    by_schema: str = ""

    @property
    def name(self) -> str:
        """Name of the rule."""
        return self.find.__name__
