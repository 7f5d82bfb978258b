"""The highest version ever published, on disk before it is offered: a version is never used twice, also after a restart."""

from __future__ import annotations

from pathlib import Path

from fp8rl_workers.errors import StaleError
from fp8rl_workers.trainer.checkpoint import write_synced


class VersionCounter:
    """`highest`: the last version that was taken, 0 before the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.highest = int(path.read_text()) if path.is_file() else 0

    def take(self, version: int) -> None:
        """Use a version up.

        Raises:
            StaleError: it was used before.
        """
        if version <= self.highest:
            raise StaleError(f"version {version} was used before; the highest is {self.highest}, ask for a later one")
        write_synced(self._path, str(version).encode())
        self.highest = version

    def raise_to(self, version: int) -> None:
        """Take over what a checkpoint knows; a lower version changes nothing."""
        self.highest = max(self.highest, version)
