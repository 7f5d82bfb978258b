"""Strategic merge of pod templates: maps merge, lists with a key merge by it, other lists are replaced."""

from __future__ import annotations

from typing import Any

from fp8rl_operator.spec.checks.templates import CONTAINER_LISTS, POD_LISTS

MERGE_KEYS = POD_LISTS | CONTAINER_LISTS
VOLUME_SOURCES = {"configMap", "emptyDir", "hostPath", "persistentVolumeClaim", "secret"}
"""Of the volumes that the operator builds."""


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """`patch` over `base`; None removes a key, `$patch: delete` an item of a keyed list."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value, key) if key in base else without_nulls(value)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in MERGE_KEYS:
        return merge_keyed(base, patch, MERGE_KEYS[field])
    return patch


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null: they remove what is not there."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def merge_keyed(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    """Merge lists of maps by `key`: the order of `base`, what is new at the end."""
    merged = {item[key]: item for item in base}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = merge_item(merged[item[key]], item) if item[key] in merged else without_nulls(item)
    return list(merged.values())


def merge_item(base: Any, item: Any) -> Any:
    """An env entry has a value or a source, and a volume one source; all other items merge."""
    if "valueFrom" in item or ("value" in item and "valueFrom" in base):
        return item
    if (source := VOLUME_SOURCES & base.keys()) and not source & item.keys() and item.keys() - {"name"}:
        return item
    return merge(base, item)
