"""The CRD: fresh, structural, and by the rules that Kubernetes' own API linters hold (no floats, no phase, all described)."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from builders import make_body

from fp8rl_operator import crd, names
from fp8rl_operator.spec import JobSpec
from fp8rl_operator.spec.base import Model
from fp8rl_operator.spec.checks import CHECKS
from fp8rl_operator.spec.fields import fields_of, model_of
from fp8rl_operator.spec.status import JobStatus

CRD: dict[str, Any] = yaml.safe_load(crd.PATH.read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
STRUCTURAL = {
    "description", "type", "format", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern",
    "minItems", "maxItems", "maxProperties", "items", "properties", "additionalProperties", "required",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip


def nodes(schema: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        if path or name in ("spec", "status"):
            yield from nodes(field, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from nodes(schema[below], f"{path}[]")


def rules() -> list[tuple[str, dict[str, Any]]]:
    return [(path, rule) for path, node in nodes() for rule in node.get("x-kubernetes-validations", [])]


def at(path: str) -> dict[str, Any]:
    return dict(nodes())[path]


def accepts(body: dict[str, Any]) -> bool:
    return jsonschema.Draft7Validator(SCHEMA).is_valid(body)


def test_the_crd_on_disk_is_the_one_that_the_models_give():
    assert crd.PATH.read_text() == crd.render()


def test_check_tells_a_stale_file_and_write_makes_it_fresh(tmp_path, capsys):
    path = tmp_path / "crds" / "x.yaml"
    assert crd.console(["--check"], path, crd.render, "fp8rl_operator.crd") == 1
    assert "is stale: run `python -m fp8rl_operator.crd --write`" in capsys.readouterr().err
    assert crd.console(["--write"], path, crd.render, "fp8rl_operator.crd") == 0
    assert crd.console(["--check"], path, crd.render, "fp8rl_operator.crd") == 0
    assert crd.console(["--what"], path, crd.render, "fp8rl_operator.crd") == 2


def test_names_of_the_api_are_those_of_the_design():
    assert CRD["metadata"]["name"] == "fp8rljobs.fp8rl.dev"
    assert CRD["spec"]["group"] == "fp8rl.dev"
    assert CRD["spec"]["scope"] == "Namespaced"
    assert CRD["spec"]["names"]["kind"] == "FP8RLJob"
    assert CRD["spec"]["names"]["shortNames"] == ["f8j"]
    assert (VERSION["name"], VERSION["served"], VERSION["storage"]) == ("v1alpha1", True, True)


def test_status_is_a_subresource():
    assert VERSION["subresources"] == {"status": {}}


def test_printer_columns_name_their_paths():
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    shown = [name for name, column in columns.items() if "priority" not in column]
    assert shown == ["State", "Step", "Steps", "Version", "Engines", "Reward", "KL", "Age"]
    assert columns["State"]["jsonPath"] == '.status.conditions[?(@.type=="Ready")].reason'
    assert columns["Message"]["jsonPath"] == '.status.conditions[?(@.type=="Ready")].message'
    assert not [column for column in columns.values() if "[-1" in column["jsonPath"]]


def test_every_column_but_those_of_conditions_names_a_field_of_the_schema():
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"]
        assert "?(" in path or path.startswith(".metadata.") or path in dict(nodes()), path


def test_the_schema_is_structural():
    for path, node in nodes():
        assert set(node) <= STRUCTURAL, path
        assert "type" in node, path
        assert node["type"] in ("object", "array", "string", "integer", "boolean"), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_no_field_is_a_float():
    assert not [path for path, node in nodes() if node["type"] == "number"]


def test_no_field_is_a_phase_or_a_duration_string():
    for path, node in nodes():
        name = path.rpartition(".")[2].lower()
        assert name != "phase", path
        assert not (
            re.search(r"(timeout|deadline|backoff|interval|duration|ttl)", name) and node["type"] == "string"
        ), path


def test_durations_say_their_unit_in_their_name():
    for path, _ in nodes():
        if re.search(r"(timeout|deadline|backoff|ttl)", path.rpartition(".")[2], re.IGNORECASE):
            assert "Seconds" in path, path


def test_every_field_is_described_by_a_sentence():
    for path, node in nodes():
        if not path.endswith("[]"):
            assert node.get("description", "").endswith("."), path


def test_field_names_are_camel_case():
    for _, node in nodes():
        for name in node.get("properties", {}):
            assert re.fullmatch(r"[a-z][A-Za-z0-9]*", name), name


def test_everything_is_bounded_so_that_the_api_server_can_bound_its_rules():
    for path, node in nodes():
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node or path in (".kind", ".apiVersion"), path
        if node["type"] == "array":
            assert node["maxItems"] <= 4096, path
        if "additionalProperties" in node:
            assert node["maxProperties"] <= 256, path
        if node["type"] == "integer" and path.startswith(".spec"):
            assert {"minimum", "maximum"} <= set(node), path


def test_lists_say_how_they_merge():
    for path, node in nodes():
        if node["type"] == "array":
            assert node["x-kubernetes-list-type"] in ("atomic", "map"), path
    assert at(".status.conditions")["x-kubernetes-list-map-keys"] == ["type"]
    assert at(".status.weightSyncGroup.members")["x-kubernetes-list-map-keys"] == ["pod"]
    assert at(".spec.samplers")["x-kubernetes-list-map-keys"] == ["name"]


def test_conditions_are_those_of_the_api_conventions():
    item = at(".status.conditions[]")
    assert set(item["properties"]) == {
        "type",
        "status",
        "observedGeneration",
        "lastTransitionTime",
        "reason",
        "message",
    }
    assert {"type", "status", "lastTransitionTime", "reason"} <= set(item["required"])
    assert item["properties"]["status"]["enum"] == ["True", "False", "Unknown"]
    assert item["properties"]["lastTransitionTime"]["format"] == "date-time"
    for condition in names.CONDITIONS:
        assert f"{condition}: " in item["properties"]["type"]["description"]


def test_status_has_no_defaults():
    assert not [path for path, node in nodes() if path.startswith(".status") and "default" in node]


def test_every_field_of_the_models_is_in_the_schema():
    def compare(model: type[Model], schema: dict[str, Any], path: str) -> None:
        assert list(fields_of(model)) == list(schema["properties"]), path
        for name, info in fields_of(model).items():
            below = model_of(info.annotation)
            if below is not None:
                field = schema["properties"][name]
                compare(below, field.get("items", field), f"{path}.{name}")

    compare(JobSpec, SCHEMA["properties"]["spec"], "spec")
    compare(JobStatus, SCHEMA["properties"]["status"], "status")


def test_decimals_are_strings_with_a_pattern_and_a_range():
    field = at(".spec.rollout.temperature")
    assert (field["type"], field["default"], field["maxLength"]) == ("string", "1.0", 32)
    for good in ("1", "0.5", "5e-4", "1E+3", "-2.5e10"):
        assert re.search(field["pattern"], good), good
    for bad in ("", ".5", "1.", "01", "nan", "1e", "0x1"):
        assert not re.search(field["pattern"], bad), bad
    assert field["x-kubernetes-validations"] == [
        {"rule": "double(self) > 0.0 && double(self) <= 10.0", "message": "must be a number > 0 and <= 10"}
    ]


def test_strings_that_look_like_numbers_are_quoted_for_go():
    text = yaml.dump({"a": "1e-06", "b": "5"}, Dumper=crd._Dumper)
    assert text == "a: '1e-06'\nb: '5'\n"


def test_a_record_with_defaults_below_it_is_filled_when_it_is_left_out():
    assert at(".spec.precision")["default"] == {}
    assert at(".spec.inference")["default"] == {}
    assert "default" not in at(".spec.rollout")
    assert "default" not in at(".spec.model.source")
    assert "default" not in at(".spec.trainer.template")


def test_free_json_keeps_unknown_fields():
    for path in (".spec.inference.engineArgs", ".spec.trainer.megatronArgs", ".spec.rollout.environment.args"):
        assert at(path)["x-kubernetes-preserve-unknown-fields"] is True


def test_rules_of_the_api_server_stand_above_defaults_that_it_would_judge_unfilled():
    for path, node in nodes():
        if node.get("default") == {}:
            assert "x-kubernetes-validations" not in node, path


def test_every_rule_that_cel_can_say_is_in_the_schema():
    messages = [rule["message"] for _, rule in rules()]
    for check in CHECKS:
        for cel in check.cel:
            assert cel.message in messages, check.name


def test_messages_are_one_line_and_carry_values_by_format_only():
    for path, rule in rules():
        assert "\n" not in rule["message"], path
        assert "string(" not in rule.get("messageExpression", ""), path


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("", "metadata.name has %d characters"),
        (".spec.trainer", "tensor x pipeline x context = %d does not divide replicas x gpusPerReplica = %d GPUs"),
        (".spec.rollout", "batchSize %d is no multiple of groupSize %d"),
        (".spec", "minReplicas %d is over replicas %d"),
        (".spec", "leaves no room for a prompt"),
    ],
)
def test_the_api_servers_messages_carry_the_arithmetic(path: str, part: str):
    assert [rule for where, rule in rules() if where == path and part in rule.get("messageExpression", "")]


def test_managed_by_cannot_change():
    assert at(".spec.managedBy")["x-kubernetes-validations"][0]["rule"] == "self == oldSelf"


def test_the_schema_takes_a_job_and_refuses_wrong_types():
    assert accepts(make_body())
    assert not accepts(make_body({"rollout": {"temperature": 1.0}}))
    assert not accepts(make_body({"trainer": {"backend": "jax"}}))
    assert not accepts(make_body({"rollout": {"maxOffPolicySteps": -1}}))
    assert not accepts(make_body({"rollout": {"steps": None}}))


def test_client_side_apply_can_hold_the_crd_in_its_annotation():
    assert len(crd.PATH.read_bytes()) < 262_144
