"""`fp8rl run` with the real workers, whose engines read the trainer's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from toys import ToyRun

SAMPLE = Path(__file__).parents[2] / "deploy" / "samples" / "reverse-text.yaml"
BOOT_SECONDS = 400.0
STEPS = 6
SETTINGS = (f"spec.rollout.steps={STEPS}", "spec.evaluation.everySteps=0", "spec.weightSync.transport=ipc")


@pytest.mark.vllm
def test_engines_that_read_the_trainers_memory_serve_what_it_trains(tmp_path: Path) -> None:
    with ToyRun(SAMPLE, tmp_path / "run", *(word for text in SETTINGS for word in ("--set", text))) as run:
        assert run.process.wait(BOOT_SECONDS) == 0
        status = yaml.safe_load((run.out / "status.yaml").read_text())["status"]
        summary = json.loads((run.out / "summary.json").read_text())
    assert [member["transport"] for member in status["weightSyncGroup"]["members"]] == ["ipc"] * 3
    assert (summary["steps"], summary["weight_versions"]) == (STEPS, STEPS + 1)
    assert summary["mismatch_kl_max"] < 1e-2
