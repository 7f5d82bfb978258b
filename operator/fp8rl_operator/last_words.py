"""Why a process ended, picked from what it wrote last. Pure.

An engine's log ends with `RuntimeError: Engine core initialization failed. See root cause above.`; the cause stands many
lines above, behind prefixes of processes and loggers. Told is the first exception of the log that no logger calls a mere
warning: later ones are its consequences.
"""

from __future__ import annotations

import re

MAX_LENGTH = 500
COLORS = re.compile(r"\x1b\[[0-9;]*m")
# `(EngineCore pid=682) `, `(Worker_TP0 pid=3) `, `[rank0]: `
PROCESS = re.compile(r"^(\([\w. -]*pid=\d+\) ?|\[rank\d+\]: ?)+")
# `ERROR 11-30 18:14:51 [core.py:1330] `
LOGGER = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL):? +(\d\d-\d\d \d\d:\d\d:\d\d +)?(\[[^\]]+\] ?)?")
HARMLESS = ("DEBUG", "INFO", "WARNING")
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Refused)|Fatal Python error): \S")
WRONG_INPUT = re.compile(r"^(InvalidInput|InvalidModel): (.+)$")


def cause(log: str) -> str:
    """The most telling line of a log in at most `MAX_LENGTH` characters: its first exception, else its last line."""
    lines = [stripped for line in log.splitlines() if (stripped := without_prefixes(line)) is not None]
    exceptions = (line for line in lines if EXCEPTION.match(line))
    words = [line.strip() for line in lines if line.strip()]
    found = next(exceptions, words[-1] if words else "")
    return found if len(found) <= MAX_LENGTH else f"{found[: MAX_LENGTH - 1]}…"


def wrong_input(log: str) -> tuple[str, str] | None:
    """(reason, text) of the line with which a worker refuses its input; None if there is none."""
    found = [match for line in log.splitlines() if (match := WRONG_INPUT.match(line.strip()))]
    return (found[-1][1], found[-1][2]) if found else None


def without_prefixes(line: str) -> str | None:
    """A line as it was raised or printed; None for what a logger calls harmless."""
    bare = PROCESS.sub("", COLORS.sub("", line))
    logger = LOGGER.match(bare)
    if logger is None:
        return bare
    return None if logger[1] in HARMLESS else bare[logger.end() :]
