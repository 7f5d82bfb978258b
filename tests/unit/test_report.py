"""Reports: exact figures from a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_body

from fp8rl_operator.report.build import ReportError, build_report
from fp8rl_operator.report.records import read_records
from fp8rl_operator.report.summary import quantile, summarize
from fp8rl_operator.report.text import summary_text


def record(kind: str, step: int, time: float, attempt: int = 0, **metrics: float) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    stages = {"cast": metrics["sync_seconds"] / 2} if kind == "sync" else {}
    body = {"kind": kind, "time": time, "attempt": attempt, "step": step, "version": step + 1}
    return {**body, "metrics": metrics, "stages": stages}


RECORDS = [
    record("sync", 0, 101.0, sync_seconds=0.5),
    record("evaluation", 0, 102.0, reward_heldout=0.1),
    record("step", 1, 104.0, mismatch_kl=0.001, entropy=2.0, off_policy_max=0.0, dropped=1.0, tokens_per_second=10.0),
    record("sync", 1, 105.0, sync_seconds=0.7),
    record("step", 2, 106.0, mismatch_kl=0.009, entropy=1.0, off_policy_max=2.0, dropped=0.0, tokens_per_second=30.0),
    record(
        "step", 2, 206.0, 1, mismatch_kl=0.003, entropy=1.0, off_policy_max=1.0, dropped=2.0, tokens_per_second=20.0
    ),
    record("sync", 2, 207.0, 1, sync_seconds=0.9),
    record("evaluation", 2, 208.0, 1, reward_heldout=0.9),
]


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    """A run folder of two attempts."""
    folder.mkdir()
    status = {
        "attempt": 1,
        "restarts": 1,
        "precision": {"wire": "blockwise", "recipe": "bf16"},
        "conditions": [{"type": "Complete", "status": "True", "reason": "StepsDone", "message": ""}],
    }
    (folder / "status.yaml").write_text(yaml.safe_dump({**make_body(), "status": status}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    events = [
        {"time": time, "source": "node", "kind": "EnginesReady", "message": str(n)}
        for n, time in ((0, 100.0), (1, 200.0))
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return folder


def test_the_summary_of_a_run_that_did_a_step_again(tmp_path: Path) -> None:
    summary = summarize(read_records(write_run(tmp_path / "run", RECORDS)))
    assert summary == {
        "name": "job",
        "reward_first": 0.1,
        "reward_last": 0.9,
        "steps": 2,
        "mismatch_kl_mean": 0.002,
        "mismatch_kl_max": 0.003,
        "entropy_mean": 1.5,
        "off_policy_max": 1.0,
        "dropped": 3,
        "weight_sync_seconds_p50": 0.7,
        "weight_versions": 3,
        "wire": "blockwise",
        "wall_seconds": 14.0,
        "weight_sync_seconds_p90": pytest.approx(0.86),
        "weight_sync_stages_p50": {"cast": 0.35},
        "tokens_per_second_p50": 15.0,
        "step_seconds_p50": None,
        "logprob_diff_p99_max": None,
        "recipe": "bf16",
        "seed": 0,
        "attempts": 2,
        "restarts": 1,
        "result": "Complete",
    }


def test_a_report_is_summary_and_plots(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RECORDS)
    summary = build_report(folder, plots=True)
    assert json.loads((folder / "summary.json").read_text()) == summary
    names = {path.name for path in folder.glob("*.png")}
    assert names == {
        "overview.png",
        "reward.png",
        "mismatch_kl.png",
        "staleness.png",
        "sync_seconds.png",
        "tokens_per_second.png",
        "entropy.png",
    }
    assert "held-out reward  0.100 -> 0.900" in summary_text(folder, summary)


def test_a_run_without_a_single_record_is_reported_without_figures(tmp_path: Path) -> None:
    summary = build_report(write_run(tmp_path / "run", []), plots=True)
    assert (summary["steps"], summary["reward_last"], summary["wall_seconds"]) == (0, None, None)


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RECORDS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    assert len(read_records(folder).records) == len(RECORDS)


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"status\.yaml: not there; name the folder of a run"):
        build_report(tmp_path, plots=False)


def test_a_step_beside_which_nothing_was_sampled_has_no_speed_and_stages_are_disjoint(tmp_path: Path) -> None:
    last = record("step", 3, 210.0, 1, tokens_per_second=0.0)
    sync = record("sync", 3, 211.0, 1, sync_seconds=1.0) | {"stages": {"cast": 0.25, "wire": 0.5, "commit": 0.125}}
    summary = summarize(read_records(write_run(tmp_path / "run", [*RECORDS[2:3], last, sync])))
    assert summary["tokens_per_second_p50"] == 10.0
    assert summary["weight_sync_stages_p50"] == {"cast": 0.25, "wire": 0.5, "commit": 0.125}


def test_quantiles_interpolate() -> None:
    assert (quantile([1.0, 2.0, 4.0], 0.5), quantile([0.0, 1.0], 0.9), quantile([], 0.5)) == (2.0, 0.9, None)
