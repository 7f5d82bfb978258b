"""The orchestrator's files after a kill in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from fp8rl_workers.orchestrator.records import Records


def test_half_a_line_that_a_killed_process_left_is_cut_off_and_whole_lines_follow(tmp_path: Path) -> None:
    Records(tmp_path).rollouts([{"step": 1}, {"step": 2}])
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "te')
    Records(tmp_path).rollouts([{"step": 3}])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_file_that_holds_half_a_line_only_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind"')
    Records(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
