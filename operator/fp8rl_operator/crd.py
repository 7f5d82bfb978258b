"""The CustomResourceDefinition, generated from the models of `spec`: `python -m fp8rl_operator.crd [--write | --check]`.

From pydantic's JSON schema to a structural schema: references inlined, `| None` dropped, decimals (`number`) turned into
strings with a pattern and a CEL range, free JSON kept by x-kubernetes-preserve-unknown-fields, lists atomic or keyed.
Defaults of objects are `{}` wherever something below has a default, since the API server only fills what is there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator import names
from fp8rl_operator.spec.base import DECIMAL_MAX_LENGTH, DECIMAL_PATTERN, Model, format_decimal
from fp8rl_operator.spec.checks import CHECKS, TRANSITIONS, Cel
from fp8rl_operator.spec.job import JobSpec
from fp8rl_operator.spec.status import JobStatus

Schema = dict[str, Any]
PATH = Path(__file__).resolve().parents[2] / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml"
HEADER = (
    "# Generated from operator/fp8rl_operator/spec by `python -m fp8rl_operator.crd --write`. Not edited by hand.\n"
)
KEPT = ("enum", "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "maxProperties")
BOUNDS = (
    (("minimum", "ge"), ">="),
    (("exclusiveMinimum", "gt"), ">"),
    (("maximum", "le"), "<="),
    (("exclusiveMaximum", "lt"), "<"),
)
"""Bounds by the names of JSON schema, and those that pydantic writes for an optional decimal, to CEL's sign."""
READY = f'.status.conditions[?(@.type=="{names.READY}")]'


def column(name: str, path: str, description: str, *, kind: str = "string", wide: bool = False) -> Schema:
    """A printer column; a wide one is for `kubectl get -o wide`."""
    shown: Schema = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return shown | {"priority": 1} if wide else shown


COLUMNS: list[Schema] = [
    column("State", f"{READY}.reason", "Reason of condition Ready: Running, WaitingForPods, StepsDone and so on."),
    column("Step", ".status.step", "Last finished optimizer step.", kind="integer"),
    column("Steps", ".spec.rollout.steps", "Steps of the whole job.", kind="integer"),
    column("Version", ".status.version", "Newest committed weights.", kind="integer"),
    column("Engines", ".status.engines", "Engines that serve a committed version, of those that shall."),
    column("Reward", ".status.reward.mean", "Mean reward of the newest step."),
    column("KL", ".status.mismatch.kl", "Mismatch KL of the newest step."),
    column("Age", ".metadata.creationTimestamp", "Time since its creation.", kind="date"),
    column("Held-out", ".status.reward.heldOut", "Mean reward of the newest evaluation.", wide=True),
    column("Wire", ".status.precision.wire", "Format served.", wide=True),
    column("Attempt", ".status.attempt", "Number of the trainer's current start.", kind="integer", wide=True),
    column("Restarts", ".status.restarts", "Attempts that failures have cost.", kind="integer", wide=True),
    column("Epoch", ".status.weightSyncGroup.epoch", "Membership of the weight-sync group.", kind="integer", wide=True),
    column("Off-policy", ".status.offPolicy.max", "Age of the oldest sample, in steps.", kind="integer", wide=True),
    column("Message", f"{READY}.message", "What is going on, or what the job waits for.", wide=True),
]


def build_crd() -> Schema:
    """The CustomResourceDefinition as an object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": names.CRD_NAME, "labels": {names.LABEL_NAME: "fp8rl", names.LABEL_PART_OF: "fp8rl"}},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["all", "fp8rl"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": COLUMNS,
                    "schema": {"openAPIV3Schema": build_schema()},
                }
            ],
        },
    }


def build_schema() -> Schema:
    """The structural schema of the whole object, with its CEL rules."""
    root: Schema = {
        "description": "FP8RLJob trains a language model by reinforcement learning: trainers on some GPUs, rollout engines"
        " on others, FP8 on both sides.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this representation of the object."},
            "kind": {"type": "string", "description": "Kind of the object: FP8RLJob."},
            "metadata": {"type": "object"},
            "spec": structural(JobSpec, "What the user asks for. The operator never writes it."),
            "status": _undefaulted(structural(JobStatus, "What the operator reports. Written by the operator only.")),
        },
    }
    for cel in (*(cel for check in CHECKS for cel in check.cel), *TRANSITIONS):
        _attach(root, cel)
    return root


def structural(model: type[Model], description: str) -> Schema:
    """Structural schema of one record."""
    source = model.model_json_schema(by_alias=True)
    return {"description": description} | _node({**source, "description": description}, source.get("$defs", {}))


def _undefaulted(node: Schema) -> Schema:
    """A status says what was seen: nothing in it is filled in."""
    node = {key: value for key, value in node.items() if key != "default"}
    if "properties" in node:
        node["properties"] = {name: _undefaulted(item) for name, item in node["properties"].items()}
    return node | {"items": _undefaulted(node["items"])} if "items" in node else node


def _node(source: Schema, definitions: dict[str, Schema]) -> Schema:
    source = _resolved(source, definitions)
    kind = "string" if "enum" in source or "const" in source else source.get("type")
    base: Schema = {"description": source["description"]} if "description" in source else {}
    if kind == "number":
        return base | _decimal(source)
    if kind == "object":
        return base | _object(source, definitions)
    node: Schema = base | {"type": kind}
    if kind == "integer":
        node |= {"format": "int64"} | {key: source[key] for key in ("minimum", "maximum") if key in source}
    if kind == "array":
        node["items"] = _item(source, definitions)
        node |= {"x-kubernetes-list-type": "atomic"} | {
            k: v for k, v in source.items() if k.startswith("x-kubernetes-list")
        }
    if "const" in source:
        node["enum"] = [source["const"]]
    node |= {key: source[key] for key in KEPT if key in source}
    default = source.get("default")
    return node if default in (None, []) else node | {"default": _plain(default, source.get("items"))}


def _resolved(source: Schema, definitions: dict[str, Schema]) -> Schema:
    """A schema without reference and without its null branch; what stands beside them wins."""
    if "$ref" in source:
        target = definitions[source["$ref"].rsplit("/", 1)[-1]]
        return _resolved({**target, **{key: value for key, value in source.items() if key != "$ref"}}, definitions)
    if "anyOf" in source:
        branch = next(item for item in source["anyOf"] if item.get("type") != "null")
        return _resolved({**branch, **{key: value for key, value in source.items() if key != "anyOf"}}, definitions)
    return source


def _decimal(source: Schema) -> Schema:
    node: Schema = {"type": "string", "maxLength": DECIMAL_MAX_LENGTH, "pattern": DECIMAL_PATTERN}
    bounds = [(sign, float(source[key])) for keys, sign in BOUNDS for key in keys if key in source]
    if bounds:
        words = " and ".join(f"{sign} {bound:.12g}" for sign, bound in bounds)
        rule = " && ".join(f"double(self) {sign} {_cel_double(bound)}" for sign, bound in bounds)
        node["x-kubernetes-validations"] = [{"rule": rule, "message": f"must be a number {words}"}]
    default = source.get("default")
    return node if default is None else node | {"default": _plain(default, None)}


def _cel_double(value: float) -> str:
    return f"{value:.1f}" if value == int(value) else repr(value)


def _object(source: Schema, definitions: dict[str, Schema]) -> Schema:
    node: Schema = {"type": "object"}
    if "properties" in source:
        required = source.get("required", [])
        node["properties"] = {
            name: _filled(_node(item, definitions), given=name in required or "default" in item)
            for name, item in source["properties"].items()
        }
        return node | {"required": sorted(required)} if required else node
    node |= {"maxProperties": source["maxProperties"]} if "maxProperties" in source else {}
    if "patternProperties" in source:
        return node | _keyed(source, definitions)
    items = source.get("additionalProperties", True)
    if isinstance(items, dict):
        return node | {"additionalProperties": _node(items, definitions)}
    return node | {"x-kubernetes-preserve-unknown-fields": True}


def _keyed(source: Schema, definitions: dict[str, Schema]) -> Schema:
    """A map whose keys have a form: a structural schema knows no such thing, so CEL says it."""
    ((pattern, items),) = source["patternProperties"].items()
    longest = source.get("propertyNames", {}).get("maxLength")
    bound = f"size(k) <= {longest} && " if longest else ""
    words = f"keys must match {pattern}" + (f" and have at most {longest} characters" if longest else "")
    rule = {"rule": f"self.all(k, {bound}k.matches({_cel_string(pattern)}))", "message": words}
    return {"additionalProperties": _node(items, definitions), "x-kubernetes-validations": [rule]}


def _cel_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _filled(node: Schema, *, given: bool) -> Schema:
    """A record that the model makes when it is not given gets the default `{}`, so that what is below it is filled."""
    fills = any("default" in item for item in node.get("properties", {}).values())
    return node | {"default": {}} if fills and not given and "required" not in node else node


def _item(source: Schema, definitions: dict[str, Schema]) -> Schema:
    return _node(source["items"], definitions)


def _plain(default: Any, items: Schema | None) -> Any:
    if isinstance(default, list):
        return [_plain(item, None) for item in default]
    if isinstance(default, float) and not isinstance(default, bool):
        return format_decimal(default)
    return default if items is None else list(default)


def _attach(root: Schema, cel: Cel) -> None:
    """Put a rule where it belongs.

    The API server judges a default by itself, before what is below it is filled in: a rule of a record whose default is `{}`
    goes to the record above, and names its place by fieldPath.
    """
    parts, below = [part for part in cel.at.split(".") if part], ""
    while _schema_at(root, parts).get("default") == {}:
        below = f".{parts.pop()}{below}"
    rule, expression = (re.sub(r"\b(self|oldSelf)\b", rf"\1{below}", text) for text in (cel.rule, cel.expression))
    validation = {"rule": rule, "message": cel.message}
    validation |= {"messageExpression": expression} if expression else {}
    validation |= {"fieldPath": below} if below else {}
    _schema_at(root, parts).setdefault("x-kubernetes-validations", []).append(validation)


def _schema_at(root: Schema, parts: list[str]) -> Schema:
    node = root
    for part in parts:
        node = node["properties"][part.removesuffix("[]")]
        node = node["items"] if part.endswith("[]") else node
    return node


class _Dumper(yaml.SafeDumper):
    """Quotes strings such as 1e-06, which PyYAML takes for text and Kubernetes for a number; writes no aliases."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if re.fullmatch(DECIMAL_PATTERN, text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def render() -> str:
    """The file `crds/fp8rl.dev_fp8rljobs.yaml`."""
    return HEADER + yaml.dump(build_crd(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def console(arguments: list[str], path: Path, text: Callable[[], str], module: str) -> int:
    """The command line of a generated file: print it, --write it, or --check that the one on disk is fresh (1 if not)."""
    if arguments == ["--write"]:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(), encoding="utf-8")
    elif arguments == ["--check"]:
        if not path.exists() or path.read_text(encoding="utf-8") != text():
            print(f"{path} is stale: run `python -m {module} --write`", file=sys.stderr)
            return 1
    elif not arguments:
        sys.stdout.write(text())
    else:
        print(f"usage: python -m {module} [--write | --check]", file=sys.stderr)
        return 2
    return 0


def main(arguments: list[str]) -> int:
    """Print the CRD, write it (--write), or tell whether the one on disk is fresh (--check, exit code 1 if not)."""
    return console(arguments, PATH, render, "fp8rl_operator.crd")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
