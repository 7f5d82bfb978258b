"""How many parameters a model's files hold, by the headers of its safetensors: no tensor is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_HEADER = 100 << 20
SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")


def count_parameters(folder: Path, config: dict[str, Any]) -> int | None:
    """Parameters of the model in `folder`, scales of an FP8 release and a tied head left out; None where a file cannot be read."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header = read_header(file)
        if header is None:
            return None
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    kept = [shape for name, shape in shapes.items() if name not in tied and not name.endswith(SCALES)]
    return sum(math.prod(shape) for shape in kept) or None


def read_header(file: Path) -> dict[str, Any] | None:
    """The JSON header of a safetensors file; None for any other file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 0 < length <= MAX_HEADER else None
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None
