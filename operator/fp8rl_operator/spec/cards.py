"""Compute capability of the cards that the node label nvidia.com/gpu.product names, as far as their names tell it.

The label is the NVML name with dashes for spaces (NVIDIA-H100-80GB-HBM3), with -SHARED or -MIG-<profile> behind it. A name
that is not listed is left to the trainer and the engine, which look at the card itself.
"""

from __future__ import annotations

import re

Capability = tuple[int, int]

# Longer names first: GB200 before B200, RTX-6000-Ada before RTX-6000.
CARDS: tuple[tuple[str, Capability], ...] = (
    ("V100", (7, 0)),
    ("T4", (7, 5)),
    ("Quadro-RTX-[0-9]+", (7, 5)),
    ("A100", (8, 0)),
    ("A30", (8, 0)),
    ("A10G?", (8, 6)),
    ("A16", (8, 6)),
    ("A40", (8, 6)),
    ("RTX-A[0-9]+", (8, 6)),
    ("GeForce-RTX-30[0-9]+", (8, 6)),
    ("GeForce-RTX-40[0-9]+", (8, 9)),
    ("RTX-[0-9]+-Ada", (8, 9)),
    ("L4", (8, 9)),
    ("L40S?", (8, 9)),
    ("H100", (9, 0)),
    ("H20", (9, 0)),
    ("H200", (9, 0)),
    ("H800", (9, 0)),
    ("GH200", (9, 0)),
    ("G?B200", (10, 0)),
    ("G?B300", (10, 3)),
    ("RTX-PRO-[0-9]+", (12, 0)),
    ("GeForce-RTX-50[0-9]+", (12, 0)),
)


def card_pattern(name: str) -> str:
    """Regular expression (RE2) that a product label holds when it names this card."""
    return f"(^|-){name}($|-)"


def capability(product: str) -> Capability | None:
    """Compute capability of a product label, None for a name that is not known."""
    return next((found for name, found in CARDS if re.search(card_pattern(name), product)), None)


def cards_pattern(lowest: Capability, below: Capability) -> str:
    """One regular expression (RE2) for all known cards with lowest <= capability < below."""
    names = [name for name, found in CARDS if lowest <= found < below]
    return card_pattern(f"({'|'.join(names)})")
