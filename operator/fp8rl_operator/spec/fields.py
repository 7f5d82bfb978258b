"""Finding a field's model, description and example by its path in the manifest."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fp8rl_operator.spec.base import Model

Location = tuple[str | int, ...]


def fields_of(model: type[Model]) -> dict[str, FieldInfo]:
    """Fields by the name that the manifest uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def inner(annotation: Any) -> Any:
    """An annotation without `Annotated`, `| None` and the tuple around its items; the value type of a map of records."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return inner(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return inner(next(item for item in get_args(annotation) if item is not type(None)))
    if origin is tuple:
        return inner(get_args(annotation)[0])
    return annotation


def model_of(annotation: Any) -> type[Model] | None:
    """The record that an annotation holds, or a list of; None for plain values and free JSON."""
    found = inner(annotation)
    return found if isinstance(found, type) and issubclass(found, Model) else None


def find(root: type[Model], location: Location) -> tuple[type[Model] | None, FieldInfo | None]:
    """(record that owns the last part of a location, that part's field); None where the path leaves the records."""
    model: type[Model] | None = root
    owner, info = model, None
    for part in location:
        if isinstance(part, int):
            continue
        if model is None:
            return None, None
        owner, info = model, fields_of(model).get(part)
        model = None if info is None else model_of(info.annotation)
    return owner, info


def path_of(location: Location) -> str:
    """`spec.samplers[0].name` of a location."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def limits(annotation: Any, metadata: list[Any]) -> dict[str, Any]:
    """`ge`, `gt`, `le`, `lt`, `min_length`, `max_length` and `pattern` of a field, from all layers of its type."""
    found: dict[str, Any] = {}
    for item in metadata:
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
            if getattr(item, name, None) is not None:
                found[name] = getattr(item, name)
        if isinstance(item, FieldInfo):
            found |= limits(None, item.metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return limits(arguments[0], list(arguments[1:])) | found
    if origin in (Union, UnionType):
        return limits(next(item for item in arguments if item is not type(None)), []) | found
    return found


def words_of(found: dict[str, Any]) -> str:
    """`over 0, at most 10` of a field's limits; empty without a limit."""
    words = {"ge": "at least", "gt": "over", "le": "at most", "lt": "below"}
    return ", ".join(f"{words[name]} {found[name]:.12g}" for name in words if name in found)
