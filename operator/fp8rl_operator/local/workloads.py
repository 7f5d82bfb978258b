"""StatefulSets and Deployments as a pure function: which pods to create, which to end."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fp8rl_operator.local.volumes import Object

REVISION_LABEL = "pod-template-hash"
WORKLOADS = ("StatefulSet", "Deployment")


@dataclass(frozen=True)
class Existing:
    """A pod that exists, also while it terminates."""

    name: str
    uid: str
    owner: str
    revision: str
    terminating: bool = False


@dataclass
class Change:
    """Pods to create (whole objects) and uids of pods to end."""

    create: list[Object] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


def owner_key(workload: Object) -> str:
    """`Kind/name` of a workload."""
    return f"{workload['kind']}/{workload['metadata']['name']}"


def revision(workload: Object) -> str:
    """Hash of the pod template, 10 characters."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def compute_change(workloads: Iterable[Object], pods: Iterable[Existing], new_uid: Callable[[], str]) -> Change:
    """One step of all workload controllers.

    A StatefulSet (Parallel) recreates an ordinal once its old pod is gone; with `updateStrategy: OnDelete` it leaves pods
    of an old revision alone. A Deployment ends pods of an old revision at once and, with maxSurge 0, never has more
    pods than replicas, the terminating ones included. Pods of workloads that are gone are ended.
    """
    change = Change()
    all_pods = list(pods)
    by_owner = {owner_key(workload): workload for workload in workloads}
    change.end += [pod.uid for pod in all_pods if pod.owner not in by_owner and not pod.terminating]
    for key, workload in by_owner.items():
        mine = [pod for pod in all_pods if pod.owner == key]
        step = stateful_set if workload["kind"] == "StatefulSet" else deployment
        step(workload, mine, new_uid, change)
    return change


def stateful_set(workload: Object, pods: list[Existing], new_uid: Callable[[], str], change: Change) -> None:
    """Add a StatefulSet's step to `change`."""
    name, spec = workload["metadata"]["name"], workload["spec"]
    wanted = {f"{name}-{ordinal}": ordinal for ordinal in range(spec.get("replicas", 1))}
    rolling = spec.get("updateStrategy", {}).get("type", "RollingUpdate") == "RollingUpdate"
    current = revision(workload)
    for pod in pods:
        outdated = rolling and pod.revision != current
        if (pod.name not in wanted or outdated) and not pod.terminating:
            change.end.append(pod.uid)
    there = {pod.name for pod in pods}
    change.create += [make_pod(workload, pod_name, new_uid()) for pod_name in wanted if pod_name not in there]


def deployment(workload: Object, pods: list[Existing], new_uid: Callable[[], str], change: Change) -> None:
    """Add a Deployment's step to `change`."""
    replicas, current = workload["spec"].get("replicas", 1), revision(workload)
    kept = [pod for pod in pods if pod.revision == current and not pod.terminating]
    change.end += [pod.uid for pod in pods if pod.revision != current and not pod.terminating]
    change.end += [pod.uid for pod in kept[replicas:]]
    for _ in range(replicas - len(pods)):
        uid = new_uid()
        change.create.append(make_pod(workload, f"{workload['metadata']['name']}-{current}-{uid[:5]}", uid))


def make_pod(workload: Object, name: str, uid: str) -> Object:
    """A pod of a workload, with its claims as volumes."""
    template = copy.deepcopy(workload["spec"]["template"])
    metadata = template.setdefault("metadata", {}) | {"name": name, "uid": uid}
    metadata["namespace"] = workload["metadata"].get("namespace", "default")
    metadata["labels"] = metadata.get("labels", {}) | {REVISION_LABEL: revision(workload)}
    metadata["ownerReferences"] = [
        {"kind": workload["kind"], "name": workload["metadata"]["name"], "apiVersion": workload["apiVersion"]}
    ]
    spec = template["spec"]
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        source = {"claimName": f"{claim['metadata']['name']}-{name}"}
        spec.setdefault("volumes", []).append({"name": claim["metadata"]["name"], "persistentVolumeClaim": source})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
