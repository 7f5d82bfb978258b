"""Whether a child is as it shall be. Pure.

The API server adds defaults, rewrites quantities and leaves out what is empty; others add labels, annotations and items of
keyed lists. None of this is a difference. What a desired object no longer names is told by the digest of the desired object,
which the child carries as an annotation.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import Any, Final

from fp8rl_operator import names
from fp8rl_operator.kube.kinds import Object
from fp8rl_operator.spec.checks.templates import CONTAINER_LISTS, POD_LISTS

ANNOTATION_APPLIED: Final = f"{names.GROUP}/applied"
DIGEST_LENGTH: Final = 16
MERGE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    **{name: (key,) for name, key in (POD_LISTS | CONTAINER_LISTS).items()},
    "ownerReferences": ("uid",),
    "volumeClaimTemplates": ("metadata", "name"),
}
QUANTITY_MAPS: Final = frozenset({"requests", "limits"})
QUANTITIES: Final = frozenset({"sizeLimit", "divisor"})
ATOMIC_MAPS: Final = frozenset({"selector", "matchLabels", "nodeSelector"})
BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
METRIC: Final = {"n": -3, "u": -2, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def digest(value: Any) -> str:
    """A short digest of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_LENGTH // 2).hexdigest()


def signed(body: Object) -> Object:
    """The desired object with its own digest as an annotation."""
    meta = body["metadata"]
    annotations = {**meta.get("annotations", {}), ANNOTATION_APPLIED: digest(body)}
    return {**body, "metadata": {**meta, "annotations": annotations}}


def satisfied(desired: Any, live: Any, field: str = "", parent: str = "") -> bool:
    """Whether `live` says what `desired` says. `field` and `parent`: the names under which the value stands."""
    if live is None:
        return not desired
    if isinstance(desired, dict) and isinstance(live, dict):
        return satisfied_map(desired, live, field)
    if isinstance(desired, list) and isinstance(live, list):
        return satisfied_list(desired, live, field)
    return bool(desired == live) or same_quantity(desired, live, field, parent)


def satisfied_map(desired: Object, live: Object, field: str) -> bool:
    """Maps: keys that are not desired are others' or defaults, except in maps that are set as a whole."""
    if field in ATOMIC_MAPS and desired.keys() != live.keys():
        return False
    return all(satisfied(value, live.get(key), key, field) for key, value in desired.items())


def satisfied_list(desired: list[Any], live: list[Any], field: str) -> bool:
    """Lists: by the key of their items where they have one, else item by item."""
    path = MERGE_KEYS.get(field)
    mine, theirs = keys_of(desired, path), keys_of(live, path)
    if mine is None or theirs is None:
        return len(desired) == len(live) and all(map(satisfied, desired, live))
    found = dict(zip(theirs, live, strict=True))
    return all(satisfied(item, found.get(key)) for key, item in zip(mine, desired, strict=True))


def keys_of(items: list[Any], path: tuple[str, ...] | None) -> list[Any] | None:
    """The key of each item; None for a list that has no keys, or not one for each."""
    if path is None:
        return None
    keys = [key_of(item, path) for item in items]
    return None if None in keys or len(set(keys)) < len(keys) else keys


def key_of(item: Any, path: tuple[str, ...]) -> Any:
    """The key of a list's item."""
    value: Any = item
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def same_quantity(desired: Any, live: Any, field: str, parent: str) -> bool:
    """Whether both are the same quantity, where a quantity stands."""
    if field not in QUANTITIES and parent not in QUANTITY_MAPS:
        return False
    mine, theirs = quantity(str(desired)), quantity(str(live))
    return mine is not None and mine == theirs


def quantity(text: str) -> Decimal | None:
    """A resource.Quantity as a number; None if it is none."""
    for units, base in ((BINARY, 1024), (METRIC, 1000)):
        unit = next((unit for unit in units if text.endswith(unit)), None)
        if unit is not None and (number := decimal(text[: -len(unit)])) is not None:
            return number * Decimal(base) ** units[unit]
    return decimal(text)


def decimal(text: str) -> Decimal | None:
    """A plain decimal number, None for anything else."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        return None
    return number if number.is_finite() else None
