"""Why a job ends as failed: every reason that the orchestrator gives, and the checks made while it waits.

reason                     when
WeightSyncFailed           syncs reached no engine, `trouble.GIVE_UP_AFTER` times in a row, while all engines answered
NaN                        every engine answers values that are not finite after it was healed; or loss, gradient or mismatch is
MismatchLimit              limits.mismatchKL.stop
CheckpointFailed           CHECKPOINT_FAILURES steps in a row could not write their checkpoint
QuantizedLayersDiffer      no engine holds the quantized layers that the trainer's plan says
InvalidModel               another tokenizer than the trainer's
EngineReleaseUnsupported   an engine lacks a route that is needed
RolloutsFail               `rollouts.MAX_ERRORS_IN_A_ROW` groups failed
TrainerFailed, or the trainer's own (TrainerOutOfMemory, InvalidModel, ...)   the trainer says that it has failed
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8rl_workers.errors import InvalidModelError, WorkerError
from fp8rl_workers.orchestrator.dispatch import Replica, all_not_finite
from fp8rl_workers.orchestrator.health import Verdict
from fp8rl_workers.protocol import EngineState, TrainerState

CHECKPOINT_FAILURES = 3
NOT_FINITE = "every engine answered with log-probabilities that are not finite, also after its weights were sent again"


class JobFailedError(WorkerError):
    """Raised when the job must end; `reason` is the condition's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def raise_if_broken(states: Iterable[EngineState], replicas: Iterable[Replica], sync_verdict: str) -> None:
    """End the job when the engines cannot serve its policy. `sync_verdict`: why weights reach nobody for good, or "".

    Raises:
        JobFailedError: QuantizedLayersDiffer, NaN or WeightSyncFailed.
    """
    seen = list(states)
    faults = [f"{state.pod}: {state.error}" for state in seen if not state.audit_passed]
    if faults and len(faults) == len(seen):
        raise JobFailedError("QuantizedLayersDiffer", "; ".join(faults))
    if all_not_finite(replicas):
        raise JobFailedError("NaN", NOT_FINITE)
    if sync_verdict:
        raise JobFailedError("WeightSyncFailed", sync_verdict)


def raise_for_step(step: int, verdict: Verdict, checkpoint_failures: int, checkpoint_warning: str) -> None:
    """End the job when a step's figures or its checkpoints say so.

    Raises:
        JobFailedError: NaN, MismatchLimit or CheckpointFailed.
    """
    if verdict.reason:
        raise JobFailedError(verdict.reason, f"step {step}: {verdict.message}")
    if checkpoint_failures >= CHECKPOINT_FAILURES:
        raise JobFailedError("CheckpointFailed", checkpoint_warning)


def raise_for_tokenizer(path: str, own: str, trainers: str) -> None:
    """Refuse a trainer with another tokenizer: its token ids would mean other text. An empty digest says nothing.

    Raises:
        InvalidModelError: the digests (SHA-256 of tokenizer.json, hex) differ.
    """
    if trainers and trainers != own:
        raise InvalidModelError(
            f"model.path: {path} has SHA-256 {own}, the trainer's tokenizer.json has {trainers}: all roles must see the same "
            "model folder; mount the same volume and revision in every pod"
        )


def failure_of(state: TrainerState) -> JobFailedError:
    """The trainer's own failure."""
    return JobFailedError(state.reason or "TrainerFailed", state.message or "the trainer has failed")
