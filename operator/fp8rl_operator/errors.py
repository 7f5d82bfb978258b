"""What can be wrong with a job's manifest. Imports nothing heavy: every module of the operator may import it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

MAX_VALUE_LENGTH = 200


@dataclass(frozen=True)
class Fault:
    """One fault of a manifest: where, what stands there, why it cannot be, what to write instead.

    `path` is the field's path (`spec.trainer.optimizer.gradClip`, `spec.samplers[0].name`), empty for the whole file.
    `value` is the value as written, shortened; None when the field is absent. `line` is 1-based, None for a body that
    came from no file. `level: warning` means that the job runs, but not everywhere or not as one might think.
    """

    path: str
    value: Any
    reason: str
    remedy: str
    line: int | None = None
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        """`spec.x.y: value 3: reason; remedy`, the parts that are empty left out; always one line."""
        where = [self.path] if self.path else []
        what = [] if self.value is None else [f"value {short(self.value)}"]
        why = "; ".join(part for part in (self.reason, self.remedy) if part)
        text = ": ".join([*where, *what, why])
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class InvalidSpec(ValueError):  # noqa: N818 - the name that the conditions use
    """Raised when a body is no valid FP8RLJob. Carries all of its faults, not the first."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


def short(value: Any) -> str:
    """A value as one line of at most 200 characters; strings bare unless that would hide something."""
    text = value if isinstance(value, str) and re.fullmatch(r"[\w./:+*{}\[\]-]+", value) else _as_yaml(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value)
