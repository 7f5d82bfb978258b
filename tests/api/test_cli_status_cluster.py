"""`fp8rl status JOB` against a real apiserver: the job, no job, no permission, no CRD."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from builders import make_body
from control_plane_kit import ControlPlane

from fp8rl_operator.cli import main


def make(plane: ControlPlane, namespace: str) -> None:
    body = make_body()
    body["metadata"] = {"name": "job"}
    plane.apply(body, namespace=namespace)


def test_a_job_is_shown_with_its_status(
    plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(plane, namespace)
    place = ["-n", namespace, "--kubeconfig", str(plane.kubeconfig)]
    assert main(["status", "job", *place]) == 0
    assert capsys.readouterr().out.startswith("job: no operator has seen it yet\n  step            0 of 4\n")
    status = {
        "step": 2,
        "version": 3,
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "observedGeneration": 1,
            }
        ],
    }
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "fp8rljob", "job", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    assert main(["status", "job", *place]) == 0
    told = capsys.readouterr().out
    assert told.startswith("job: Waiting (Unschedulable)\n  step            2 of 4\n  version         3\n")
    assert "  waiting for     0/3 nodes are available: 3 Insufficient nvidia.com/gpu.\n" in told
    assert "  age             0m" in told
    assert main(["status", "job", *place, "-o", "yaml"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["status"]["version"], "managedFields" in found["metadata"]) == (3, False)


def test_the_namespace_is_the_contexts_and_kubeconfig_comes_from_the_environment(
    plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(plane, namespace)
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert main(["status", "job"]) == 0


def test_what_cannot_be_shown_is_one_sentence_with_the_way_out(
    plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "nothing", "-n", namespace, "--kubeconfig", str(plane.kubeconfig)]) == 1
    assert capsys.readouterr().err == (
        f"fp8rl: no FP8RLJob nothing in namespace {namespace}; `kubectl get f8j -A` lists what there is\n"
    )
    stranger = plane.kubeconfig_of("stranger")
    assert main(["status", "job", "-n", namespace, "--kubeconfig", str(stranger)]) == 1
    told = capsys.readouterr().err
    assert 'User "stranger" cannot get resource "fp8rljobs"' in told
    assert f"ask for the verb get on fp8rljobs.fp8rl.dev in namespace {namespace}" in told


def test_a_cluster_without_the_crd_says_how_to_install_it(
    own_plane: Callable[..., ControlPlane], capsys: pytest.CaptureFixture[str]
) -> None:
    plane = own_plane()
    plane.kubectl("delete", "crd", "fp8rljobs.fp8rl.dev")
    assert main(["status", "job", "-n", "default", "--kubeconfig", str(plane.kubeconfig)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("fp8rl: the cluster does not know fp8rljobs.fp8rl.dev (")
    assert "kubectl apply -f crds/fp8rl.dev_fp8rljobs.yaml" in told
