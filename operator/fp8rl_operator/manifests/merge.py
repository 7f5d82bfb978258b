"""Strategic merge of pod templates: maps merge, lists with a key merge by it, other lists are replaced."""

from __future__ import annotations

from typing import Any

from fp8rl_operator.spec.checks.templates import CONTAINER_LISTS, POD_LISTS

MERGE_KEYS = POD_LISTS | CONTAINER_LISTS


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """`patch` over `base`; None removes a key, `$patch: delete` an item of a keyed list."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value, key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in MERGE_KEYS:
        return merge_keyed(base, patch, MERGE_KEYS[field])
    return patch


def merge_keyed(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    """Merge lists of maps by `key`: the order of `base`, what is new at the end."""
    merged = {item[key]: item for item in base}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = merge_item(merged[item[key]], item) if item[key] in merged else item
    return list(merged.values())


def merge_item(base: Any, item: Any) -> Any:
    """An env entry has a value or a source, never both; all other items merge."""
    if "valueFrom" in item or ("value" in item and "valueFrom" in base):
        return item
    return merge(base, item)
