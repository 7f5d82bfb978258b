"""The CRD and the samples, as a real apiserver takes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane_kit import ROOT, ControlPlane, RefusedError

SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))


def lost(wanted: Any, live: Any, path: str = "spec") -> list[str]:
    """Paths of `wanted` that `live` lacks or has otherwise; defaults that the server filled in are nothing lost."""
    if not isinstance(wanted, dict):
        return [] if wanted == live else [path]
    return [p for key, value in wanted.items() for p in lost(value, (live or {}).get(key), f"{path}.{key}")]


def test_the_crd_is_accepted_and_established(plane: ControlPlane) -> None:
    conditions = {c["type"]: c["status"] for c in plane.get("crd", "fp8rljobs.fp8rl.dev")["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_kubectl_explains_the_spec(plane: ControlPlane) -> None:
    words = plane.kubectl("explain", "fp8rljob.spec")
    for field in ("model", "precision", "trainer", "inference", "rollout"):
        assert f"\n  {field}\t" in words


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_applies_with_strict_validation(plane: ControlPlane, namespace: str, path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    plane.apply(job, namespace=namespace)
    live = plane.get("fp8rljob", job["metadata"]["name"], namespace)
    assert lost(job["spec"], live["spec"]) == []


def test_an_unknown_field_is_refused_by_its_name(plane: ControlPlane, namespace: str) -> None:
    job = yaml.safe_load((ROOT / "deploy" / "samples" / "reverse-text.yaml").read_text())
    job["spec"]["trainer"]["stepz"] = 3
    with pytest.raises(RefusedError, match=r'FP8RLJob\.spec\.trainer\): unknown field "stepz"'):
        plane.apply(job, namespace=namespace)


def test_an_audited_control_plane_writes_who_asked_for_what(own_plane) -> None:
    plane = own_plane(audit=True)
    config = plane.kubeconfig_of("somebody")
    with pytest.raises(RefusedError, match='User "somebody" cannot list resource "pods"'):
        plane.kubectl("get", "pods", kubeconfig=config)
    asked = [e for e in plane.audited() if e["user"]["username"] == "somebody" and e["verb"] == "list"]
    assert [(e["objectRef"]["resource"], e["responseStatus"]["code"]) for e in asked] == [("pods", 403)]


def test_a_control_plane_that_forgot_its_history_answers_an_old_watch_with_gone(own_plane) -> None:
    plane = own_plane()
    plane.kubectl("create", "configmap", "one")
    plane.kubectl("label", "configmap", "one", "n=1")
    plane.forget_history()
    told = plane.kubectl(
        "get", "--raw", "/api/v1/namespaces/default/configmaps?watch=1&resourceVersion=1&timeoutSeconds=2"
    )
    event = json.loads(told.splitlines()[0])
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
