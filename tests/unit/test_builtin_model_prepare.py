"""`python -m fp8rl_workers.models.prepare`: once for many, all or nothing, and plain words about what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.models import prepare as command
from fp8rl_workers.models.folder import identity, link, make_once, missing_files
from fp8rl_workers.models.prepare import Request, check, find_recipe, prepare
from fp8rl_workers.models.recipe import Recipe

BUILTIN = {"source": {"builtin": {"name": "reverse-text-tiny"}}}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights", "README.md": b"not wanted"}


def silent(_line):
    pass


def write_files(folder, names=("config.json", "tokenizer.json", "model.safetensors")):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(FILES[name])


def run_prepare(model, path, **environment):
    variables = {**os.environ, "FP8RL_MODEL_SOURCE": json.dumps(model), "FP8RL_MODEL_PATH": str(path), **environment}
    return subprocess.run(
        [sys.executable, "-m", "fp8rl_workers.models.prepare"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_two_pods_at_once_make_a_model_once(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from fp8rl_workers.models.folder import make_once\n"
        "def build(folder):\n"
        "    time.sleep(0.3); (folder / 'by').write_text(str(os.getpid()))\n"
        "print(make_once(Path(sys.argv[1]), 'tiny-1', build, lambda line: None))"
    )
    target = tmp_path / "models" / "tiny"
    pods = [subprocess.Popen([sys.executable, "-c", code, target], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {pod.pid: pod.communicate()[0].strip() for pod in pods}
    assert sorted(answers.values()) == ["False", "False", "False", "True"]
    assert answers[int((target / "by").read_text())] == "True"
    assert identity(target) == "tiny-1"


def test_a_build_that_fails_leaves_no_folder_and_the_next_one_starts_afresh(tmp_path):
    def full_disk(folder):
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        make_once(tmp_path / "tiny", "tiny-1", full_disk, silent)
    assert not (tmp_path / "tiny").exists()
    assert make_once(tmp_path / "tiny", "tiny-1", write_files, silent)
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == [
        "config.json",
        "fp8rl_model.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_made_folder_is_readable_for_other_users(tmp_path):
    def build(folder):
        write_files(folder)
        (folder / "config.json").chmod(0o600)

    make_once(tmp_path / "tiny", "tiny-1", build, silent)
    assert (tmp_path / "tiny" / "config.json").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_holds_something_else_is_never_overwritten(tmp_path):
    write_files(tmp_path / "mine")
    with pytest.raises(InvalidInputError, match="holds files that fp8rl did not make, not model tiny-1; remove it"):
        make_once(tmp_path / "mine", "tiny-1", write_files, silent)
    make_once(tmp_path / "tiny", "tiny-1", write_files, silent)
    with pytest.raises(InvalidInputError, match="holds model tiny-1, not model tiny-2"):
        make_once(tmp_path / "tiny", "tiny-2", write_files, silent)


def test_a_link_is_replaced_and_a_folder_in_its_place_is_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link(tmp_path / "run" / "model", tmp_path / name)
    assert (tmp_path / "run" / "model").resolve() == tmp_path / "b"
    with pytest.raises(InvalidInputError, match="exists and is no link"):
        link(tmp_path / "a", tmp_path / "b")


def test_all_missing_files_are_named_at_once(tmp_path):
    assert missing_files(tmp_path / "no") == [f"{tmp_path / 'no'} is no folder"]
    assert missing_files(tmp_path) == ["config.json: missing", "tokenizer.json: missing", "*.safetensors: missing"]
    write_files(tmp_path)
    assert missing_files(tmp_path) == []
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    faults = missing_files(tmp_path)
    assert faults[0].startswith("config.json: no JSON (")
    assert faults[1] == "model-1.safetensors: missing, model.safetensors.index.json names it"


def test_an_incomplete_folder_is_refused_with_path_and_way_out(tmp_path):
    write_files(tmp_path, ["config.json"])
    with pytest.raises(InvalidModelError) as caught:
        check(Request({}, None, tmp_path, None))
    assert str(caught.value) == (
        f"model.path: {tmp_path} is no complete model: tokenizer.json: missing; *.safetensors: missing; put the Hugging Face"
        " files (config.json, tokenizer.json, *.safetensors) there or name another folder"
    )


def test_a_pod_that_needs_no_weights_takes_a_made_folder_without_them(tmp_path):
    write_files(tmp_path, ["config.json", "tokenizer.json"])
    check(Request(BUILTIN["source"], None, tmp_path, None, weights=False))
    with pytest.raises(InvalidModelError, match="safetensors: missing"):
        check(Request(BUILTIN["source"], None, tmp_path, None))


@pytest.mark.parametrize("source", [{"pvc": {"claimName": "models"}, "hub": None}, {"hostPath": {"path": "/m"}}, None])
def test_a_folder_that_is_mounted_is_only_checked(source, tmp_path):
    write_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    environment = {"FP8RL_MODEL_SOURCE": json.dumps({"source": source}), "FP8RL_MODEL_PATH": str(tmp_path)}
    prepare(Request.read(environment), silent)
    assert sorted(tmp_path.iterdir()) == before


def test_the_builtin_model_lands_in_the_cache_once_and_each_path_links_to_it(tmp_path, monkeypatch):
    recipe = Recipe(steps=2, batch=4)
    monkeypatch.setitem(command.RECIPES, "reverse-text-tiny", recipe)
    made = tmp_path / "cache" / "models" / f"reverse-text-tiny-{recipe.digest()}"
    lines = []
    for run in ("one", "two"):
        environment = {
            "FP8RL_MODEL_SOURCE": json.dumps(BUILTIN),
            "FP8RL_MODEL_PATH": str(tmp_path / run / "model"),
            "FP8RL_CACHE_DIR": str(tmp_path / "cache"),
        }
        prepare(Request.read(environment), lines.append)
        assert (tmp_path / run / "model").resolve() == made
    assert [line for line in lines if line.startswith("found")] == [f"found {made}"]


def test_without_a_cache_the_path_itself_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(command.RECIPES, "reverse-text-tiny", Recipe(steps=1, batch=2))
    environment = {"FP8RL_MODEL_SOURCE": json.dumps(BUILTIN), "FP8RL_MODEL_PATH": str(tmp_path / "model")}
    prepare(Request.read(environment), silent)
    assert not (tmp_path / "model").is_symlink()
    assert missing_files(tmp_path / "model") == []


def test_an_unknown_builtin_model_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInputError, match=r"builtin\.name: 'gpt' is unknown; known are reverse-text-tiny"):
        find_recipe("gpt")


def test_missing_variables_and_a_source_that_is_no_json_are_refused():
    with pytest.raises(InvalidInputError, match="FP8RL_MODEL_SOURCE, FP8RL_MODEL_PATH: not set"):
        Request.read({})
    with pytest.raises(InvalidInputError, match="FP8RL_MODEL_SOURCE: no JSON"):
        Request.read({"FP8RL_MODEL_SOURCE": "{", "FP8RL_MODEL_PATH": "/m"})
    with pytest.raises(InvalidInputError, match=r"an object is needed, got \[\]"):
        Request.read({"FP8RL_MODEL_SOURCE": "[]", "FP8RL_MODEL_PATH": "/m"})


def test_the_command_ends_with_code_65_and_one_line_when_a_folder_is_incomplete(tmp_path):
    result = run_prepare({"path": str(tmp_path)}, tmp_path)
    assert result.returncode == 65
    assert result.stderr == (
        f"InvalidModel: model.path: {tmp_path} is no complete model: config.json: missing; tokenizer.json: missing;"
        " *.safetensors: missing; put the Hugging Face files (config.json, tokenizer.json, *.safetensors) there or name"
        " another folder\n"
    )


def test_the_command_ends_with_code_0_when_a_folder_is_complete(tmp_path):
    write_files(tmp_path)
    result = run_prepare({"source": {"pvc": {"claimName": "models"}}}, tmp_path)
    assert (result.returncode, result.stdout) == (0, f"model is complete: {tmp_path}\n")


class Hub(BaseHTTPRequestHandler):
    """The routes of a Hugging Face hub that fetching a repository needs, for one repository `o/m` with a token."""

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body):
        path = self.path.partition("?")[0]
        if self.headers.get("authorization") != "Bearer secret":
            self.reply(401, b"{}", body=body)
        elif path.startswith("/api/models/o/m/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            self.reply(200, json.dumps(tree).encode(), body=body)
        elif path in {"/api/models/o/m", "/api/models/o/m/revision/main", f"/api/models/o/m/revision/{COMMIT}"}:
            siblings = [{"rfilename": name} for name in FILES]
            self.reply(200, json.dumps({"id": "o/m", "sha": COMMIT, "siblings": siblings}).encode(), body=body)
        elif path.startswith(f"/o/m/resolve/{COMMIT}/") and path.rpartition("/")[2] in FILES:
            name = path.rpartition("/")[2]
            self.reply(200, FILES[name], body=body, headers={"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'})
        else:
            self.reply(404, b"{}", body=body, headers={"X-Error-Code": "RepoNotFound"})

    def reply(self, status, data, *, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "secret",
    }
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_fetched_with_its_token_into_a_folder_named_by_its_commit(hub, tmp_path):
    model = {"source": {"hub": {"repository": "o/m"}}, "revision": "main"}
    result = run_prepare(model, tmp_path / "model", FP8RL_CACHE_DIR=str(tmp_path / "cache"), **hub)
    assert result.returncode == 0
    folder = (tmp_path / "model").resolve()
    assert folder == tmp_path / "cache" / "models" / f"o--m-{COMMIT}"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("change", "code", "reason", "fault"),
    [
        ({"HF_TOKEN": "wrong"}, 65, "InvalidModel", "401 Unauthorized"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "HubUnavailable", "Connect"),
    ],
)
def test_a_hub_that_refuses_is_a_wrong_input_and_one_that_is_away_is_asked_again(
    hub, change, code, reason, fault, tmp_path
):
    model = {"source": {"hub": {"repository": "o/m"}}}
    result = run_prepare(model, tmp_path / "model", **{**hub, **change})
    assert result.returncode == code
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"{reason}: model.source.hub: cannot fetch o/m at revision default: ")
    assert fault in result.stderr
    assert "check repository, revision, the secret's token and the network" in result.stderr
    assert not (tmp_path / "model").exists()
