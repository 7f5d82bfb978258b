"""`fp8rl status`: the words about a job, whether a name or a folder is meant, and what is said where no cluster answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import make_body, make_job

from fp8rl_operator.cli import main, make_parser
from fp8rl_operator.cli_cluster import refusal
from fp8rl_operator.cli_status import run_folder
from fp8rl_operator.cli_story import age, state, story
from fp8rl_operator.local.files import write_job

NOW = 1_000_000.0
CREATED = "1970-01-12T12:46:40Z"


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


STATUS = {
    "step": 120,
    "version": 121,
    "attempt": 1,
    "restarts": 1,
    "inference": {"ready": 1, "desired": 2},
    "reward": {"mean": "0.71", "heldOut": "0.69"},
    "mismatch": {"kl": "0.00031"},
    "offPolicy": {"max": 2, "mean": "0.8", "dropped": 12},
    "precision": {"recipe": "bf16", "wire": "blockwise", "quantizedLayers": 14},
    "lastFailure": {"reason": "TrainerLost", "message": "exit 137\nOOM", "time": "1970-01-12T13:00:00Z"},
    "nodes": [{"name": "n3", "reason": "TopologyAffinityError", "message": "no", "refusals": 3, "excluded": True}],
    "conditions": [
        condition("Ready", "False", "WaitingForReplicas", "1 of 2 inference\npods have started"),
        condition("Complete", "False", "WaitingForReplicas"),
    ],
}


def body_of(status: dict[str, Any] | None, **metadata: Any) -> dict[str, Any]:
    body = make_body({"rollout": {"steps": 200, "maxOffPolicySteps": 8}}, creationTimestamp=CREATED, **metadata)
    return body if status is None else body | {"status": status}


def test_the_story_has_state_progress_figures_and_what_is_waited_for() -> None:
    assert story(body_of(STATUS), NOW) == [
        "job: Waiting (WaitingForReplicas)",
        "  step            120 of 200",
        "  version         121",
        "  engines ready   1 of 2",
        "  reward          0.71, held out 0.69",
        "  mismatch KL     0.00031",
        "  sample age      mean 0.8, oldest 2 steps (limit 8), 12 dropped",
        "  precision       recipe bf16, wire blockwise, 14 layers quantized",
        "  age             1h0m",
        "  attempt         1, 1 restart",
        "  waiting for     1 of 2 inference pods have started",
        "  last failure    TrainerLost at 1970-01-12T13:00:00Z: exit 137 OOM",
        "  node excluded   n3: TopologyAffinityError 3 times: no",
        "",
        "Ready                  False    WaitingForReplicas: 1 of 2 inference pods have started",
        "Complete               False    WaitingForReplicas",
    ]


@pytest.mark.parametrize("status", [None, {}])
def test_a_job_that_no_operator_has_seen_says_so(status: dict[str, Any] | None) -> None:
    lines = story(body_of(status), NOW)
    assert lines[0] == "job: no operator has seen it yet"
    assert lines[1] == "  step            0 of 200"


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([condition("Ready", "True", "Running")], "Running"),
        ([condition("Ready", "True", "StepsDone"), condition("Complete", "True", "StepsDone")], "Complete (StepsDone)"),
        ([condition("Ready", "False", "NaN"), condition("Failed", "True", "NaN")], "Failed (NaN)"),
        ([condition("Suspended", "True", "SuspendedByUser")], "Suspended (SuspendedByUser)"),
        (
            [condition("Ready", "False", "QuotaExceeded"), condition("Stalled", "True", "QuotaExceeded")],
            "Stalled (QuotaExceeded)",
        ),
        ([condition("Ready", "False", "InvalidSpec")], "Waiting (InvalidSpec)"),
    ],
)
def test_the_state_follows_from_the_conditions(conditions: list[dict[str, Any]], words: str) -> None:
    assert state({"conditions": conditions}) == words


def test_a_failed_job_says_why() -> None:
    failed = [condition("Ready", "False", "NaN", "step 3: loss is NaN"), condition("Failed", "True", "NaN")]
    assert "  why             step 3: loss is NaN" in story(body_of({"conditions": failed}), NOW)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0m5s"), (61, "1m1s"), (3600, "1h0m"), (90_000, "1d1h"), (-5, "0m0s")]
)
def test_an_age_has_its_two_largest_units(seconds: int, text: str) -> None:
    assert age("1970-01-12T13:46:40Z", NOW + seconds) == text


def test_a_path_is_a_run_folder_and_a_word_a_job_unless_a_flag_or_a_folder_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def meant(*words: str) -> Path | None:
        return run_folder(make_parser().parse_args(["status", *words]))

    assert meant("runs/mine") == Path("runs/mine")
    assert meant(".") == Path()
    assert meant("here") == Path("here")
    assert meant("there") is None
    assert meant("here", "-n", "team") is None
    assert meant("here", "--context", "c") is None


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_the_object_itself_is_printed_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    import yaml

    write_job(tmp_path / "status.yaml", make_job(status={"step": 2}))
    assert main(["status", str(tmp_path), "-o", output]) == 0
    told = capsys.readouterr().out
    found = json.loads(told) if output == "json" else yaml.safe_load(told)
    assert (found["kind"], found["status"]["step"]) == ("FP8RLJob", 2)


def test_without_a_cluster_there_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none"
    assert main(["status", "job", "--kubeconfig", str(missing)]) == 1
    assert capsys.readouterr().err.startswith("fp8rl: no cluster: ")
    dead = tmp_path / "dead"
    dead.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.31.9.9:9'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
    )
    assert main(["status", "job", "--kubeconfig", str(dead)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("fp8rl: the API server http://127.31.9.9:9 does not answer: ")
    assert "Connection refused" in told
    assert main(["status", "job", "--kubeconfig", str(dead), "--context", "other"]) == 1
    assert "other" in capsys.readouterr().err


def test_without_the_library_the_package_is_named() -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from fp8rl_operator.cli import main; sys.exit(main(['status', 'job', '-n', 'team']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'fp8rl[operator]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_refusals_are_told_apart() -> None:
    unknown = refusal("x", "team", 404, "Not Found", "404 page not found\n")
    assert unknown.startswith("the cluster does not know fp8rljobs.fp8rl.dev (Not Found); install it")
    missing = json.dumps({"message": 'fp8rljobs.fp8rl.dev "x" not found', "details": {"name": "x"}})
    assert refusal("x", "team", 404, "Not Found", missing).startswith("no FP8RLJob x in namespace team; ")
    forbidden = json.dumps({"message": "User u cannot get"})
    words = (
        "User u cannot get; ask for the verb get on fp8rljobs.fp8rl.dev in namespace team, or name another --context"
    )
    assert refusal("x", "team", 403, "Forbidden", forbidden) == words
    assert refusal("x", "team", 500, "Internal", None) == "the API server refused, 500: Internal"
