"""Choice of a replica, and calls that are sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.orchestrator.dispatch import (
    LOST,
    NOT_FINITE,
    SUSPECT,
    Dispatcher,
    Replica,
    all_not_finite,
    choose,
)
from fp8rl_workers.orchestrator.environments import Completion
from fp8rl_workers.orchestrator.sampling import EngineLostError

DONE = Completion((1,), (-0.5,), ((1, 1),), "stop")


class Answers:
    """An engine that answers what it is told, in order; then DONE."""

    def __init__(self, *answers: BaseException) -> None:
        self.answers = list(answers)
        self.calls = 0

    async def generate(self, _: dict[str, Any]) -> Completion:
        self.calls += 1
        await asyncio.sleep(0)
        if self.answers:
            raise self.answers.pop(0)
        return DONE


def replica(uid: str, in_flight: int = 0, version: int | None = 1, fenced: str = "") -> Replica:
    return Replica(uid, uid, Answers(), version, in_flight, fenced)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicas", "home", "slack", "expected"),
    [
        ([replica("a", 2), replica("b", 1)], None, 0, "b"),
        ([replica("a", 1), replica("b", 1)], None, 0, "a"),
        ([replica("a", 1), replica("b", 0, fenced="lost")], None, 0, "a"),
        ([replica("a", 1), replica("b", 0, version=None)], None, 0, "a"),
        ([replica("a", 4), replica("b", 3)], None, 0, "b"),
        ([replica("a", 4), replica("b", 4)], None, 0, None),
        ([replica("a", 3), replica("b", 0)], "a", 4, "a"),
        ([replica("a", 3), replica("b", 0)], "a", 2, "b"),
        ([replica("a", 4), replica("b", 0)], "a", 8, "b"),
        ([], None, 0, None),
    ],
)
def test_the_least_loaded_serving_replica_wins_unless_the_home_is_close(
    replicas: list[Replica], home: str | None, slack: int, expected: str | None
) -> None:
    chosen = choose(replicas, 4, home, slack)
    assert (chosen.uid if chosen else None) == expected


async def dispatcher(**engines: Answers) -> Dispatcher:
    made = Dispatcher(4)
    for uid, engine in engines.items():
        made.add(uid, uid, engine)  # type: ignore[arg-type]
        await made.serve(uid, 1)
    return made


async def test_a_call_whose_engine_is_gone_goes_elsewhere_and_the_engine_gets_no_more() -> None:
    gone, good = Answers(EngineLostError("refused")), Answers()
    made = await dispatcher(a=gone, b=good)
    assert await made.generate(lambda _: {}) == DONE
    assert (gone.calls, good.calls) == (1, 1)
    assert (made.replicas["a"].fenced, made.in_flight) == (SUSPECT, 0)


async def test_calls_in_flight_on_a_lost_replica_are_sent_again_elsewhere() -> None:
    class Hangs(Answers):
        async def generate(self, _: dict[str, Any]) -> Completion:
            await asyncio.Event().wait()
            return DONE

    made = await dispatcher(a=Hangs(), b=Answers())
    call = asyncio.create_task(made.generate(lambda _: {}))
    await asyncio.sleep(0.01)
    made.lose("a")
    assert await call == DONE
    assert made.in_flight == 0


async def test_a_value_that_is_not_finite_fences_its_replica_until_it_has_the_version_again() -> None:
    bad = Answers(NonFiniteError("nan"))
    made = await dispatcher(a=bad)
    dropped: list[str] = []
    made.on_not_finite = lambda item: dropped.append(item.uid)
    call = asyncio.create_task(made.generate(lambda _: {}))
    await asyncio.sleep(0.01)
    assert (made.replicas["a"].fenced, dropped) == ("nonFinite", ["a"])
    await made.serve("a", 2)
    assert await call == DONE
    assert made.replicas["a"].nan_faults == 0


async def test_replicas_that_answer_nan_again_after_healing_end_the_job() -> None:
    made = await dispatcher(a=Answers(NonFiniteError("1"), NonFiniteError("2")))
    call = asyncio.create_task(made.generate(lambda _: {}))
    await asyncio.sleep(0.01)
    assert not all_not_finite(made.replicas.values())
    await made.serve("a", 2)
    await asyncio.sleep(0.01)
    assert all_not_finite(made.replicas.values())
    call.cancel()


def test_no_replica_at_all_is_no_proof_of_broken_weights() -> None:
    assert not all_not_finite([])
    assert not all_not_finite([replica("a", version=None)])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replica("b"), False),
        (replica("b", version=None), True),
        (replica("b", fenced=LOST), True),
        (replica("b", fenced=SUSPECT), True),
        (replica("b", fenced=NOT_FINITE), False),
    ],
)
def test_replicas_that_boot_or_are_gone_do_not_keep_a_job_with_broken_weights_alive(
    other: Replica, *, expected: bool
) -> None:
    broken = replica("a", fenced=NOT_FINITE)
    broken.nan_faults = 2
    assert all_not_finite([broken, other]) is expected


async def test_a_request_is_made_for_the_version_that_its_replica_serves() -> None:
    made = await dispatcher(a=Answers())
    await made.serve("a", 5)
    versions: list[int] = []

    def body_of(version: int) -> dict[str, Any]:
        versions.append(version)
        return {}

    await made.generate(body_of)
    assert versions == [5]
