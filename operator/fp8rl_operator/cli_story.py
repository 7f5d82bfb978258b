"""What a job's object tells a person: the same words for a job in a cluster and for a run folder. Pure, over the object as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fp8rl_operator import names

Body = Mapping[str, Any]
LABEL_WIDTH = 16


def story(body: Body, now: float) -> list[str]:
    """State, progress, figures and what is waited for, a line each; then the conditions. `now` in Unix seconds."""
    status, spec = body.get("status") or {}, body.get("spec") or {}
    rows = [*progress_rows(status, spec, body["metadata"], now), *trouble_rows(status, spec)]
    lines = [f"{body['metadata']['name']}: {state(status)}"]
    lines += [f"  {label:<{LABEL_WIDTH}}{text}" for label, text in rows if text]
    conditions = [condition_line(item) for item in status.get("conditions", [])]
    return [*lines, "", *conditions] if conditions else lines


def state(status: Body) -> str:
    """The job's state in a word or two, from its conditions."""
    true = {item["type"]: item for item in status.get("conditions", []) if item["status"] == "True"}
    for kind in (names.COMPLETE, names.FAILED, names.SUSPENDED, names.STALLED):
        if kind in true:
            return f"{kind} ({true[kind]['reason']})"
    if names.READY in true:
        return "Running"
    ready = ready_of(status)
    return f"Waiting ({ready['reason']})" if ready is not None else "no operator has seen it yet"


def ready_of(status: Body) -> Body | None:
    """The condition Ready."""
    return next((item for item in status.get("conditions", []) if item["type"] == names.READY), None)


def progress_rows(status: Body, spec: Body, metadata: Body, now: float) -> list[tuple[str, str]]:
    """How far it is, and the newest step's figures."""
    reward, off_policy = status.get("reward", {}), status.get("offPolicy", {})
    steps = spec.get("rollout", {}).get("steps")
    limit = spec.get("rollout", {}).get("maxOffPolicySteps")
    bound = "" if limit is None else f" (limit {limit})"
    held_out = f", held out {reward['heldOut']}" if "heldOut" in reward else ""
    ages = f"mean {off_policy.get('mean', '-')}, oldest {off_policy.get('max', 0)} steps{bound}, {off_policy.get('dropped', 0)} dropped"
    return [
        ("step", f"{status.get('step', 0)} of {steps}" if steps is not None else str(status.get("step", 0))),
        ("version", str(status.get("version", 0))),
        ("engines ready", engines(status)),
        ("reward", f"{reward.get('mean', '-')}{held_out}" if reward else ""),
        ("mismatch KL", str(status.get("mismatch", {}).get("kl", ""))),
        ("sample age", ages if off_policy.get("mean") is not None else ""),
        ("precision", precision(status)),
        ("age", age(metadata.get("creationTimestamp"), now)),
        ("attempt", attempts(status)),
    ]


def trouble_rows(status: Body, spec: Body) -> list[tuple[str, str]]:
    """What is waited for, and what went wrong."""
    ready, failure = ready_of(status), status.get("lastFailure")
    waits = ready["message"] if ready is not None and ready["status"] != "True" else ""
    ended = state(status).startswith((names.COMPLETE, names.FAILED))
    rows = [("why" if ended else "waiting for", one_line(waits))]
    if failure is not None:
        rows.append(
            ("last failure", one_line(f"{failure['reason']} at {failure['time']}: {failure.get('message', '')}"))
        )
    for node in status.get("nodes", []):
        kept_off = "node excluded" if node.get("excluded") else "node refused"
        text = f"{node['name']}: {node['reason']} {node.get('refusals', 0)} times: {node.get('message', '')}"
        rows.append((kept_off, one_line(text)))
    if spec.get("managedBy", names.MANAGED_BY) != names.MANAGED_BY:
        rows.append(("managed by", str(spec["managedBy"])))
    return rows


def engines(status: Body) -> str:
    """Ready engines of those wanted."""
    pool = status.get("inference")
    return "" if pool is None else f"{pool.get('ready', 0)} of {pool.get('desired', 0)}"


def precision(status: Body) -> str:
    """What auto became."""
    found = status.get("precision")
    if found is None:
        return ""
    return f"recipe {found['recipe']}, wire {found['wire']}, {found.get('quantizedLayers', 0)} layers quantized"


def attempts(status: Body) -> str:
    """The trainer's starts, and what failures have cost."""
    restarts = status.get("restarts", 0)
    return f"{status.get('attempt', 0)}, {restarts} restart{'' if restarts == 1 else 's'}"


def age(created: str | None, now: float) -> str:
    """Time since an RFC 3339 stamp, in the largest two units."""
    if created is None:
        return ""
    seconds = max(0, int(now - datetime.fromisoformat(created).astimezone(UTC).timestamp()))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours}h"
    return f"{hours}h{minutes}m" if hours else f"{minutes}m{seconds % 60}s"


def condition_line(item: Body) -> str:
    """One condition."""
    message = item.get("message", "")
    return f"{item['type']:<22} {item['status']:<8} {item['reason']}{f': {one_line(message)}' if message else ''}"


def one_line(text: str) -> str:
    """A text without line breaks."""
    return " ".join(text.split())
