"""Errors of the workers. Each carries a CamelCase `reason` that ends up in a condition and an HTTP status for its callers."""

from __future__ import annotations

import sys

WRONG_INPUT_EXIT = 65
"""Exit code of a process whose input is wrong (EX_DATAERR of sysexits.h): the same start would end the same way."""


class WorkerError(Exception):
    """Base: raised when a worker refuses or fails something for a reason that a person should read."""

    reason = "WorkerError"
    status = 500


class InvalidInputError(WorkerError):
    """Raised when a request or a file holds a value that cannot be used; the message names field, value and way out."""

    reason = "InvalidInput"
    status = 400


class InvalidModelError(WorkerError):
    """Raised when the model's files do not fit the job (dimensions, tokenizer, missing tensors)."""

    reason = "InvalidModel"
    status = 400


class StaleError(WorkerError):
    """Raised when a message belongs to another job, epoch, sync, attempt or step than the current one."""

    reason = "Stale"
    status = 409


class NotYetError(WorkerError):
    """Raised when something is asked for that does not exist yet; ask again later."""

    reason = "NotYet"
    status = 503


class SyncError(WorkerError):
    """Raised when weights could not be moved: a peer is lost, late, or holds other bytes than were sent."""

    reason = "WeightSyncFailed"


class DigestError(SyncError):
    """Raised when received bytes are not the bytes that were sent."""

    reason = "DigestMismatch"


class NonFiniteError(WorkerError):
    """Raised when a weight, loss or log-probability is NaN or infinite."""

    reason = "NaN"


class OutOfMemoryError(WorkerError):
    """Raised when the trainer runs out of device memory; the message names rank, step, peak GiB and remedies."""

    reason = "TrainerOutOfMemory"


def refuse(error: WorkerError) -> int:
    """Say on stderr, in one line `Reason: text`, why a process cannot start; returns its exit code."""
    sys.stderr.write(f"{error.reason}: {' '.join(str(error).split())}\n")
    return WRONG_INPUT_EXIT if isinstance(error, InvalidInputError | InvalidModelError) else 1
