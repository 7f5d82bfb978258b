"""Objects of the API server as tests put them into a store."""

from __future__ import annotations

from typing import Any

from fp8rl_operator import names

STAMP = "2026-11-30T12:00:00Z"


def pod(status: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {names.LABEL_ROLE: "trainer", names.LABEL_JOB_UID: "u"}
    meta = {
        "name": "job-trainer-0",
        "namespace": "team",
        "uid": "p",
        "resourceVersion": "7",
        "creationTimestamp": STAMP,
        "labels": labels,
        "annotations": {names.ANNOTATION_ATTEMPT: "2"},
        "ownerReferences": [{"kind": "StatefulSet", "name": "job-trainer", "uid": "s", "controller": True}],
    }
    return {"kind": "Pod", "metadata": {**meta, **metadata}, "spec": spec or {"nodeName": "n1"}, "status": status or {}}
