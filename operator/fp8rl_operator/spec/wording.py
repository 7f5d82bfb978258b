"""What pydantic found, in the words of the manifest: field path, value, reason, remedy."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fp8rl_operator.errors import Fault, short
from fp8rl_operator.spec.fields import Location, fields_of, find, inner, limits, path_of, words_of
from fp8rl_operator.spec.job import FP8RLJob

# Fields that people know from elsewhere, with the reason why they are not here.
ABSENT = {
    "spec.inference.parallelism.data": ("data parallelism is replicas", "raise spec.inference.replicas"),
    "spec.inference.dataParallel": ("data parallelism is replicas", "raise spec.inference.replicas"),
    "spec.inference.parallelism.pipeline": ("engines have no pipeline stages", "use tensor and gpusPerReplica"),
    "spec.trainer.parallelism.data": (
        "is what remains of the GPUs",
        "leave it out: world / (tensor x pipeline x context)",
    ),
    "spec.trainer.gradClip": ("belongs to the optimizer", "write spec.trainer.optimizer.gradClip"),
    "spec.trainer.learningRate": ("belongs to the optimizer", "write spec.trainer.optimizer.learningRate"),
    "spec.replicas": ("each role has replicas of its own", "write spec.trainer.replicas and spec.inference.replicas"),
}
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "finite_number": "a finite number",
    "float_type": 'a decimal number in quotes, such as "0.5"',
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dict_type": "a mapping",
    "tuple_type": "a list",
}
BOUNDS = {
    "greater_than": ("gt", "over"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def fault_of(detail: ErrorDetails) -> Fault:
    """One error of pydantic as a fault."""
    kind, location, value = detail["type"], detail["loc"], detail["input"]
    key = location[-1] == "[key]"
    location = location[:-1] if key else location
    path = path_of(location)
    owner, info = find(FP8RLJob, location)
    if kind == "missing":
        return Fault(path, None, "is required", _what_to_add(location, info))
    if kind == "extra_forbidden":
        known = list(fields_of(owner)) if owner else []
        reason, remedy = _unknown(path, str(location[-1]), known)
        return Fault(path, _shallow(value), reason, remedy)
    reason, remedy = _reason(detail, info)
    return Fault(path, location[-1] if key else _shallow(value), f"the key {reason}" if key else reason, remedy)


def _what_to_add(location: Location, info: FieldInfo | None) -> str:
    if info is None or info.description is None:
        return "add it"
    example = f", for example {info.examples[0]}" if info.examples and not isinstance(info.examples[0], dict) else ""
    return f"add {location[-1]}{example}: {info.description.split('. ')[0].rstrip('.')}"


def _unknown(path: str, name: str, known: list[str]) -> tuple[str, str]:
    if path in ABSENT:
        reason, remedy = ABSENT[path]
        return f"unknown field: {reason}", remedy
    camel = "".join(part.capitalize() if i else part for i, part in enumerate(name.replace("-", "_").split("_")))
    folded = {field.lower(): field for field in known}
    close = get_close_matches(camel.lower(), folded, n=1, cutoff=0.6)
    if close:
        return "unknown field", f"did you mean {folded[close[0]]}?"
    return "unknown field", f"known here: {', '.join(known)}"


def _reason(detail: ErrorDetails, info: FieldInfo | None) -> tuple[str, str]:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind in BOUNDS:
        bound, word = BOUNDS[kind]
        return f"must be {word} {context[bound]:.12g}", _allowed(detail["loc"], info)
    if kind == "literal_error":
        choices = [str(choice) for choice in get_args(inner(info.annotation))] if info else []
        close = get_close_matches(str(value).lower(), [choice.lower() for choice in choices], n=1)
        guess = next((choice for choice in choices if close and choice.lower() == close[0]), None)
        return f"is not one of {', '.join(choices)}" if len(choices) > 1 else f"must be {choices[0]}", (
            f"did you mean {guess}?"
            if guess and len(choices) > 1
            else f"write {choices[0]}"
            if len(choices) == 1
            else ""
        )
    if kind in TYPES:
        return f"must be {TYPES[kind]}", _quotes(kind, value)
    if kind in ("string_too_long", "too_long", "string_too_short", "too_short"):
        limit = context.get("max_length", context.get("min_length"))
        unit = "characters" if kind.startswith("string") else "items"
        return f"has {len(str(value)) if unit == 'characters' else len(value)} {unit}", (
            f"use at {'most' if kind.endswith('long') else 'least'} {limit}"
        )
    if kind == "string_pattern_mismatch":
        return "has a form that is not allowed here", f"match {context['pattern']}"
    return detail["msg"], str(context.get("remedy", ""))


def _quotes(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f'write "{short(value)}"'
    quoted = isinstance(value, str) and (
        value.lower() in ("true", "false") if kind == "bool_type" else value.isdecimal()
    )
    return "take the quotes away" if quoted else ""


def _allowed(location: Location, info: FieldInfo | None) -> str:
    if info is None or isinstance(location[-1], int):
        return ""
    return f"choose a value {words_of(limits(info.annotation, info.metadata))}"


def _shallow(value: Any) -> Any:
    """Objects and lists are not repeated in a message."""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    return ("[...]" if value else "[]") if isinstance(value, list) else value
