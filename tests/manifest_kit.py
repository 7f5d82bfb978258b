"""The objects of a job by name and by role, for tests."""

from __future__ import annotations

from typing import Any

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob

PLAN = Plan(attempt=2, fleet_attempt=1, restarts=1, attempt_time=0.0, running=True)


def built(job: FP8RLJob, plan: Plan = PLAN) -> dict[str, dict[str, Any]]:
    """Objects by `Kind/name`."""
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in build_objects(job, plan, "secret-token")}


def workloads(job: FP8RLJob, plan: Plan = PLAN) -> dict[str, dict[str, Any]]:
    """StatefulSets and the Deployment by role."""
    return {
        item["metadata"]["labels"]["fp8rl.dev/role"]: item
        for item in build_objects(job, plan, "secret-token")
        if item["kind"] in {"StatefulSet", "Deployment"}
    }


def main_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The main container."""
    return next(item for item in workload["spec"]["template"]["spec"]["containers"] if item["name"] == "main")


def selectors(value: Any) -> list[dict[str, str]]:
    """Every selector in an object: matchLabels, and a Service's plain one."""
    found: list[dict[str, str]] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "matchLabels" or (key == "selector" and "matchLabels" not in item):
                found.append(item)
            else:
                found += selectors(item)
    elif isinstance(value, list):
        for item in value:
            found += selectors(item)
    return found
