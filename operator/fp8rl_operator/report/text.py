"""The summary for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS = (
    ("held-out reward", "reward_first", "reward_last", "{:.3f} -> {:.3f}"),
    ("mismatch KL", "mismatch_kl_mean", "mismatch_kl_max", "mean {:.2e}, largest step {:.2e}"),
    ("entropy", "entropy_mean", None, "{:.3f} nat"),
    ("oldest sample", "off_policy_max", "dropped", "{:.0f} steps, {} dropped"),
    ("weight sync", "weight_sync_seconds_p50", "weight_versions", "{:.3f} s (median), {} versions"),
    ("tokens", "tokens_per_second_p50", None, "{:.0f} a second (median)"),
    ("steps", "steps", "wall_seconds", "{} in {:.0f} s"),
)


def summary_text(folder: Path, summary: dict[str, Any]) -> str:
    """A few lines: reward, mismatch, staleness, sync, speed, and where the plots are."""
    lines = [f"{summary['name']}: {summary['result']}, recipe {summary['recipe']}, wire {summary['wire']}"]
    for title, first, second, form in ROWS:
        shown = [summary[first]] if second is None else [summary[first], summary[second]]
        if all(value is not None for value in shown):
            lines.append(f"  {title:<16} {form.format(*shown)}")
    return "\n".join([*lines, f"  {'report':<16} {folder / 'summary.json'}, {folder / 'overview.png'}", ""])
