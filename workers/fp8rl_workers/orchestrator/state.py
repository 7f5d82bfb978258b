"""What the orchestrator hands to the trainer with each batch and gets back on resume, and where a run goes on. Pure.

There is one checkpoint: the trainer's. The state of batch k describes the orchestrator after batch k was taken. Beside it
the last batch lies in the state folder until the next one, so that an orchestrator that dies while the trainer lives posts
the same batch again (the trainer answers a step that it has done with its result) and no prompt is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8rl_workers.config import Record
from fp8rl_workers.orchestrator.dataset import Cursor
from fp8rl_workers.protocol import StepRequest, TrainerState


class RunState(Record):
    """The orchestrator after a batch. `version`, `sync_id`, `epoch`: the highest given out by then."""

    cursor: dict[str, Any] = {}
    version: int = 0
    sync_id: int = 0
    epoch: int = 0
    consumed_prompts: int = 0
    dropped: dict[str, int] = {}
    reward_first: float | None = None
    reward_last: float | None = None


@dataclass(frozen=True)
class Resume:
    """Where the run goes on: after `step`, with `state`; `again` is a batch to post before anything else, `done` that of `step`."""

    step: int
    state: RunState
    again: StepRequest | None = None
    done: StepRequest | None = None

    @property
    def cursor(self) -> Cursor:
        """The prompt set's cursor."""
        return Cursor.from_json(self.state.cursor)


def resume(pending: StepRequest | None, trainer: TrainerState) -> Resume:
    """Where to go on beside this trainer.

    The pending batch counts when the same attempt of the same job's trainer has just done it or comes to it next; else
    the trainer's checkpoint says everything.
    """
    same = pending is not None and (pending.job_uid, pending.attempt) == (trainer.job_uid, trainer.attempt)
    if pending is not None and same and trainer.step == pending.step:
        return Resume(trainer.step, RunState.model_validate(pending.orchestrator), done=pending)
    if pending is not None and same and trainer.step == pending.step - 1:
        return Resume(trainer.step, RunState.model_validate(pending.orchestrator), again=pending)
    return Resume(trainer.step, RunState.model_validate(trainer.orchestrator))
