"""The command line: exit codes, messages, what it costs to start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from builders import make_body, make_job

from fp8rl_operator.cli import main
from fp8rl_operator.cli_progress import Figures, clock
from fp8rl_operator.local.folder import RunFolderError, locked, move_aside, open_run, refuse_used, resumed
from fp8rl_operator.spec import parse


def manifest(folder: Path, **spec: object) -> Path:
    """A valid manifest with changes."""
    path = folder / "job.yaml"
    body = make_body(spec)
    del body["metadata"]["uid"], body["metadata"]["generation"]
    path.write_text(yaml.safe_dump(body))
    return path


def test_help_answers_in_under_three_tenths_of_a_second() -> None:
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "fp8rl_operator.cli", "--help"], capture_output=True, check=True)
    seconds = time.monotonic() - begin
    assert b"run a job on this machine" in done.stdout
    assert seconds < 0.3


def test_a_run_stays_under_150_mb_without_heavy_libraries() -> None:
    code = (
        "import pathlib, sys\n"
        "import fp8rl_operator.local.run, fp8rl_operator.cli_progress, fp8rl_operator.cli_commands\n"
        "import rich.progress\n"
        "assert not {'torch', 'vllm', 'matplotlib', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "print(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 * 1024


def test_usage_errors_are_exit_code_two() -> None:
    for words in ([], ["nothing"], ["run", "--no-such-option"], ["run", "x", "--fresh", "--resume"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2


def test_validate_tells_all_faults_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = manifest(tmp_path)
    assert main(["validate", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid\n"
    path.write_text(path.read_text().replace("steps: 4", "steps: 0").replace("batchSize", "batchsize"))
    assert main(["validate", str(path)]) == 1
    told = capsys.readouterr().err
    assert "spec.rollout.steps" in told
    assert "spec.rollout.batchsize" in told
    assert told.splitlines()[-1].startswith(f"fp8rl: {path}: ")


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "is no YAML"), ("- 1", "apiVersion"), ("", "is empty"), (None, "cannot be read")]
)
def test_a_file_that_is_no_job_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["validate", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_an_environment_is_asked_whether_it_exists_and_takes_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"id": "reverse-text", "args": {"min_length": 0, "shape": 3}}
    path = manifest(tmp_path, rollout={"environment": environment}, evaluation={"environment": {"id": "chess"}})
    lines = path.read_text().splitlines()
    number = {
        word: next(n for n, line in enumerate(lines, 1) if word in line) for word in ("min_length", "shape", "chess")
    }
    for words in (["validate", str(path)], ["run", str(path), "--out", str(tmp_path / "run")]):
        assert main(words) == 1
        told = [line for line in capsys.readouterr().err.splitlines() if ": warning: " not in line]
        assert told == [
            (
                f"{path}:{number['chess']}: spec.evaluation.environment.id: value chess: is no environment;"
                " known are arithmetic, calculator, reverse-text, verifiers:NAME"
            ),
            (
                f"{path}:{number['min_length']}: spec.rollout.environment.args.min_length: value 0: environment reverse-text:"
                " Input should be greater than or equal to 1; correct it or leave it out"
            ),
            (
                f"{path}:{number['shape']}: spec.rollout.environment.args.shape: value 3: environment reverse-text:"
                " Extra inputs are not permitted; correct it or leave it out"
            ),
            f"fp8rl: {path}: 3 faults",
        ]
    assert not (tmp_path / "run").exists()


def test_render_prints_objects_that_yaml_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(manifest(tmp_path))]) == 0
    kinds = [item["kind"] for item in yaml.safe_load_all(capsys.readouterr().out)]
    assert (kinds.count("StatefulSet"), kinds.count("Deployment"), kinds.count("Secret")) == (2, 1, 1)


def test_run_refuses_what_cannot_work_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = manifest(tmp_path)
    out = str(tmp_path / "run")
    cases = [
        (["run", str(path), "--out", out, "--set", "spec.model={path: nowhere}"], "spec.model.path: value nowhere"),
        (["run", str(path), "--out", out, "--set", "spec.seed"], "write PATH=VALUE"),
        (["run", str(path), "--out", out, "--set", "spec.rollout.steps.x=1"], "steps is no mapping"),
        (["run", str(path), "--out", out, "--resume"], "no run folder, status.yaml is missing"),
        (["run", "--resume"], "name a manifest, or a run folder"),
        (["status", out], "no run folder"),
        (["report", out], "not there"),
    ]
    for words, message in cases:
        assert main(words) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_new_run_gets_a_uid_and_keeps_it_when_it_goes_on(tmp_path: Path) -> None:
    body = make_body()
    del body["metadata"]["uid"]
    job = open_run(parse(body), tmp_path / "new", resume=False, now=0.0)
    assert len(job.uid) == 36
    (tmp_path / "x").touch()
    with pytest.raises(RunFolderError, match="exists and is not empty; --resume goes on with it, --fresh"):
        open_run(job, tmp_path, resume=False, now=0.0)


def test_a_run_is_moved_aside_to_the_first_free_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert move_aside(folder) is None
    for number in (1, 2):
        folder.mkdir()
        assert move_aside(folder) is None
        (folder / "status.yaml").write_text(str(number))
        assert move_aside(folder) == tmp_path / f"run.{number}"
        assert not folder.exists()
    assert [(tmp_path / f"run.{number}" / "status.yaml").read_text() for number in (1, 2)] == ["1", "2"]


def test_a_folder_that_holds_no_run_is_never_moved(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"holds no run, status.yaml is missing; name another --out"):
        move_aside(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_failed_run_goes_on_as_a_new_attempt_and_a_complete_one_stays() -> None:
    failed = {
        "attempt": 2,
        "restarts": 3,
        "version": 9,
        "step": 5,
        "completionTime": "x",
        "conditions": [{"type": "Failed", "status": "True", "reason": "NaN", "message": ""}],
    }
    assert resumed(failed, 0.0) == {
        "attempt": 3,
        "fleetAttempt": 3,
        "restarts": 0,
        "version": 9,
        "step": 5,
        "startTime": "1970-01-01T00:00:00Z",
        "attemptTime": "1970-01-01T00:00:00Z",
    }
    complete = {"conditions": [{"type": "Complete", "status": "True", "reason": "StepsDone", "message": ""}]}
    assert resumed(complete, 0.0) == complete


def test_figures_follow_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    figures = Figures(path)
    figures.update()
    assert (figures.text(), figures.seconds_left(10)) == ("", None)
    lines = [
        json.dumps(
            {"kind": "step", "step": step, "time": 2.0 * step, "metrics": {"reward": step / 10, "mismatch_kl": 0.002}}
        )
        for step in (1, 2, 3)
    ]
    path.write_text("\n".join(lines)[:-5])
    figures.update()
    assert figures.seconds_left(10) == 16.0
    path.write_text("\n".join(lines) + "\n")
    figures.update()
    assert (figures.text(), figures.seconds_left(10)) == ("reward 0.300  KL 2.0e-03", 14.0)
    assert (clock(14.0), clock(None), clock(3725.0)) == ("0:14", "-:--", "62:05")


def test_the_status_of_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conditions = [{"type": "Ready", "status": "True", "reason": "Running", "message": "step 2 of 4"}]
    job = make_job(status={"step": 2, "version": 3, "attempt": 1, "restarts": 1, "conditions": conditions})
    from fp8rl_operator.local.files import write_job

    write_job(tmp_path / "status.yaml", job)
    assert main(["status", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("job: Running\n  step            2 of 4\n  version         3\n")
    assert "  attempt         1, 1 restart\n" in told
    assert f"not running; `fp8rl run --resume --out {tmp_path}` goes on\n" in told
    assert "Ready                  True     Running: step 2 of 4" in told
    assert told.endswith("no pods\n")


def test_a_manifest_on_a_pipe_is_read_once_and_its_faults_told(tmp_path: Path) -> None:
    for required, code in ((False, 0), (True, 1)):
        text = yaml.safe_dump(make_body({"gate": {"required": required}}))
        words = [sys.executable, "-m", "fp8rl_operator.cli", "validate", "/dev/stdin"]
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert ("/dev/stdin: spec.gate.required: value true" in done.stderr) is required


def test_a_run_that_begins_and_ends_while_another_is_judged_is_not_written_over(tmp_path: Path) -> None:
    refuse_used(tmp_path)
    (tmp_path / "status.yaml").touch()
    with pytest.raises(RunFolderError, match="another `fp8rl run` has just used it; name another --out"):
        refuse_used(tmp_path)


def test_a_run_folder_that_is_held_is_not_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "status.yaml").touch()
    with locked(folder), pytest.raises(RunFolderError, match="is being run by process"):
        move_aside(folder)
    assert move_aside(folder) == tmp_path / "run.1"
