"""The orchestrator's process at its edges: bad input, its API, its memory, its end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
from orchestrator_peers import Cluster

from fp8rl_workers.config import ORCHESTRATOR_PORT
from fp8rl_workers.metrics import ORCHESTRATOR_METRICS


def run_with(tmp_path: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """Run the process with a config that cannot work."""
    cluster = Cluster(tmp_path, **changes)
    environ = os.environ | {
        "FP8RL_CONFIG": str(tmp_path / "config.json"),
        "FP8RL_TOKEN_FILE": str(tmp_path / "token"),
        "FP8RL_POD_NAME": "orchestrator-0",
        "FP8RL_POD_UID": "uid",
        "FP8RL_POD_IP": cluster.host,
        "FP8RL_STATE_DIR": str(tmp_path / "state"),
    }
    command = [sys.executable, "-m", "fp8rl_workers.orchestrator"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def peak_mebibytes(pid: int) -> float:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_faults_of_the_config_end_the_process_with_one_line_that_names_the_field(tmp_path: Path) -> None:
    cases = {
        "unknown": ({"nonsense": 1}, "nonsense: Extra inputs are not permitted"),
        "environment": ({"environment": {"id": "nothing"}}, "environment.id: 'nothing' is unknown"),
        "batch": ({"batch_size": 6, "group_size": 4}, "6 = 1 x 4 + 2; use 8"),
        "context": (
            {"max_model_len": 20},
            "longest prompt 10 + rollout.maxTokens 12 = 22 tokens is over model.maxModelLen 20",
        ),
        "prompts": ({"dataset": {"path": "/nowhere/p.jsonl"}}, "rollout.dataset: cannot read /nowhere/p.jsonl"),
        "model": ({"model_path": "/nowhere"}, "model.path: /nowhere/tokenizer.json does not exist"),
    }
    for name, (changes, message) in cases.items():
        done = run_with(tmp_path / name, **changes)
        assert done.returncode == 65, done.stderr
        assert message in done.stderr
        assert done.stderr.splitlines()[-1].startswith(("InvalidInput: ", "InvalidModel: "))
        assert "Traceback" not in done.stderr


async def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    async with Cluster(tmp_path / "first") as first:
        config = tmp_path / "first" / "config.json"
        environ = os.environ | {
            "FP8RL_CONFIG": str(config),
            "FP8RL_TOKEN_FILE": str(tmp_path / "first" / "token"),
            "FP8RL_POD_NAME": "orchestrator-0",
            "FP8RL_POD_UID": "uid",
            "FP8RL_POD_IP": first.host,
            "FP8RL_STATE_DIR": str(tmp_path / "other"),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fp8rl_workers.orchestrator", env=environ, stderr=asyncio.subprocess.PIPE
        )
        _, text = await process.communicate()
        assert process.returncode == 65
        assert f"cannot listen on {first.host}:{ORCHESTRATOR_PORT}" in text.decode()


async def test_the_api_asks_for_the_token_says_what_it_waits_for_and_shows_metrics(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=2) as cluster:
        url = f"http://{cluster.host}:{ORCHESTRATOR_PORT}"
        async with aiohttp.ClientSession() as stranger:
            async with stranger.get(f"{url}/v1/status") as response:
                assert response.status == 401
            async with stranger.get(f"{url}/healthz") as response:
                assert response.status == 200
        async with cluster.session.put(f"{url}/v1/group", data="{}") as response:
            assert response.status == 400
        document = {"job_uid": "another", "attempt": 0, "generation": 9, "members": []}
        async with cluster.session.put(f"{url}/v1/group", data=json.dumps(document)) as response:
            assert response.status == 409
        await cluster.finish()
        async with cluster.session.get(f"{url}/metrics") as response:
            text = await response.text()
        assert all(name in text for name, _ in ORCHESTRATOR_METRICS.values())
        assert 'fp8rl_weight_sync_stage_seconds_bucket{le="0.05",stage="commit"}' in text
        assert "fp8rl_policy_version 3.0" in text


async def test_the_process_is_small_and_ends_at_sigterm(tmp_path: Path) -> None:
    async with Cluster(tmp_path, steps=2) as cluster:
        await cluster.finish()
        assert cluster.process is not None
        assert peak_mebibytes(cluster.process.pid) < 120
        cluster.process.terminate()
        assert await asyncio.wait_for(cluster.process.wait(), 5) == 0


def test_the_orchestrator_imports_no_torch() -> None:
    code = "import sys, fp8rl_workers.orchestrator.main; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
