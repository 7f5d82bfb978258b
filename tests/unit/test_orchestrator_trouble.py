"""When a failed weight sync is tried again, who is left out, when the job gives up."""

from __future__ import annotations

import pytest

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.orchestrator.endings import JobFailedError, raise_for_tokenizer, raise_if_broken
from fp8rl_workers.orchestrator.trouble import Trouble, kind_of, listed, one_line, pause_seconds


def test_the_pause_after_a_failed_sync_doubles_from_half_a_second_to_fifteen() -> None:
    assert [pause_seconds(failures) for failures in range(1, 9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert pause_seconds(10_000) == 15.0


def test_nothing_is_tried_until_the_pause_is_over_and_the_words_name_the_cause() -> None:
    trouble = Trouble()
    trouble.failed({"engine-0": "no\nmemory"}, 10.0, counts=True)
    trouble.failed({"engine-0": "no\nmemory"}, 10.5, counts=True)
    assert trouble.held(11.0) == "engine-0: no memory; tried again in 0.5 s (failure 2 in a row)"
    assert trouble.held(11.5) == ""


def test_the_eighth_failure_in_a_row_is_the_end_unless_a_sync_succeeded_or_pods_were_gone() -> None:
    trouble = Trouble()
    for count in range(8):
        assert trouble.verdict() == ""
        trouble.failed({"engine-0": "no memory"}, float(count), counts=True)
    assert trouble.verdict() == "8 weight syncs in a row reached no engine: engine-0: no memory"
    trouble.succeeded(["a"])
    assert (trouble.verdict(), trouble.held(7.0)) == ("", "")
    for count in range(100):
        trouble.failed({"engine-0": "lost"}, float(count), counts=False)
    assert trouble.verdict() == ""


def test_an_engine_that_fails_is_paused_then_shed_longer_each_time_until_it_commits() -> None:
    trouble = Trouble()
    assert trouble.blame("a", "engine-0", "x", 0.0).failures == 1
    assert (trouble.paused(0.4), trouble.shed_now(0.4), trouble.paused(0.5)) == ({"a"}, set(), set())
    until = []
    for _ in range(9):
        trouble.blame("a", "engine-0", "x", 0.0)
        trouble.shed("a", 0.0)
        until.append(trouble.members["a"].until)
    assert until == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]
    assert (trouble.shed_now(319.0), trouble.shed_now(320.0)) == ({"a"}, set())
    trouble.succeeded(["b"])
    assert "a" in trouble.members
    trouble.succeeded(["a"])
    assert trouble.members == {}


def test_errors_of_one_cause_are_listed_together_in_one_line() -> None:
    errors = {
        "engine-0": "POST http://127.0.0.3:8000/c: 500 sync 7: digest 0123456789ab",
        "engine-1": "POST http://127.0.0.4:8000/c: 500 sync 7: digest ba9876543210",
        "engine-2": "no memory",
    }
    assert listed(errors) == f"engine-0, engine-1: {errors['engine-0']}; engine-2: no memory"
    assert one_line("a\n b" + "c" * 300, 10) == "a bcccc..."
    assert kind_of("epoch 3: feed the beef") == kind_of("epoch 41: feed the beef")
    assert kind_of("no memory") != kind_of("no peer")


def test_weights_that_reach_nobody_end_the_job_with_the_pod_and_its_error() -> None:
    raise_if_broken([], [], "")
    with pytest.raises(JobFailedError, match="engine-0: no memory") as caught:
        raise_if_broken([], [], "8 weight syncs in a row reached no engine: engine-0: no memory")
    assert caught.value.reason == "WeightSyncFailed"


def test_another_tokenizer_than_the_trainers_is_refused_with_both_digests_and_the_file() -> None:
    raise_for_tokenizer("/m/tokenizer.json", "a" * 64, "a" * 64)
    with pytest.raises(
        InvalidModelError, match=f"/m/tokenizer.json has SHA-256 {'a' * 64}, the trainer's .* {'b' * 64}"
    ):
        raise_for_tokenizer("/m/tokenizer.json", "a" * 64, "b" * 64)
