"""What cannot change in a job that is stored: only the API server can tell, since it alone sees the object as it was."""

from __future__ import annotations

from fp8rl_operator.spec.checks.base import Cel

ANEW = "create a job of another name with the new value, or delete this one first"


def kept(*path: str) -> str:
    """A rule for an optional field below `self`, under records that may be left out: neither set, removed nor changed."""
    steps = [".".join(path[: index + 1]) for index in range(len(path))]
    new, old = (" && ".join(f"has({at}.{step})" for step in steps) for at in ("self", "oldSelf"))
    return f"({new}) == ({old}) && (!({new}) || self.{steps[-1]} == oldSelf.{steps[-1]})"


TRANSITIONS: tuple[Cel, ...] = (
    Cel(
        "spec.managedBy",
        "self == oldSelf",
        "managedBy is immutable: a second controller would find pods that the first one left; delete the job and create it"
        " anew with the other controller",
    ),
    Cel("spec.seed", "self == oldSelf", f"seed is immutable: samples and data so far came from the old one; {ANEW}"),
    Cel(
        "spec.model",
        "self == oldSelf",
        f"model is immutable: checkpoints, engines and the mismatch so far belong to it; {ANEW}",
    ),
    Cel(
        "spec.precision",
        "self == oldSelf",
        f"precision is immutable: the checkpoint was trained with it and every engine serves it; {ANEW}",
    ),
    Cel(
        "spec.trainer.backend",
        "self == oldSelf",
        f"trainer.backend is immutable: the backends' checkpoints differ; {ANEW}",
    ),
    *(
        Cel(
            "spec.trainer.checkpoint",
            kept(field),
            f"trainer.checkpoint.{field} is immutable: the checkpoints lie there; {ANEW}, after copying them if they are needed",
        )
        for field in ("claimName", "volumeClaimTemplate")
    ),
    Cel(
        "spec.rollout.environment",
        "self == oldSelf",
        f"rollout.environment is immutable: rewards of two tasks cannot be compared; {ANEW}",
    ),
    Cel(
        "spec.rollout.dataset",
        "self == oldSelf",
        f"rollout.dataset is immutable: the saved cursor counts its prompts; {ANEW}",
    ),
    Cel(
        "spec",
        kept("orchestrator", "volume"),
        f"orchestrator.volume is immutable: the recorded decisions of syncs lie there; {ANEW}",
    ),
)
