"""Status of a job that the API took and the operator does not: nothing is done for it until its spec changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.errors import Fault
from fp8rl_operator.plan_memory import read_verdict
from fp8rl_operator.plan_types import Waiting
from fp8rl_operator.status_conditions import MAX_MESSAGE, merged, standing


def invalid_status(body: Mapping[str, Any], faults: Sequence[Fault], now: float) -> dict[str, Any] | None:
    """The status of a job with these faults; None if it says so already, or if the job has ended. `now` in Unix seconds.

    Pods that run go on: what is wrong stands in the spec only. `body`: the job as the API has it.
    """
    old: dict[str, Any] = dict(body.get("status") or {})
    generation = int(body.get("metadata", {}).get("generation", 0))
    if read_verdict(old) is not None:
        return None
    word = Waiting(names.INVALID_SPEC, invalid_message(faults), person=True)
    new = old | {
        "observedGeneration": generation,
        "conditions": merged(old, standing(word), generation, now),
    }
    return None if new == old else new


def invalid_message(faults: Sequence[Fault]) -> str:
    """The errors as `fp8rl validate` prints them, as long as a condition takes it."""
    text = "\n".join(str(fault) for fault in faults if fault.level == "error")
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1]}…"
