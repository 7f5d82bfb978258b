"""`fp8rl run` with the real workers: what vLLM starts dies with the run, and the run goes on where it was."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from toys import ToyRun, descendants, names_of

SAMPLE = Path(__file__).parents[2] / "deploy" / "samples" / "reverse-text.yaml"
BOOT_SECONDS = 400.0
STEPS, EVERY = 60, 5
SETTINGS = ("--set", f"spec.rollout.steps={STEPS}", "--set", f"spec.trainer.checkpoint.everySteps={EVERY}")


def steps_of(out: Path) -> list[tuple[int, int]]:
    """(attempt, step) of every step that was recorded."""
    path = out / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [(record["attempt"], record["step"]) for record in records if record["kind"] == "step"]


@pytest.mark.vllm
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_run_and_it_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    with ToyRun(SAMPLE, tmp_path / "run", *SETTINGS) as run:
        run.until(lambda: len(steps_of(run.out)) >= 12, "twelve steps", BOOT_SECONDS)
        tree = descendants(run.process.pid)
        assert sum("EngineCore" in name for name in names_of(tree)) == 2
        begin = time.monotonic()
        run.process.send_signal(number)
        run.process.wait(30)
        run.until(lambda: not names_of(tree), "no process is left")
        assert time.monotonic() - begin < 15.0
        done = max(step for _, step in steps_of(run.out))
    with ToyRun(SAMPLE, tmp_path / "run", *SETTINGS, "--resume") as again:
        assert again.process.wait(BOOT_SECONDS) == 0
        steps = steps_of(again.out)
        assert {step for _, step in steps} == set(range(1, STEPS + 1))
        first = min(step for attempt, step in steps if attempt == 1)
        assert done - (EVERY - 1) <= first <= done + 1
        assert json.loads((again.out / "summary.json").read_text())["steps"] == STEPS
