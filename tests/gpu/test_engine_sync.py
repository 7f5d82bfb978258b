"""A real vLLM and a trainer on one card: what the engine computes after a sync, through 100 of them, and without its trainer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SCENARIOS = Path(__file__).with_name("engine_scenarios.py")


def seen(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a process of its own."""
    command = [sys.executable, str(SCENARIOS), name, device, str(folder)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode == 0, f"{name} ended with {done.returncode}; its words stand on stderr"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    if device == "cuda":
        assert "FULL" in found["graphs"] or "PIECEWISE" in found["graphs"]
        assert found["scheduling"] == "async"
    assert found["load_path"] == "plan", found["load_fallback"]
    assert found["audit_passed"]
    return found


def test_synced_engine_equals_one_that_loaded_the_same_quantized_checkpoint(device: str, tmp_path: Path) -> None:
    found = seen("equality", device, tmp_path)
    assert found["parameters_that_differ"] == []
    assert found["generations_equal"]
    assert found["different_tokens"] > 4


def test_fp8_kv_cache_answers_the_same_after_five_syncs_and_nearly_as_a_bf16_one(device: str, tmp_path: Path) -> None:
    found = seen("kv_cache", device, tmp_path)
    assert found["finite"]
    assert found["same"]
    plain = seen("kv_reference", device, tmp_path)
    assert plain["tokens"] == 256
    assert plain["mean_difference"] <= 0.05


def test_every_token_of_100_commits_under_load_carries_the_version_that_sampled_it(device: str, tmp_path: Path) -> None:
    found = seen("labels", device, tmp_path)
    assert found["version"] == 100
    assert found["wrong"] == 0
    assert found["looked"] > 1000
    assert found["spanning"] > 10
    assert found["versions"] > 50


def test_engine_serves_on_when_its_trainer_is_killed_in_the_midst_and_takes_the_next_one(
    device: str, tmp_path: Path
) -> None:
    found = seen("lost_trainer", device, tmp_path)
    assert found["steps_after"] >= 5
    assert found["version_after"] == 1
    assert found["parameters_kept"]
    assert found["answers_kept"]
    assert found["seconds_to_next_version"] < 60
    assert found["version"] == 3
    assert found["parameters_that_differ"] == []
