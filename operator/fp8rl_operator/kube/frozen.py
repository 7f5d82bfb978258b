"""Templates of a running job are frozen: another release of the operator, or other image settings, never change them. Pure.

A workload or a ConfigMap carries the revision of the spec that it was made from (`manifests`) and the digest of what the release made of
it. The same revision with another digest was made by another release: what is there stays, but for what the plan decides.
"""

from __future__ import annotations

from typing import Any, Final

from fp8rl_operator import names
from fp8rl_operator.kube.compare import digest
from fp8rl_operator.kube.kinds import DEPLOYMENT, WORKLOADS, Object

CONFIG_MAP: Final = "ConfigMap"


def frozen(desired: Object, live: Object | None) -> Object:
    """The desired object with the digest of its content, and with the live content where another release made that."""
    mine = annotations_of(desired)
    if names.ANNOTATION_REVISION not in mine:
        return desired
    built = digest(content(desired))
    theirs = {} if live is None else annotations_of(live)
    same_spec = theirs.get(names.ANNOTATION_REVISION) == mine[names.ANNOTATION_REVISION]
    made = theirs.get(names.ANNOTATION_BUILT)
    if live is None or not same_spec or made in {None, built}:
        return annotated(desired, built)
    return annotated(kept(desired, live), str(made))


def annotations_of(body: Object) -> dict[str, str]:
    """Annotations of an object."""
    return dict(body["metadata"].get("annotations") or {})


def annotated(body: Object, built: str) -> Object:
    """The object with the digest of its content."""
    meta = {**body["metadata"], "annotations": annotations_of(body) | {names.ANNOTATION_BUILT: built}}
    return {**body, "metadata": meta}


def content(body: Object) -> Any:
    """What a release makes of a spec: without what the plan decides."""
    if body["kind"] == CONFIG_MAP:
        return body["data"]
    template = body["spec"]["template"]
    meta = template["metadata"]
    notes = without(meta.get("annotations", {}), names.ANNOTATION_ATTEMPT)
    pods = {**template, "metadata": {**meta, "annotations": notes}, "spec": without(template["spec"], "affinity")}
    return {**without(body["spec"], "replicas"), "template": pods}


def without(values: Object, key: str) -> Object:
    """A map but for one key."""
    return {name: value for name, value in values.items() if name != key}


def kept(desired: Object, live: Object) -> Object:
    """The desired object with the live one's content; replicas, attempt and affinity are the plan's.

    A Deployment's pods go when its template changes: the affinity waits for the next attempt.
    """
    if desired["kind"] not in WORKLOADS:
        return {**desired, "data": live.get("data", {})}
    spec = without_none(live["spec"])
    wanted = desired["spec"]["template"]
    template = spec["template"]
    attempt = wanted["metadata"]["annotations"][names.ANNOTATION_ATTEMPT]
    old = template["metadata"].setdefault("annotations", {})
    if desired["kind"] != DEPLOYMENT.kind or old.get(names.ANNOTATION_ATTEMPT) != attempt:
        template["spec"].pop("affinity", None)
        template["spec"] |= {key: wanted["spec"][key] for key in ("affinity",) if key in wanted["spec"]}
    old[names.ANNOTATION_ATTEMPT] = attempt
    return {**desired, "spec": spec | {"replicas": desired["spec"]["replicas"]}}


def without_none(value: Any) -> Any:
    """A copy without keys that are None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
