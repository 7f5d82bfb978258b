"""The benchmark's own arithmetic: a wrong ruler measures nothing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from weight_sync.figures import judged, load_figures, rounded
from weight_sync.kernels import read_trace

STEP = 0.01


def steady(gap_at: int, gap: float) -> tuple[list[float], list[int]]:
    """400 steps of 10 ms with 64 tokens each; the one before step `gap_at` takes `gap`."""
    times, now = [], 0.0
    for number in range(400):
        now += gap if number == gap_at else STEP
        times.append(now)
    return times, [64] * 400


def test_stop_is_the_gap_that_the_sync_made_less_a_normal_step() -> None:
    times, tokens = steady(200, 0.025)
    found = load_figures(times, tokens, times[198] + 0.001, times[199] + 0.001)
    assert found.stop == pytest.approx(0.015)
    assert found.step == pytest.approx(STEP)


def test_long_gap_far_from_the_sync_is_not_its_stop() -> None:
    times, tokens = steady(50, 0.5)
    found = load_figures(times, tokens, times[198] + 0.001, times[199] + 0.001)
    assert found.stop == pytest.approx(0.0, abs=1e-9)


def test_share_is_one_where_nothing_stopped() -> None:
    times, tokens = steady(399, STEP)
    assert load_figures(times, tokens, 2.0, 2.005).share == pytest.approx(1.0, abs=0.011)


def test_share_falls_by_the_part_of_the_second_that_was_lost() -> None:
    times, tokens = steady(200, STEP + 0.1)
    assert load_figures(times, tokens, times[199], times[200]).share == pytest.approx(0.9, abs=0.011)


def test_limits_of_speed_count_on_a_card_only() -> None:
    result = {"failed": {}, "parameters_equal": True, "generations_equal": True, "seconds": 1.0}
    assert judged("dense_8b", "cpu", result) == []
    faults = judged("dense_8b", "cuda", result)
    assert "dense_8b: seconds 1.0 is over 0.016" in faults
    assert "dense_8b: tokens_share None is under 0.95" in faults


def test_wrong_parameters_and_failed_stages_count_everywhere() -> None:
    result = {"failed": {"peer": "Traceback\nValueError: x"}, "parameters_equal": False, "generations_equal": True}
    assert judged("tiny", "cpu", result) == ["tiny: parameters_equal is False", "tiny: peer failed: ValueError: x"]


def test_device_work_of_a_trace_stands_on_the_monotonic_clock() -> None:
    events = [
        {"cat": "kernel", "name": "cast", "ts": 2_000_000.0, "dur": 5.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 1.0},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 1_000_000.0, "dur": 7.0},
    ]
    spans = read_trace({"baseTimeNanoseconds": 10_000_000_000, "traceEvents": events}, "engine", 4.0)
    assert [(span.process, span.name, span.start) for span in spans] == [
        ("engine's GPU", "copy", 7.0),
        ("engine's GPU", "cast", 8.0),
    ]
    assert spans[1].end - spans[1].start == pytest.approx(5e-6)


def test_numbers_are_rounded_wherever_they_stand() -> None:
    assert rounded({"a": [1.234567, {"b": 2}], "c": "x"}) == {"a": [1.2346, {"b": 2}], "c": "x"}
