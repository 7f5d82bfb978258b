"""What the orchestrator must not forget: one JSON file, replaced atomically and synced to disk with every change.

Here lies the recorded decision of a sync: a restarted orchestrator rolls forward what stands here as decided, aborts what
does not, and never gives a version, sync or epoch number out twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8rl_workers.config import Record
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.http import validation_text
from fp8rl_workers.orchestrator.lineage import Published
from fp8rl_workers.protocol import Decision, Epoch, GroupDocument, SyncRequest


class SyncEntry(Record):
    """A sync under way; `decision` once it is decided. `attempt`: the trainer's."""

    request: SyncRequest
    attempt: int
    decision: Decision | None = None


class JournalData(Record):
    """Everything in the file. `version`, `sync_id`, `epoch_number`: the highest ever given out.

    `recorded_step`: the last step whose figures are in metrics.jsonl.
    """

    job_uid: str
    version: int = 0
    sync_id: int = 0
    epoch_number: int = 0
    recorded_step: int = 0
    document: GroupDocument | None = None
    epoch: Epoch | None = None
    sync: SyncEntry | None = None
    published: list[Published] = []


class Journal:
    """The file and its newest content."""

    def __init__(self, path: Path, job_uid: str) -> None:
        """Read the file, or start an empty one.

        Raises:
            InvalidInputError: the file is unreadable or belongs to another job.
        """
        self.path = path
        self.data = JournalData(job_uid=job_uid)
        if path.exists():
            try:
                self.data = JournalData.model_validate_json(path.read_bytes())
            except ValidationError as error:
                message = f"{path}: {validation_text(error)}; remove the file to start anew"
                raise InvalidInputError(message) from error
        if self.data.job_uid != job_uid:
            message = f"{path} belongs to job {self.data.job_uid}, not {job_uid}; give each job its own state volume"
            raise InvalidInputError(message)

    def save(self, **changes: Any) -> None:
        """Change fields; when this returns, the file is on disk."""
        self.data = self.data.model_copy(update=changes)
        write_synced(self.path, self.data.model_dump_json().encode())


def write_synced(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new content, and sync file and folder to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
