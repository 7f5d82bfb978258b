"""Which weights a version number stands for: version -> (attempt, step, digest). Versions only grow, over restarts too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fp8rl_workers.config import Record
from fp8rl_workers.errors import StaleError

KEPT_VERSIONS = 256


class Published(Record):
    """One published set of weights. `step`: optimizer steps that it has seen; `attempt`: the trainer's when it sent it."""

    version: int
    attempt: int
    step: int
    digest: str = ""


@dataclass
class Lineage:
    """The published versions, newest last; the oldest are forgotten beyond the newest `kept`."""

    entries: dict[int, Published] = field(default_factory=dict)
    kept: int = KEPT_VERSIONS

    @classmethod
    def of(cls, published: Iterable[Published], max_off_policy_steps: int = 0) -> Lineage:
        """A lineage of these versions that keeps those of steps which samples may still be of.

        A step has one version, and one more each time that an engine is sent its weights again: KEPT_VERSIONS are for those.
        """
        entries = {item.version: item for item in sorted(published, key=lambda item: item.version)}
        return cls(entries, KEPT_VERSIONS + max_off_policy_steps)

    @property
    def newest(self) -> Published | None:
        """The newest published version; None before the first."""
        return next(reversed(self.entries.values()), None)

    def add(self, published: Published) -> None:
        """Record a committed version.

        Raises:
            StaleError: the version is not above every earlier one.
        """
        newest = self.newest
        if newest is not None and published.version <= newest.version:
            raise StaleError(f"version {published.version} was used already: the newest is {newest.version}")
        self.entries[published.version] = published
        for version in list(self.entries)[: -self.kept]:
            del self.entries[version]

    def abandon_above(self, step: int) -> None:
        """Forget versions of steps that the trainer has lost: their samples count as another lineage's."""
        self.entries = {version: entry for version, entry in self.entries.items() if entry.step <= step}

    def step_of(self, version: int, attempt: int) -> int | None:
        """Step of a version; None when it is unknown or belongs to another (abandoned) attempt."""
        entry = self.entries.get(version)
        return entry.step if entry is not None and entry.attempt == attempt else None

    def to_json(self) -> list[dict[str, object]]:
        """Plain values for a checkpoint or the state file."""
        return [entry.model_dump() for entry in self.entries.values()]
