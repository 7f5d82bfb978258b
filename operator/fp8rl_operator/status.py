"""The job's status, as a pure function; None means that nothing is worth a write.

Conditions and counters are written at once, progress and the words of conditions at most every `PROGRESS_SECONDS`. Decimals are strings, as the
API has no floats. What the plan must remember (`plan_memory`) stands here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan_memory import from_time, to_time
from fp8rl_operator.plan_types import Outcome, Plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.status_conditions import conditions
from fp8rl_operator.status_invalid import invalid_message, invalid_status
from fp8rl_operator.status_memory import remembered, roles
from fp8rl_workers.protocol import MemberStatus, OrchestratorStatus, ResolvedPrecision

__all__ = ["invalid_message", "invalid_status", "next_status"]

PROGRESS_SECONDS = 15.0
MAX_LAYERS = 4096
MAX_LAYER_LENGTH = 512
PROGRESS_FIELDS = (
    "progressTime",
    "step",
    "version",
    "weightSyncGroup",
    "mismatch",
    "offPolicy",
    "reward",
    "lastStepTime",
)

NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)")

Status = dict[str, Any]


def next_status(job: FP8RLJob, seen: Observed, plan: Plan, now: float, outcome: Outcome | None = None) -> Status | None:
    """The status that follows from this pass, None if there is nothing to write. `now` in Unix seconds.

    `outcome`: what the apply did, where it came before.
    """
    if plan.hands_off:
        return None
    old = job.status
    new = remembered(job, plan, now) | progress(old, seen, plan)
    new |= roles(job, seen, plan, advanced=new.get("step", 0) > old.get("step", 0))
    new["observedGeneration"] = job.metadata.generation
    new["conditions"] = conditions(job, seen, plan, now, outcome or Outcome())
    recent = 0.0 <= now - (to_time(old.get("progressTime")) or 0.0) < PROGRESS_SECONDS
    if firm(new) == firm(old) and (new == old or recent):
        return None
    return new | {"progressTime": from_time(now)}


def firm(status: Status) -> Status:
    """What is written at once: all but progress and the words of conditions."""
    kept = {key: value for key, value in status.items() if key not in {*PROGRESS_FIELDS, "conditions"}}
    kept["conditions"] = [(item["type"], item["status"], item["reason"]) for item in status.get("conditions", [])]
    return kept


def progress(old: Status, seen: Observed, plan: Plan) -> Status:
    """What orchestrator and trainer report; nothing when they are silent or of an old attempt."""
    status = seen.orchestrator
    if status is None or status.attempt != plan.attempt:
        return {}
    tells = status.phase in {"running", "complete"}  # at its start it does not know yet what the trainer resumed at
    found: Status = {
        "step": status.step if tells else max(status.step, old.get("step", 0)),
        "version": max(status.version, old.get("version", 0)),
        "weightSyncGroup": group(status),
        "mismatch": decimals(status.mismatch, same("kl", "logprobDiffP99", "maskedRatio")),
        "offPolicy": decimals(status.off_policy, same("mean")) | counts(status.off_policy, ("max", "dropped")),
    }
    if reward := decimals(status.progress, {"reward": "mean", "reward_heldout": "heldOut"}):
        found["reward"] = reward
    if status.last_step_time:
        found["lastStepTime"] = from_time(status.last_step_time)
    resolved = status.resolved or (seen.trainer.resolved if seen.trainer is not None else None)
    return found if resolved is None else found | {"precision": precision(resolved)}


def group(status: OrchestratorStatus) -> Status:
    """The weight-sync group as the orchestrator formed it."""
    wire = {} if status.resolved is None else {"wire": status.resolved.wire}
    return {
        "epoch": status.epoch,
        **wire,
        "worldSize": status.world_size,
        "members": [member(item) for item in status.members],
    }


def member(item: MemberStatus) -> Status:
    """One member of the group."""
    version = {} if item.version is None else {"version": item.version}
    transport = {"transport": item.transport} if item.transport else {}
    return {
        "pod": item.pod,
        "role": item.role,
        "ranks": list(item.ranks),
        **transport,
        **version,
        "state": item.state,
    }


def precision(resolved: ResolvedPrecision) -> Status:
    """What `auto` became."""
    return {
        "recipe": resolved.recipe,
        "wire": resolved.wire,
        "scaleFormat": resolved.scale_format,
        "quantizeAt": resolved.quantize_at,
        "quantizedLayers": len(resolved.quantized_layers),
        "ignoredLayers": layers(resolved.ignored_layers),
    }


def layers(reasons: Mapping[str, str]) -> list[str]:
    """Ignored layers with their reasons, those that differ in numbers only as one; as long as the API allows.

    `reasons`: module name to reason. A mixture of experts has tens of thousands of modules.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in sorted(reasons.items()):
        alike.setdefault((NUMBERED.sub("*", name), reason), []).append(name)
    lines = [
        f"{name if len(same) > 1 else same[0]}: {reason}"[: MAX_LAYER_LENGTH - 20]
        + (f" ({len(same)} layers)" if len(same) > 1 else "")
        for (name, reason), same in alike.items()
    ]
    if len(lines) <= MAX_LAYERS:
        return lines
    return [*lines[: MAX_LAYERS - 1], f"and {len(lines) - MAX_LAYERS + 1} more"]


def same(*keys: str) -> dict[str, str]:
    """Figures that status calls what the orchestrator calls them."""
    return {key: key for key in keys}


def decimals(values: Mapping[str, float], keys: Mapping[str, str]) -> Status:
    """Finite floats as decimal strings, those that are there. `keys`: name of the figure to its name in status."""
    found = {told: values[key] for key, told in keys.items() if key in values}
    return {told: repr(float(f"{value:.6g}")) for told, value in found.items() if math.isfinite(value)}


def counts(values: dict[str, float], keys: tuple[str, ...]) -> Status:
    """Whole numbers, those that are there."""
    return {key: int(values[key]) for key in keys if key in values}
