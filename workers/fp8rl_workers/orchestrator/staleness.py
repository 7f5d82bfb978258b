"""How old a sample is, what may be dispatched now, and what is dropped. Pure.

The age of a sample at step `s` is `(s - 1) - step of the oldest version that produced any of its tokens`, counted when the
sample is consumed, queue time included. A version's step is the number of optimizer steps that its weights have seen.

Pacing. Groups are consumed about in the order of their dispatch, `groups_per_batch` (G) a step. With `c` the step whose
batch was consumed last and `p` the step of the version that engines serve, the k-th outstanding group (from 0) is consumed
at step `c + 1 + k // G` with age `c + k // G - p`. Dispatch goes on while that age is at most the lead: one step (rollouts
for step s + 1 run while step s trains), more when a sync is late, never more than the limit. So nothing that would be
too old is ever dispatched, and only a straggler can become too old; `choose` holds the batch back for one that would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DropReason = Literal["stale", "nonFinite", "lineage", "tooLong", "error"]

TARGET_LEAD = 1


@dataclass(frozen=True)
class Pace:
    """What pacing looks at. Counts are groups; steps are optimizer steps. `late`: the sync of the last step is."""

    consumed_step: int
    published_step: int
    outstanding: int
    groups_per_batch: int
    limit: int
    total_steps: int
    late: bool = True


@dataclass(frozen=True)
class Candidate:
    """A group that may enter a batch. `oldest_step`: step of the oldest version in it (or that it was started with)."""

    index: int
    oldest_step: int
    newest_step: int
    finished: bool


@dataclass(frozen=True)
class Choice:
    """Groups of the next batch by index (None: wait), and the finished ones to drop with their reason."""

    batch: tuple[int, ...] | None
    drop: dict[int, DropReason]


def age(step: int, oldest_step: int) -> int:
    """Age in steps of a sample that is consumed at `step`."""
    return (step - 1) - oldest_step


def num_dispatchable(pace: Pace) -> int:
    """Groups that may be dispatched now, 0 or more (formula in the module's docstring)."""
    lag = pace.consumed_step - pace.published_step
    lead = min(pace.limit, max(TARGET_LEAD, lag if pace.late else 0))
    batches = min(max(lead - lag + 1, 0), max(pace.total_steps - pace.consumed_step, 0))
    return max(batches * pace.groups_per_batch - pace.outstanding, 0)


def drop_reason(candidate: Candidate, step: int, limit: int) -> DropReason | None:
    """Why a finished group must not be consumed at `step`: it spans too many versions, or it is too old."""
    if candidate.newest_step - candidate.oldest_step > limit:
        return "tooLong"
    if age(step, candidate.oldest_step) > limit:
        return "stale"
    return None


def choose(candidates: Sequence[Candidate], step: int, size: int, limit: int) -> Choice:
    """Choose `size` groups for the batch of `step`: oldest first, then in order of dispatch.

    The batch waits while it is not full, and while a running group would be too old for the step after this one.
    """
    finished = [candidate for candidate in candidates if candidate.finished]
    drop = {item.index: reason for item in finished if (reason := drop_reason(item, step, limit)) is not None}
    kept = sorted(
        (item for item in finished if item.index not in drop), key=lambda item: (item.oldest_step, item.index)
    )
    last_call = any(not item.finished and age(step + 1, item.oldest_step) > limit for item in candidates)
    if len(kept) < size or (last_call and any(age(step + 1, item.oldest_step) <= limit for item in kept[:size])):
        return Choice(None, drop)
    return Choice(tuple(item.index for item in kept[:size]), drop)


def hopeless(candidates: Sequence[Candidate], next_step: int, limit: int) -> list[int]:
    """Running groups that are too old for `next_step` already: cancelled before a sync rather than finished in vain."""
    return [item.index for item in candidates if not item.finished and age(next_step, item.oldest_step) > limit]
