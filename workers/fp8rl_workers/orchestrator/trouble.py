"""What goes wrong with weight syncs: when one is tried again, whom it leaves out, when the job gives up. Pure; times in seconds.

Syncs that reach no engine are repeated after 0.5 s, then after twice as long each time, 15 s at most. GIVE_UP_AFTER of them in
a row end the job, unless a pod was gone each time: those do not count. An engine that fails beside one that does not is left
alone for the same pauses, and from its SHED_AFTER-th failure in a row on it is shed: the others form a group without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
GIVE_UP_AFTER = 8
SHED_AFTER = 2
SHED_SECONDS = 5.0
SHED_DOUBLINGS = 6
LINE_LENGTH = 200


def pause_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row (1 or more)."""
    return float(min(FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, 30), LONGEST_PAUSE_SECONDS))


def one_line(text: str, length: int = LINE_LENGTH) -> str:
    """A text without line breaks, at most `length` characters long."""
    words = " ".join(text.split())
    return words if len(words) <= length else f"{words[: length - 3]}..."


def kind_of(text: str) -> str:
    """The text without what differs from one try to the next (numbers, digests): equal for errors of one cause."""
    return re.sub(r"\b[0-9a-f]{8,}\b|\d+", "#", text)


def listed(errors: Mapping[str, str]) -> str:
    """Errors by name in one line, names with errors of one cause together: `a, b: why; c: why`."""
    names: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name, text in errors.items():
        kind = kind_of(text.replace(name, "#"))
        names.setdefault(kind, []).append(name)
        texts.setdefault(kind, text)
    return "; ".join(f"{', '.join(names[kind])}: {text}" for kind, text in texts.items())


@dataclass
class Member:
    """An engine that failed. `failures`: in a row; `until`: when it may be tried again; `shed`: not part of the group."""

    pod: str
    failures: int = 0
    error: str = ""
    until: float = 0.0
    shed: bool = False


@dataclass
class Trouble:
    """Failures since the last sync that reached an engine. `blamed`: error by pod of the last failure."""

    failures: int = 0
    tries: int = 0
    until: float = 0.0
    blamed: dict[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def failed(self, errors: Mapping[str, str], now: float, *, counts: bool) -> None:
        """A try that reached nobody, by pod; `counts`: whether it can be a reason to give up."""
        self.tries += 1
        self.failures += counts
        self.until = now + pause_seconds(self.tries)
        self.blamed = {pod: one_line(text) for pod, text in errors.items()}

    def succeeded(self, uids: Iterable[str]) -> None:
        """A sync reached these engines."""
        self.failures, self.tries, self.until, self.blamed = 0, 0, 0.0, {}
        for uid in uids:
            self.members.pop(uid, None)

    def blame(self, uid: str, pod: str, error: str, now: float) -> Member:
        """An engine failed: it is left alone for a while where others do better."""
        member = self.members.setdefault(uid, Member(pod))
        member.failures += 1
        member.error = one_line(error)
        member.until = now + pause_seconds(member.failures)
        member.shed = False
        return member

    def shed(self, uid: str, now: float) -> None:
        """Leave an engine that was blamed out of the group, longer each time."""
        member = self.members[uid]
        doublings = min(max(member.failures - SHED_AFTER, 0), SHED_DOUBLINGS)
        member.until, member.shed = now + SHED_SECONDS * 2**doublings, True

    def paused(self, now: float) -> frozenset[str]:
        """Engines that are left alone for now."""
        return frozenset(uid for uid, member in self.members.items() if member.until > now)

    def shed_now(self, now: float) -> frozenset[str]:
        """Engines that are out of the group for now."""
        return frozenset(uid for uid, member in self.members.items() if member.shed and member.until > now)

    def keep(self, uids: Iterable[str]) -> None:
        """Forget engines that are no longer part of the job."""
        wanted = set(uids)
        self.members = {uid: member for uid, member in self.members.items() if uid in wanted}

    def held(self, now: float) -> str:
        """Why nothing is tried now, and when it is; empty when something may be."""
        if self.until <= now:
            return ""
        return f"{listed(self.blamed)}; tried again in {self.until - now:.1f} s (failure {self.tries} in a row)"

    def verdict(self) -> str:
        """Why to give up; empty while there is hope."""
        if self.failures < GIVE_UP_AFTER:
            return ""
        return f"{self.failures} weight syncs in a row reached no engine: {listed(self.blamed)}"
