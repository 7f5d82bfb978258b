"""From a body (YAML, or the API server's JSON) to an FP8RLJob, or to all of its faults.

A faulty field does not hide the faults of others: it is left out (or, where it is required, replaced by its example) and
every check that does not read it runs on what remains. Nulls are dropped first, as the API server does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fp8rl_operator.errors import Fault, InvalidSpec
from fp8rl_operator.spec.base import Model
from fp8rl_operator.spec.checks import CHECKS
from fp8rl_operator.spec.fields import Location, fields_of, find, model_of, path_of
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.wording import fault_of

FREE = frozenset({"engineArgs", "megatronArgs", "args", "template", "status"})
REPAIRS = 4  # a removed field can be a missing one, whose example can be an object with fields of its own


def parse(body: Mapping[str, Any]) -> FP8RLJob:
    """The job of a manifest or of an object of the API server.

    Raises:
        InvalidSpec: with every fault that is an error; warnings alone do not raise (`inspect` has them).
    """
    job, faults = inspect(body)
    errors = [fault for fault in faults if fault.level == "error"]
    if errors or job is None:
        raise InvalidSpec(errors)
    return job


def inspect(body: object) -> tuple[FP8RLJob | None, list[Fault]]:
    """(the job, its faults and warnings). The job is None when a field is faulty by itself."""
    if not isinstance(body, Mapping):
        return None, [Fault("", body, "is no mapping of fields", "start with apiVersion, kind, metadata and spec")]
    clean = without_nulls(json.loads(json.dumps(body, default=str)), FP8RLJob)
    try:
        job = FP8RLJob.model_validate_json(json.dumps(clean))
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return job, check(job, ())
    faults = [fault_of(detail) for detail in details]
    faulty = tuple(path_of(detail["loc"]) for detail in details if detail["type"] != "extra_forbidden")
    rest = repaired(clean, details)
    return None, [*faults, *(check(rest, faulty) if rest is not None else [])]


def check(job: FP8RLJob, faulty: tuple[str, ...]) -> list[Fault]:
    """Faults of all checks that read none of the faulty paths."""
    return [fault for rule in CHECKS if not _touches(rule.reads, faulty) for fault in rule.find(job)]


def without_nulls(value: Any, model: type[Model] | None = None) -> Any:
    """A copy without fields that are null; free JSON (arguments, templates, status) and unknown fields of `model` as they are."""
    if isinstance(value, list):
        return [without_nulls(item, model) for item in value]
    if not isinstance(value, dict):
        return value
    fields = fields_of(model) if model is not None else {}
    below = {key: model_of(info.annotation) for key, info in fields.items()}
    return {
        key: item if key in FREE else without_nulls(item, below.get(key))
        for key, item in value.items()
        if item is not None or key in FREE - {"status", "template"} or (fields and key not in fields)
    }


def repaired(body: dict[str, Any], details: list[ErrorDetails]) -> FP8RLJob | None:
    """The job without its faulty fields, None where that cannot be had."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(REPAIRS):
        for detail in details:
            _repair(copy, detail)
        try:
            return FP8RLJob.model_validate_json(json.dumps(copy))
        except ValidationError as error:
            details = error.errors(include_url=False)
    return None


def _repair(body: dict[str, Any], detail: ErrorDetails) -> None:
    location = tuple(part for part in detail["loc"] if part != "[key]")
    parent: Any = body
    for part in location[:-1]:
        known = part in parent if isinstance(parent, dict) else isinstance(part, int) and part < len(parent)
        if not known:
            return
        parent = parent[part]
    last = location[-1]
    if isinstance(parent, dict) and detail["type"] == "missing":
        parent[last] = _example(location)
    elif isinstance(parent, dict):
        parent.pop(last, None)
    elif isinstance(parent, list) and isinstance(last, int) and last < len(parent):
        del parent[last]


def _example(location: Location) -> Any:
    _, info = find(FP8RLJob, location)
    assert info is not None, f"{path_of(location)} is required and no field"
    if info.examples:
        return info.examples[0]
    model = model_of(info.annotation)
    assert model is not None, f"{path_of(location)} is required and has no example"
    return {name: _example((*location, name)) for name, field in fields_of(model).items() if field.is_required()}


def _touches(reads: tuple[str, ...], faulty: tuple[str, ...]) -> bool:
    return any(_within(read, path) or _within(path, read) for read in reads for path in faulty)


def _within(path: str, other: str) -> bool:
    return path == other or (path.startswith(other) and path[len(other)] in ".[")
