"""Reads a run folder: metrics.jsonl, events.jsonl, status.yaml. Imports no pydantic: the report stays small beside `fp8rl run`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ENGINES_READY = "EnginesReady"


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl, `fp8rl_workers.protocol.StepRecord`; figures that are not finite (null) are left out."""

    kind: str
    time: float
    attempt: int
    step: int
    version: int
    metrics: dict[str, float]
    stages: dict[str, float]

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Read a line.

        Raises:
            ValueError: it is no JSON.
            KeyError: a field is missing.
        """
        fields = json.loads(line)
        metrics = {name: value for name, value in fields["metrics"].items() if value is not None}
        own = (fields["kind"], fields["time"], fields["attempt"], fields["step"], fields["version"])
        return cls(*own, metrics, fields.get("stages", {}))


@dataclass(frozen=True)
class Run:
    """A run as its files tell it. `ready`: Unix time at which the engines of an attempt were ready."""

    name: str
    records: tuple[Record, ...]
    ready: dict[int, float] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Record]:
        """Records of a kind; a step that was done again counts as it was done last."""
        newest: dict[tuple[int, int], Record] = {}
        for record in self.records:
            if record.kind == kind:
                newest[record.step, record.version if kind == "sync" else 0] = record
        return [newest[key] for key in sorted(newest)]


def read_records(folder: Path) -> Run:
    """Read a run folder; a last line that is only half written is left out.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file does not hold what it should.
    """
    document = yaml.safe_load((folder / "status.yaml").read_text())
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    records = tuple(Record.parse(line) for line in lines)
    ready = {
        int(event["message"]): float(event["time"]) for event in read_events(folder) if event["kind"] == ENGINES_READY
    }
    return Run(document["metadata"]["name"], records, ready, document.get("status") or {}, document["spec"])


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Lines of events.jsonl."""
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
