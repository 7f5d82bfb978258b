"""Figures from what was measured, and what is over its limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

WINDOW_SECONDS = 1.0
AFTER_STEPS = 2

ALWAYS_TRUE = ("parameters_equal",)
MEMORY_LIMITS = (("extra_gib_engine", 0.5), ("extra_gib_trainer", 0.5), ("growth_bytes_50_syncs", 0))
MOST: dict[str, tuple[tuple[str, float], ...]] = {
    "dense_8b": (
        ("seconds", 0.016),
        ("engine_stop_seconds", 0.008),
        ("trainer_stop_seconds", 0.010),
        ("wire_ratio", 0.577),
        ("quantized_wire_ratio", 0.5002),
        *MEMORY_LIMITS,
    ),
    "moe_30b_a3b": (("seconds", 0.055), ("wire_ratio", 0.577), ("quantized_wire_ratio", 0.5002), *MEMORY_LIMITS),
}
LEAST: dict[str, tuple[tuple[str, float], ...]] = {
    "dense_8b": (
        ("times_faster_than_vllm_ipc", 3.0),
        ("tokens_share", 0.95),
        ("cast_of_copy", 0.90),
        ("commit_of_copy", 0.90),
    ),
}


class LoadFigures(NamedTuple):
    """One sync under load. `stop`: longest gap between steps less a normal step, in seconds."""

    stop: float
    step: float
    share: float


def load_figures(times: Sequence[float], tokens: Sequence[int], start: float, visible: float) -> LoadFigures:
    """What a sync from `start` to `visible` did to the steps around it.

    Args:
        times: When each step's tokens were there, ascending.
        tokens: How many.
        start, visible: The sync, on the same clock.

    Returns:
        `stop` looks at the gaps that overlap the sync and the first two after it; `step` is the median gap outside; `share` is
        the tokens of the second around the sync's middle over those of a normal second.
    """
    gaps = list(zip(times, times[1:], tokens[1:], strict=False))
    touched = [b - a for a, b, _ in gaps if b > start and a < visible]
    after = [b - a for a, b, _ in gaps if a >= visible]
    step = median([b - a for a, b, _ in gaps if b <= start] + after[AFTER_STEPS:])
    middle = (start + visible) / 2
    low, high = middle - WINDOW_SECONDS / 2, middle + WINDOW_SECONDS / 2
    outside = [(b - a, n) for a, b, n in gaps if b <= low or a >= high]
    rate = sum(n for _, n in outside) / sum(seconds for seconds, _ in outside)
    inside = sum(n for at, n in zip(times, tokens, strict=True) if low < at <= high)
    return LoadFigures(max(touched + after[:AFTER_STEPS]) - step, step, inside / (rate * WINDOW_SECONDS))


def judged(model: str, device: str, result: dict[str, Any]) -> list[str]:
    """What misses its limit; limits of speed and memory count on a card only."""
    faults = [f"{model}: {name} is {result.get(name)}" for name in ALWAYS_TRUE if result.get(name) is not True]
    if result.get("generations_equal") is not True and result.get("generations_repeat", True):
        faults.append(
            f"{model}: generations_equal is {result.get('generations_equal')}, and the engine repeats its own"
        )
    faults += [f"{model}: {stage} failed: {why.strip().splitlines()[-1]}" for stage, why in result["failed"].items()]
    if device == "cpu":
        return faults
    if result.get("load_path") != "plan":
        faults.append(f"{model}: load_path is {result.get('load_path')}: {result.get('load_fallback')}")
    for name, limit in MOST.get(model, ()):
        value = result.get(name)
        if value is None or value > limit:
            faults.append(f"{model}: {name} {value} is over {limit:g}")
    for name, limit in LEAST.get(model, ()):
        value = result.get(name)
        if value is None or not value >= limit:
            faults.append(f"{model}: {name} {value} is under {limit:g}")
    return faults


def rounded(value: Any) -> Any:
    """Numbers to 5 significant digits, wherever they stand."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
