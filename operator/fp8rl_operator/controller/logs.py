"""Log records as one line for people or as one JSON object. What a record carries beyond its message (`extra`) is kept."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
QUIET = ("kopf", "asyncio", "aiohttp", "kubernetes")


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """What was given by `extra` and can be said in JSON."""
    found = {key: value for key, value in vars(record).items() if key not in STANDARD}
    return {key: value for key, value in found.items() if isinstance(value, str | int | float)}


class Text(logging.Formatter):
    """`2026-11-30T20:43:26Z info controller.passes: message`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime


class Json(logging.Formatter):
    """One JSON object a line: time (seconds), level, logger, message, extras."""

    def format(self, record: logging.LogRecord) -> str:
        """The object."""
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up(log_format: str, level: str) -> None:
    """Log to stderr. Libraries are heard from warnings on, or from `level` on where that is more."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if log_format == "json" else Text())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    quiet = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
    for name in QUIET:
        logging.getLogger(name).setLevel(quiet if level != "debug" else logging.DEBUG)
