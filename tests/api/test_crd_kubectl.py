"""The CRD in kubectl's hands: defaults filled as the models fill them, every field explained, columns that tell the story."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from builders import make_body
from control_plane_kit import ROOT, ControlPlane
from raw_api import RawApi

from fp8rl_operator import crd
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.base import DECIMAL_PATTERN

SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))
STATUS: dict[str, Any] = {
    "step": 7,
    "version": 8,
    "attempt": 1,
    "restarts": 1,
    "engines": "1/2",
    "reward": {"mean": "0.41", "heldOut": "0.5"},
    "mismatch": {"kl": "0.0021"},
    "precision": {"recipe": "blockwise", "wire": "blockwise"},
    "offPolicy": {"max": 2},
    "weightSyncGroup": {"epoch": 3},
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "WaitingForReplicas",
            "message": "1 of 2 inference pods have started",
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        }
    ],
}


def plain(value: Any) -> Any:
    """Decimals as numbers, so that "1.0" is "1"; nulls and empty records left out."""
    if isinstance(value, dict):
        kept = {key: plain(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item not in ({}, [])}
    if isinstance(value, str) and re.fullmatch(DECIMAL_PATTERN, value):
        return float(value)
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", [None, *SAMPLES], ids=lambda path: path.stem if path else "smallest")
def test_the_api_server_fills_what_the_models_fill(plane: ControlPlane, path: Any) -> None:
    body = make_body() if path is None else yaml.safe_load(path.read_text())
    code, stored = RawApi(plane.kubeconfig).create(body | {"metadata": {"name": body["metadata"]["name"]}}, "default")
    assert code == 201, stored
    models = FP8RLJob.model_validate_json(json.dumps(body)).model_dump(mode="json", by_alias=True)["spec"]
    read = FP8RLJob.model_validate_json(json.dumps(stored)).model_dump(mode="json", by_alias=True)["spec"]
    assert read == models
    assert plain(stored["spec"]) == plain(models)


def records(node: dict[str, Any], path: str) -> list[str]:
    """Paths of all records with fields of their own."""
    found = [path] if "properties" in node else []
    for name, field in node.get("properties", {}).items():
        found += records(field.get("items", field), f"{path}.{name}")
    return found


def test_kubectl_explains_every_field_at_any_depth(plane: ControlPlane) -> None:
    schema = crd.build_schema()["properties"]
    text = {part: plane.kubectl("explain", f"fp8rljob.{part}", "--recursive") for part in ("spec", "status")}
    for part in ("spec", "status"):
        for path in records(schema[part], part):
            for name in path.split(".")[1:]:
                assert f"{name}\t" in text[part], path
    words = plane.kubectl("explain", "fp8rljob.spec.trainer.checkpoint.volumeClaimTemplate.storage")
    assert "Size of the volume. Unit: bytes, as a quantity such as 100Gi." in words
    assert "once all steps are done" in " ".join(plane.kubectl("explain", "fp8rljob.status.conditions.type").split())


def table(plane: ControlPlane, namespace: str, *flags: str) -> dict[str, str]:
    """Column to cell of the one job; cells hold no double blank but the last."""
    head, row = plane.kubectl("get", "f8j", "-n", namespace, *flags).rstrip("\n").split("\n")
    starts = [head.index(name) for name in head.split()]
    ends = [*starts[1:], None]
    return {name: row[start:end].strip() for name, start, end in zip(head.split(), starts, ends, strict=True)}


def test_columns_tell_the_story(plane: ControlPlane, namespace: str) -> None:
    api = RawApi(plane.kubeconfig)
    code, stored = api.create(make_body(namespace=namespace), namespace, "fieldValidation=Strict")
    assert code == 201, stored
    fresh = table(plane, namespace)
    assert {name: cell for name, cell in fresh.items() if cell} == {"NAME": "job", "STEPS": "4", "AGE": fresh["AGE"]}
    path = f"/apis/fp8rl.dev/v1alpha1/namespaces/{namespace}/fp8rljobs/job/status?fieldValidation=Strict"
    code, answer = api.request("PUT", path, stored | {"status": STATUS})
    assert code == 200, answer
    cells = table(plane, namespace)
    assert {name: cell for name, cell in cells.items() if name != "AGE"} == {
        "NAME": "job",
        "STATE": "WaitingForReplicas",
        "STEP": "7",
        "STEPS": "4",
        "VERSION": "8",
        "ENGINES": "1/2",
        "REWARD": "0.41",
        "KL": "0.0021",
    }
    wide = table(plane, namespace, "-o", "wide")
    assert {
        name: wide[name] for name in ("HELD-OUT", "WIRE", "ATTEMPT", "RESTARTS", "EPOCH", "OFF-POLICY", "MESSAGE")
    } == {
        "HELD-OUT": "0.5",
        "WIRE": "blockwise",
        "ATTEMPT": "1",
        "RESTARTS": "1",
        "EPOCH": "3",
        "OFF-POLICY": "2",
        "MESSAGE": "1 of 2 inference pods have started",
    }
