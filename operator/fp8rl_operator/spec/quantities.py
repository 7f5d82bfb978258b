"""Quantities of Kubernetes as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

SUFFIXES: dict[str, Fraction] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "": Fraction(1),
    **{suffix: Fraction(1000 ** (power + 1)) for power, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(1024 ** (power + 1)) for power, suffix in enumerate("KMGTPE")},
}
QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?")
GIB = 1 << 30


def quantity(value: Any) -> Fraction | None:
    """The number that a quantity means; None for what is none (a template is free JSON)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    suffix = match["suffix"] or ""
    scale = SUFFIXES.get(suffix)
    return Fraction(match["number"]) * (Fraction(10) ** int(suffix[1:]) if scale is None else scale)


def gibibytes(amount: Fraction | int) -> str:
    """Bytes as a quantity of whole GiB, rounded up."""
    return f"{-(-Fraction(amount) // GIB)}Gi"


def words(amount: Fraction | int) -> str:
    """Bytes for a message: `12.5 GiB`."""
    return f"{float(amount) / GIB:.3g} GiB"
