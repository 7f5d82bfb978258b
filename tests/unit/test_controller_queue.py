"""One pass of a job at a time, causes coalesce, failures back off."""

from __future__ import annotations

import asyncio

import pytest

from fp8rl_operator.controller.queue import BACKOFF_MOST_SECONDS, JobQueue, backoff, rest


async def soon(queue: JobQueue, seconds: float = 0.05) -> object | None:
    """The next key within a moment, None if there is none."""
    try:
        return await asyncio.wait_for(queue.get(), seconds)
    except TimeoutError:
        return None


async def test_three_causes_are_one_pass():
    queue = JobQueue()
    for _ in range(3):
        queue.add("a")
    assert len(queue) == 1
    assert await soon(queue) == "a"
    assert await soon(queue) is None


async def test_a_key_is_never_with_two_workers():
    queue = JobQueue(settle=0)
    queue.add("a")
    assert await soon(queue) == "a"
    queue.add("a")
    assert await soon(queue) is None
    queue.done("a", None)
    assert await soon(queue) == "a"


async def test_a_cause_during_a_pass_comes_after_the_rest():
    queue = JobQueue(settle=0.1)
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.done("a", None)
    assert await soon(queue, 0.05) is None
    assert await soon(queue, 0.2) == "a"


async def test_a_changed_job_does_not_rest_and_goes_first():
    queue = JobQueue(settle=60)
    queue.add("a")
    await queue.get()
    queue.done("a", None)
    queue.add("b")
    queue.add("c")
    queue.add("a", urgent=True)
    queue.add("c", urgent=True)
    assert [await soon(queue) for _ in range(4)] == ["a", "c", "b", None]


async def test_two_changed_jobs_run_at_once_and_leave_room_for_the_others():
    queue = JobQueue(settle=0)
    for key in "abc":
        queue.add(key, urgent=True)
    queue.add("x")
    assert [await soon(queue) for _ in range(4)] == ["a", "b", "x", None]
    queue.done("b", None)
    assert await soon(queue) == "c"


async def test_the_timer_of_a_pass_brings_the_key_again_and_a_cause_replaces_it():
    queue = JobQueue(settle=0)
    queue.add("a")
    await queue.get()
    queue.done("a", 0.05)
    assert await soon(queue, 0.2) == "a"
    queue.done("a", 0.05)
    queue.add("a")
    assert await soon(queue) == "a"
    queue.done("a", None)
    assert await soon(queue, 0.1) is None


async def test_failures_wait_twice_as_long_each_time_and_a_success_forgets_them():
    queue = JobQueue(settle=0)
    waits = []
    for _ in range(3):
        queue.add("a", urgent=True)
        await queue.get()
        waits.append(queue.failed("a"))
    assert [round(wait / first) for wait, first in zip(waits, (0.5, 1.0, 2.0), strict=True)] == [1, 1, 1]
    queue.add("a", urgent=True)
    await queue.get()
    queue.done("a", None)
    queue.add("a", urgent=True)
    await queue.get()
    assert queue.failed("a") < 0.7


async def test_events_of_children_do_not_shorten_a_back_off_but_a_changed_job_does():
    queue = JobQueue(settle=0)
    queue.add("a")
    await queue.get()
    assert queue.failed("a") > 0.3
    queue.add("a")
    assert await soon(queue) is None
    queue.add("a", urgent=True)
    assert await soon(queue) == "a"


async def test_nothing_is_kept_of_a_forgotten_key():
    queue = JobQueue(settle=0)
    queue.add("a")
    await queue.get()
    queue.failed("a")
    queue.add("b")
    queue.forget("a")
    queue.forget("b")
    assert await soon(queue, 0.7) is None
    assert not any(
        vars(queue)[name] for name in ("_waiting", "_timers", "_rested", "_failures", "_again", "_running", "_urged")
    )


async def test_a_key_forgotten_during_its_pass_gets_no_second_one_beside_it():
    queue = JobQueue(settle=0.0)
    queue.add("a")
    assert await queue.get() == "a"
    queue.forget("a")
    queue.add("a", urgent=True)
    assert (queue.running, len(queue)) == (1, 0)
    queue.done("a", 1.0)
    assert (queue.running, len(queue)) == (0, 0)


async def test_a_key_forgotten_during_its_pass_leaves_nothing_behind():
    queue = JobQueue(settle=0)
    queue.add("a")
    await queue.get()
    queue.forget("a")
    queue.done("a", 0.01)
    assert await soon(queue, 0.1) is None


@pytest.mark.parametrize(("failures", "least", "most"), [(1, 0.4, 0.6), (2, 0.8, 1.2), (5, 6.4, 9.6), (60, 96, 144)])
def test_the_back_off_doubles_to_a_limit_and_is_spread_by_a_fifth(failures: int, least: float, most: float):
    assert backoff(failures, 0.0) == pytest.approx(least)
    assert backoff(failures, 0.9999999) == pytest.approx(most)
    assert backoff(failures, 0.5) <= BACKOFF_MOST_SECONDS


def test_the_rest_after_a_pass_grows_with_the_line_to_ten_seconds():
    assert [rest(1.0, line) for line in (0, 8, 40, 1000)] == [1.0, 2.0, 6.0, 10.0]
    assert rest(0.0, 1000) == 0.0
    assert rest(60.0, 1000) == 60.0


async def test_a_job_that_was_new_waits_for_all_new_ones_and_an_old_one_does_not_wait():
    queue = JobQueue(settle=0, urgent_at_once=1)
    for key in "ab":
        queue.add(key, urgent=True)
    assert await soon(queue) == "a"
    queue.done("a", None)
    queue.add("a")
    queue.add("old")
    assert [await soon(queue) for _ in range(3)] == ["b", "old", None]
    queue.done("b", None)
    assert await soon(queue) == "a"


async def test_a_job_that_was_new_waits_no_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fp8rl_operator.controller.queue.YOUNG_WAIT_SECONDS", 0.1)
    queue = JobQueue(settle=0, urgent_at_once=1)
    for key in "abc":
        queue.add(key, urgent=True)
    assert await soon(queue) == "a"
    queue.done("a", None)
    queue.add("a")
    assert [await soon(queue), await soon(queue)] == ["b", None]
    await asyncio.sleep(0.1)
    assert await soon(queue) == "a"


async def test_no_more_than_so_many_jobs_that_were_new_run_at_once_and_old_ones_beside_them():
    queue = JobQueue(settle=0, young_at_once=1)
    for key in "ab":
        queue.add(key, urgent=True)
        assert await soon(queue) == key
        queue.done(key, None)
    for key in ("a", "b", "old"):
        queue.add(key)
    assert [await soon(queue) for _ in range(3)] == ["old", "a", None]
    queue.done("a", None)
    assert await soon(queue) == "b"
