"""The orchestrator's files: `metrics.jsonl` (protocol.StepRecord), `rollouts.jsonl`, `events.jsonl`. Appended and flushed.

Lines are appended by one system call; what a killed process left of a line is cut off by the next one, so that every line is
whole. The rollout dump holds the first DUMPED_SAMPLES samples of each step as it is handed to the trainer: of a step that is taken
again after a loss, the last rows count; a file over DUMP_BYTES is set aside as `.1`, so the
dump never takes more than twice that.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8rl_workers.orchestrator.trouble import kind_of
from fp8rl_workers.protocol import StepRecord

log = logging.getLogger(__name__)

DUMPED_SAMPLES = 16
DUMP_BYTES = 64 << 20


class Records:
    """Writes into one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._said: set[tuple[str, str]] = set()
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            mend(folder / name)

    def metrics(self, record: StepRecord) -> None:
        """One line of metrics."""
        self._append("metrics.jsonl", [record.model_dump_json()])

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """One event, also as a log line. `kind` is CamelCase."""
        log.info("%s: %s", kind, message)
        line = {"time": time.time(), "source": "orchestrator", "kind": kind, "message": message, **fields}
        self._append("events.jsonl", [json.dumps(line)])

    def event_once(self, kind: str, message: str, **fields: Any) -> None:
        """An event that may come again and again: written once for each cause, until `forget_said`."""
        said = (kind, kind_of(message))
        if said not in self._said:
            self._said.add(said)
            self.event(kind, message, **fields)

    def forget_said(self) -> None:
        """All is well: what comes next is said again."""
        self._said.clear()

    def rollouts(self, lines: Iterable[dict[str, Any]]) -> None:
        """Samples of a step, DUMPED_SAMPLES of them."""
        path = self.folder / "rollouts.jsonl"
        if path.exists() and path.stat().st_size > DUMP_BYTES:
            path.replace(path.with_suffix(".jsonl.1"))
        self._append(path.name, [json.dumps(line) for line in list(lines)[:DUMPED_SAMPLES]])

    def _append(self, name: str, lines: list[str]) -> None:
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())


def mend(path: Path) -> None:
    """Cut off a last line without its end."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
