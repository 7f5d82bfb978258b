"""Age, pacing and choice of a batch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_workers.orchestrator.staleness import (
    Candidate,
    Choice,
    Pace,
    age,
    choose,
    drop_reason,
    hopeless,
    num_dispatchable,
)


def group(index: int, oldest: int, finished: bool = True, newest: int | None = None) -> Candidate:
    return Candidate(index, oldest, oldest if newest is None else newest, finished)


def pace(consumed: int, published: int, outstanding: int = 0, limit: int = 8, total: int = 100) -> Pace:
    return Pace(consumed, published, outstanding, groups_per_batch=4, limit=limit, total_steps=total)


@pytest.mark.parametrize(("step", "oldest", "expected"), [(1, 0, 0), (2, 0, 1), (2, 1, 0), (10, 3, 6)])
def test_age_is_counted_from_the_step_before_the_one_that_consumes(step: int, oldest: int, expected: int) -> None:
    assert age(step, oldest) == expected


@pytest.mark.parametrize(
    ("consumed", "published", "outstanding", "limit", "expected"),
    [
        (0, 0, 0, 8, 8),  # at the start: the batch of step 1 and, one step ahead, that of step 2
        (1, 0, 4, 8, 0),  # step 1 trains: its successor's batch is outstanding, nothing more
        (1, 0, 1, 8, 3),
        (1, 1, 4, 8, 4),  # step 1's weights are out: step 3's batch may start
        (3, 1, 0, 8, 4),  # the sync of step 2 is late: one batch more, up to the limit
        (3, 1, 4, 8, 0),
        (3, 1, 0, 1, 0),  # ... but nothing that would be too old
        (0, 0, 0, 0, 4),  # on-policy: only the next batch
        (1, 0, 0, 0, 0),  # on-policy: wait for the weights
        (1, 1, 0, 0, 4),
    ],
)
def test_dispatch_keeps_one_step_ahead_and_never_starts_what_would_be_too_old(
    consumed: int, published: int, outstanding: int, limit: int, expected: int
) -> None:
    assert num_dispatchable(pace(consumed, published, outstanding, limit)) == expected


def test_while_the_weights_of_the_last_step_are_not_late_nothing_is_dispatched_for_the_step_after_the_next() -> None:
    assert num_dispatchable(pace(3, 1, 0)) == 4
    assert num_dispatchable(dataclasses.replace(pace(3, 1, 0), late=False)) == 0
    assert num_dispatchable(dataclasses.replace(pace(3, 2, 0), late=False)) == 4


def test_dispatch_stops_at_the_last_batch_of_the_run() -> None:
    assert num_dispatchable(pace(9, 9, 0, total=10)) == 4
    assert num_dispatchable(pace(10, 10, 0, total=10)) == 0


@given(
    consumed=st.integers(0, 50),
    lag=st.integers(0, 20),
    outstanding=st.integers(0, 100),
    limit=st.integers(0, 12),
)
def test_no_group_is_started_that_is_too_old_when_consumed_in_order(
    consumed: int, lag: int, outstanding: int, limit: int
) -> None:
    count = num_dispatchable(pace(consumed + lag, consumed, outstanding, limit, total=10_000))
    for k in range(outstanding, outstanding + count):
        assert age(consumed + lag + 1 + k // 4, consumed) <= limit


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (group(0, 3), None),
        (group(0, 2), None),
        (group(0, 1), "stale"),
        (group(0, 2, newest=4), None),
        (group(0, 1, newest=4), "tooLong"),
    ],
)
def test_a_group_is_dropped_for_its_age_or_for_the_versions_that_an_episode_spans(
    candidate: Candidate, expected: str | None
) -> None:
    assert drop_reason(candidate, 5, 2) == expected


def test_a_batch_takes_the_oldest_first_then_the_order_of_dispatch() -> None:
    groups = [group(0, 2), group(1, 1), group(2, 1), group(3, 2)]
    assert choose(groups, step=3, size=3, limit=8) == Choice((1, 2, 0), {})


def test_a_batch_that_is_not_full_waits_and_names_what_is_too_old() -> None:
    assert choose([group(0, 0), group(1, 9)], step=10, size=2, limit=2) == Choice(None, {0: "stale"})


def test_a_batch_waits_for_a_straggler_that_would_be_too_old_for_the_next() -> None:
    straggler = group(0, 3, finished=False)
    assert choose([straggler, group(1, 4), group(2, 4)], step=5, size=2, limit=1) == Choice(None, {})
    assert choose([straggler, group(1, 3), group(2, 3)], step=5, size=2, limit=1) == Choice((1, 2), {})
    assert choose([straggler, group(1, 4), group(2, 4)], step=5, size=2, limit=2) == Choice((1, 2), {})


def test_running_groups_that_are_too_old_for_the_next_step_are_hopeless() -> None:
    groups = [group(0, 1, finished=False), group(1, 2, finished=False), group(2, 1)]
    assert hopeless(groups, next_step=5, limit=2) == [0]
