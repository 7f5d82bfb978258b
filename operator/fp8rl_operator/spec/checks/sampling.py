"""Rollouts, sequence lengths and limits."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob


def batches_are_whole_groups(job: FP8RLJob) -> Iterator[Fault]:
    """Advantages are relative to a group, so a batch holds whole groups."""
    rollout = job.spec.rollout
    rest = rollout.batch_size % rollout.group_size
    if rest:
        below, above = rollout.batch_size - rest, rollout.batch_size - rest + rollout.group_size
        near = f"{above}" if below == 0 else f"{below} or {above}"
        yield Fault(
            "spec.rollout.batchSize",
            rollout.batch_size,
            f"is no multiple of groupSize {rollout.group_size}: {rollout.batch_size} = {rollout.batch_size // rollout.group_size}"
            f" x {rollout.group_size} + {rest}",
            f"use {near}",
        )


def completions_leave_room_for_a_prompt(job: FP8RLJob) -> Iterator[Fault]:
    """A sequence has room for a prompt: maxTokens is below maxModelLen. The longest prompt is known only at run time."""
    length, completion = job.spec.model.max_model_len, job.spec.rollout.max_tokens
    if length is not None and completion >= length:
        yield Fault(
            "spec.rollout.maxTokens",
            completion,
            f"leaves {length - completion} tokens of spec.model.maxModelLen {length} for a prompt",
            f"set maxTokens below {length}, raise maxModelLen, or leave maxModelLen unset (longest prompt + maxTokens)",
        )


def prompts_have_one_origin(job: FP8RLJob) -> Iterator[Fault]:
    """At most one of volume, hub, builtin; a volume is at most one of claimName, hostPath."""
    dataset = job.spec.rollout.dataset
    given = [name for name in ("volume", "hub", "builtin") if getattr(dataset, name) is not None]
    if len(given) > 1:
        yield Fault(
            "spec.rollout.dataset",
            ", ".join(given),
            f"has {len(given)} origins of prompts",
            "keep one of volume, hub, builtin",
        )
    volume = dataset.volume
    if volume is not None and volume.claim_name is not None and volume.host_path is not None:
        yield Fault(
            "spec.rollout.dataset.volume",
            f"claimName {volume.claim_name}, hostPath {volume.host_path}",
            "is in two places",
            "keep one of claimName, hostPath",
        )


def limits_warn_before_they_stop(job: FP8RLJob) -> Iterator[Fault]:
    """mismatchKL.warn is at most mismatchKL.stop."""
    limit = job.spec.limits.mismatch_kl
    if limit.stop is not None and limit.warn > limit.stop:
        yield Fault(
            "spec.limits.mismatchKL.stop",
            limit.stop,
            f"is below warn {limit.warn}: the job would end before it warns",
            f"set stop to {limit.warn} or more, or lower warn",
        )


AT = "spec.rollout"

CHECKS = (
    Check(
        batches_are_whole_groups,
        reads=("spec.rollout.batchSize", "spec.rollout.groupSize"),
        cel=(
            Cel(
                AT,
                "self.batchSize % self.groupSize == 0",
                "batchSize must be a multiple of groupSize",
                filled="batchSize %d is no multiple of groupSize %d: %d samples would be left over",
                values=("self.batchSize", "self.groupSize", "self.batchSize % self.groupSize"),
            ),
        ),
    ),
    Check(
        completions_leave_room_for_a_prompt,
        reads=("spec.model.maxModelLen", "spec.rollout.maxTokens"),
        cel=(
            Cel(
                "spec",
                "!has(self.model.maxModelLen) || self.rollout.maxTokens < self.model.maxModelLen",
                "rollout.maxTokens must be below model.maxModelLen",
                filled="rollout.maxTokens %d leaves no room for a prompt in model.maxModelLen %d",
                values=("self.rollout.maxTokens", "self.model.maxModelLen"),
            ),
        ),
    ),
    Check(
        prompts_have_one_origin,
        reads=("spec.rollout.dataset",),
        cel=(
            Cel(
                f"{AT}.dataset",
                "[has(self.volume), has(self.hub), has(self.builtin)].filter(x, x).size() <= 1",
                "keep one of volume, hub, builtin",
            ),
            Cel(
                f"{AT}.dataset.volume", "!has(self.claimName) || !has(self.hostPath)", "keep one of claimName, hostPath"
            ),
        ),
    ),
    Check(
        limits_warn_before_they_stop,
        reads=("spec.limits.mismatchKL",),
        cel=(
            Cel(
                "spec.limits.mismatchKL",
                "!has(self.stop) || double(self.warn) <= double(self.stop)",
                "stop must be at least warn",
                filled="stop %s is below warn %s: the job would end before it warns",
                values=("self.stop", "self.warn"),
            ),
        ),
    ),
)
