"""The reference page of the job, generated from the CRD: `python -m fp8rl_operator.docs [--write | --check]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8rl_operator.crd import build_schema, console
from fp8rl_operator.names import CONDITIONS, MAX_JOB_NAME
from fp8rl_operator.plan_revisions import IN_PLACE
from fp8rl_operator.spec.base import DECIMAL_PATTERN
from fp8rl_operator.spec.checks import CHECKS, TRANSITIONS

Schema = dict[str, Any]
PATH = Path(__file__).resolve().parents[2] / "docs" / "fp8rljob.md"
HEAD = f"""\
<!-- Generated from operator/fp8rl_operator/spec by `python -m fp8rl_operator.docs --write`. Not edited by hand. -->
# FP8RLJob

`apiVersion: fp8rl.dev/v1alpha1`, `kind: FP8RLJob`, short name `f8j`, namespaced. Samples: `deploy/samples/`.

- **Decimals** are strings (`learningRate: "5e-4"`), since a CustomResource carries no floats. `fp8rl` also takes a bare number and
  warns; the API server does not.
- **Quantities** are Kubernetes quantities (`100Gi`).
- **metadata.name** has at most {MAX_JOB_NAME} characters: the pod name `<name>-inference-<10>-<5>` ends at 63.
- *required* in the column of defaults means that there is none; empty means unset.
- Unknown fields are refused by `fp8rl validate` and by `kubectl` (strict validation is its default).
"""


def render() -> str:
    """The page `docs/fp8rljob.md`."""
    schema = build_schema()["properties"]
    spec, status = (list(_section(part, schema[part])) for part in ("spec", "status"))
    parts = [HEAD, *spec, *_rules(), *_changes(), *status, *_conditions()]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, schema: Schema) -> Iterator[str]:
    """A table of a record's fields, then the sections of the records below it."""
    yield f"{'#' * min(2 + path.count('.'), 4)} {path}\n"
    yield f"{_cell(schema['description'])}\n"
    yield "| field | type | default | allowed | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        default = "*required*" if name in required else _default(field)
        yield f"| `{name}` | {_type(field)} | {default} | {_allowed(field)} | {_cell(field['description'])} |"
    yield ""
    for name, field in schema["properties"].items():
        record = field.get("items", field)
        if "properties" in record:
            yield from _section(
                f"{path}.{name}{'[]' if 'items' in field else ''}", record | {"description": field["description"]}
            )


def _rules() -> Iterator[str]:
    """The rules over several fields, with what the API server can say of them."""
    yield "## Rules over several fields\n"
    yield "`fp8rl validate` and the controller apply all of them; the API server those that CEL can say.\n"
    yield "| rule | meaning | reads | at admission |"
    yield "| --- | --- | --- | --- |"
    for check in CHECKS:
        reads = ", ".join(f"`{path.removeprefix('spec.')}`" for path in check.reads)
        left = f"not {check.beyond_cel}" if check.beyond_cel else ""
        said = "yes" if check.cel else check.by_schema and f"yes ({check.by_schema})"
        cel = "; ".join(filter(None, (said, left)))
        yield f"| {check.name.replace('_', ' ')} | {_cell(check.find.__doc__ or '')} | {reads} | {_cell(cel)} |"
    yield ""


def _changes() -> Iterator[str]:
    """What a change of a stored job does."""
    yield "## Changes of a stored job\n"
    yield f"- In place, no pod restarts: {', '.join(f'`{field}`' for field in sorted(IN_PLACE - {'managedBy'}))}."
    yield "- `trainer`, but for what is immutable: a new attempt of the trainer, from its last checkpoint."
    yield "- Everything else: a new attempt of the whole job. Neither costs a restart of `failurePolicy.maxRestarts`.\n"
    yield "The API server refuses a change of what is immutable:\n"
    yield "| refusal |"
    yield "| --- |"
    yield from (f"| {_cell(rule.message)} |" for rule in TRANSITIONS)
    yield ""


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    yield "| type | meaning |"
    yield "| --- | --- |"
    yield from (f"| {name} | {_cell(text)} |" for name, text in CONDITIONS.items())
    yield ""


def _type(field: Schema) -> str:
    if "properties" in field:
        return "record"
    if field["type"] == "array":
        return f"list of {_type(field['items'])}{'s' if 'properties' in field['items'] else ''}"
    if "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}"
    if field.get("pattern") == DECIMAL_PATTERN:
        return "decimal"
    return {"object": "free JSON", "boolean": "bool"}.get(field["type"]) or str(field["type"])


def _default(field: Schema) -> str:
    default = field.get("default", {})
    if default == {}:
        return ""
    text = (
        str(default).lower()
        if isinstance(default, bool)
        else ", ".join(default)
        if isinstance(default, list)
        else str(default)
    )
    return f"`{text}`"


def _allowed(field: Schema) -> str:
    """Values, range, or length of a field."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "integer":
        low, high = field.get("minimum"), field.get("maximum")
        return f"{low} to {high}" if high is not None else f"{low} or more" if low is not None else ""
    if field.get("pattern") == DECIMAL_PATTERN:
        rules = field.get("x-kubernetes-validations", [])
        return _cell(rules[0]["message"].removeprefix("must be a number ")) if rules else ""
    if field["type"] == "array":
        return f"at most {field['maxItems']} items"
    if "maxProperties" in field:
        return f"at most {field['maxProperties']} keys"
    return f"`{_cell(field['pattern'])}`" if "pattern" in field else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;").replace("&lt;=", "≤")


def main(arguments: list[str]) -> int:
    """Print the page, write it (--write), or tell whether the one on disk is fresh (--check, exit code 1 if not)."""
    return console(arguments, PATH, render, "fp8rl_operator.docs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
