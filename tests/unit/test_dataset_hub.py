"""`python -m fp8rl_workers.models.prompts`: a split of JSON lines from a hub, once, beside a stand-in of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.models.prompts import Source, choose_files
from fp8rl_workers.orchestrator.dataset import read_examples

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"prompts",
    "easy/train-00000-of-00002.jsonl": b'{"id": "a", "prompt": "A"}',
    "easy/train-00001-of-00002.jsonl": b'{"id": "b", "prompt": "B"}\n',
    "easy/test.jsonl": b'{"id": "c", "prompt": "C"}\n',
    "hard/train.jsonl": b'{"id": "d", "prompt": "D"}\n',
}


class Hub(BaseHTTPRequestHandler):
    """The routes of a hub that fetching files of the data set `o/d` needs, with a token."""

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.removeprefix(f"/datasets/o/d/resolve/{COMMIT}/")
        if self.headers.get("authorization") != "Bearer secret":
            self.reply(401, b"{}", body=body)
        elif path in {"/api/datasets/o/d", "/api/datasets/o/d/revision/v1"}:
            siblings = [{"rfilename": name} for name in FILES]
            self.reply(200, json.dumps({"id": "o/d", "sha": COMMIT, "siblings": siblings}).encode(), body=body)
        elif name in FILES:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(name)}"'}
            self.reply(200, FILES[name], body=body, headers=headers)
        else:
            self.reply(404, b"{}", body=body, headers={"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, data: bytes, *, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "secret"}
    server.shutdown()
    server.server_close()


def fetch(path: Path, source: dict[str, str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    own = {"FP8RL_DATASET_SOURCE": json.dumps(source), "FP8RL_DATASET_PATH": str(path)}
    command = [sys.executable, "-m", "fp8rl_workers.models.prompts"]
    return subprocess.run(command, env=os.environ | own | environ, capture_output=True, text=True, check=False)


def test_a_split_is_fetched_with_its_token_and_its_shards_are_one_file_of_examples(
    hub: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "state" / "prompts.jsonl"
    source = {"repository": "o/d", "subset": "easy", "revision": "v1", "split": "train"}
    done = fetch(path, source, **hub)
    assert (done.returncode, done.stdout) == (0, f"fetched {path}\n"), done.stderr
    assert [(item.id, item.prompt) for item in read_examples(path)] == [("a", "A"), ("b", "B")]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_there_is_kept_without_asking_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("kept")
    done = fetch(path, {"repository": "o/d", "split": "train"}, HF_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stdout, path.read_text()) == (0, f"found {path}\n", "kept")


@pytest.mark.parametrize(
    ("source", "environ", "code", "message"),
    [
        (
            {"repository": "o/d", "split": "train"},
            {},
            65,
            (
                "InvalidInput: rollout.dataset.hub: o/d has train.jsonl or train-*.jsonl in 2 folders: easy, hard;"
                " name one of them as subset"
            ),
        ),
        (
            {"repository": "o/d", "split": "dev", "subset": "easy"},
            {},
            65,
            (
                "InvalidInput: rollout.dataset.hub: o/d has no dev.jsonl or dev-*.jsonl in easy; its JSON-lines files:"
                " easy/test.jsonl, easy/train-00000-of-00002.jsonl, easy/train-00001-of-00002.jsonl, hard/train.jsonl;"
                " name another split or subset, or put a file of JSON lines on dataset.volume"
            ),
        ),
        (
            {"repository": "o/d", "split": "test"},
            {"HF_TOKEN": "wrong"},
            65,
            "InvalidInput: rollout.dataset.hub: cannot fetch o/d at revision default: ",
        ),
        (
            {"repository": "o/d", "split": "test"},
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            1,
            "HubUnavailable: rollout.dataset.hub: cannot fetch o/d at revision default: ",
        ),
        ({"repository": "o/d"}, {}, 65, "InvalidInput: FP8RL_DATASET_SOURCE: split: Field required"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(
    hub: dict[str, str], tmp_path: Path, source: dict[str, str], environ: dict[str, str], code: int, message: str
) -> None:
    done = fetch(tmp_path / "state" / "prompts.jsonl", source, **hub | environ)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(message)
    assert not (tmp_path / "state").exists()


def test_a_repository_without_json_lines_says_so() -> None:
    with pytest.raises(InvalidInputError, match="its JSON-lines files: none"):
        choose_files(Source(repository="o/d", split="train"), ["data/train-00000-of-00001.parquet"])
    names = ["train.jsonl", "trainer.jsonl", "train-1.jsonl", "train-0.jsonl"]
    chosen = choose_files(Source(repository="o/d", split="train"), names)
    assert chosen == ["train-0.jsonl", "train-1.jsonl", "train.jsonl"]
