"""API objects as the operator reads them. Pure."""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from fp8rl_operator import names
from fp8rl_operator.kube.kinds import Object
from fp8rl_operator.observed import PodPhase, PodState, Refusal

# What a kubelet says of a pod that it will not admit; the pod has failed before anything of it ran.
REFUSALS: Final = frozenset(
    {
        "UnexpectedAdmissionError",
        "TopologyAffinityError",
        "NodeAffinity",
        "NodeName",
        "NodePorts",
        "NodeResourceFit",
        "TaintToleration",
        "InvalidNodeInfo",
        "PodOSNotSupported",
        "PodOSSelectorNodeLabelDoesNotMatch",
    }
)
REFUSAL_PREFIX: Final = "OutOf"
PHASES: Final = frozenset({"Pending", "Running", "Succeeded", "Failed"})
BORING: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
WORKLOADS: Final = {names.TRAINER: "StatefulSet", names.INFERENCE: "ReplicaSet", names.ORCHESTRATOR: "StatefulSet"}
MAX_ATTEMPT_DIGITS: Final = 9
KEPT_METADATA: Final = ("name", "namespace", "uid", "labels", "annotations", "ownerReferences", "deletionTimestamp")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `owner`: `<kind>/<name>` of its workload, empty for none."""

    state: PodState
    namespace: str
    owner: str
    version: int


def version(body: Object) -> int:
    """The resourceVersion as a number, to tell older from newer; 0 where it is none."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def seconds(text: str) -> float:
    """RFC 3339 to Unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def job_uid(body: Object) -> str | None:
    """Whose an object is or says that it is: by the job that controls it, else by its label."""
    owners = body["metadata"].get("ownerReferences") or []
    mine = (owner["uid"] for owner in owners if owner["kind"] == names.KIND and owner.get("controller"))
    label = (body["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID)
    return cast("str | None", next(mine, label))


def owned_by(body: Object, uid: str) -> bool:
    """Whether the object's controller is the job of this uid."""
    owners = body["metadata"].get("ownerReferences") or []
    return any(owner["uid"] == uid and owner.get("controller") for owner in owners)


def job_content(body: Object) -> Object:
    """A job without its status and without what nobody here reads."""
    meta = {key: value for key, value in body["metadata"].items() if key not in {"managedFields", "resourceVersion"}}
    if LAST_APPLIED in (meta.get("annotations") or {}):
        meta["annotations"] = {key: value for key, value in meta["annotations"].items() if key != LAST_APPLIED}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": meta, "spec": body.get("spec")}


def child_content(body: Object) -> tuple[str, Object]:
    """Kind and content of a child: what the operator sets and compares, without status and versions."""
    meta = {key: body["metadata"][key] for key in KEPT_METADATA if key in body["metadata"]}
    rest = {key: value for key, value in body.items() if key not in {"metadata", "status"}}
    return body["kind"], {**rest, "metadata": meta}


def pod(body: Object) -> Pod:
    """A pod as a pass sees it."""
    meta = body["metadata"]
    owner = next((item for item in meta.get("ownerReferences") or [] if item.get("controller")), None)
    return Pod(
        state=pod_state(body),
        namespace=sys.intern(meta["namespace"]),
        owner="" if owner is None else f"{owner['kind']}/{owner['name']}",
        version=version(body),
    )


def belongs(pod: Pod, namespace: str, job: str) -> bool:
    """Whether a pod is a job's: of its namespace, and controlled by the job's own workload for the role that it says to have."""
    kind, _, name = pod.owner.partition("/")
    workload = (
        name.rpartition("-")[0] if kind == "ReplicaSet" else name
    )  # a ReplicaSet adds a hash to its Deployment's name
    fits = WORKLOADS.get(pod.state.role) == kind and workload == names.child_name(job, pod.state.role)
    return fits and pod.namespace == namespace


def pod_state(body: Object) -> PodState:
    """A pod as the reconcile sees it."""
    meta, status = body["metadata"], body.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    starting = not is_true(conditions, "Initialized")
    init, main = status.get("initContainerStatuses") or [], status.get("containerStatuses") or []
    shown = init if starting else main
    exit_code, reason, message = words(status, conditions, [*init, *main] if starting else main)
    ready = is_true(conditions, "Ready")
    gone_by = meta.get("deletionTimestamp")
    return PodState(
        name=meta["name"],
        uid=meta["uid"],
        role=(meta.get("labels") or {}).get(names.LABEL_ROLE, ""),
        attempt=attempt(meta.get("annotations") or {}),
        phase=cast("PodPhase", status["phase"]) if status.get("phase") in PHASES else "Pending",
        ready=ready,
        terminating=gone_by is not None,
        starting=starting,
        ip=status.get("podIP", ""),
        restarts=sum(item.get("restartCount", 0) for item in shown),
        exit_code=exit_code,
        reason=reason,
        message=message,
        node=(body.get("spec") or {}).get("nodeName", ""),
        gone_by=None if gone_by is None else seconds(gone_by),
        unreachable=not ready
        and bool(main)
        and all(item.get("ready") for item in main)
        and not gated(body, conditions),
    )


def attempt(annotations: dict[str, str]) -> int:
    """The attempt that a pod was made for; -1, which is never wanted, where the annotation is no such number."""
    text = annotations.get(names.ANNOTATION_ATTEMPT, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_ATTEMPT_DIGITS else -1


def is_true(conditions: dict[str, Object], kind: str) -> bool:
    """Whether a condition is True."""
    return bool(conditions.get(kind, {}).get("status") == "True")


def gated(body: Object, conditions: dict[str, Object]) -> bool:
    """Whether a readiness gate of the pod is not met."""
    gates = (body.get("spec") or {}).get("readinessGates") or []
    return any(not is_true(conditions, gate["conditionType"]) for gate in gates)


def words(status: Object, conditions: dict[str, Object], containers: list[Object]) -> tuple[int | None, str, str]:
    """(exit code, reason, message) of what keeps or kept the pod from running; (None, "", "") when nothing does.

    First what ended the whole pod (Evicted, a refusal), then a container that ended, then one that waits, then the scheduler.
    """
    ended = next((end for item in containers if (end := last_end(item)) is not None), None)
    waiting = next((wait for item in containers if (wait := waits(item)) is not None), {})
    code = None if ended is None else int(ended["exitCode"])
    if status.get("reason"):
        return code, status["reason"], status.get("message", "")
    if ended is not None:
        looping = waiting.get("reason", "") if ended.get("reason", "Error") == "Error" else ""
        return code, looping or ended.get("reason", ""), ended.get("message") or waiting.get("message", "")
    if waiting:
        return None, waiting["reason"], waiting.get("message", "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return None, scheduled.get("reason", ""), scheduled.get("message", "")
    return None, "", ""


def last_end(container: Object) -> Object | None:
    """How a container ended last, if it ended badly: as it is, else before it was started again."""
    for key in ("state", "lastState"):
        end: Any = (container.get(key) or {}).get("terminated")
        if end is not None:
            return cast("Object", end) if end["exitCode"] else None
    return None


def waits(container: Object) -> Object | None:
    """Why a container waits, if it is worth telling."""
    waiting: Any = (container.get("state") or {}).get("waiting")
    return cast("Object", waiting) if waiting is not None and waiting.get("reason", "") not in BORING else None


def refusal(state: PodState) -> Refusal | None:
    """The kubelet's refusal, if the pod is one that a node did not admit."""
    refused = state.phase == "Failed" and (state.reason in REFUSALS or state.reason.startswith(REFUSAL_PREFIX))
    return Refusal(state.uid, state.role, state.node, state.reason, state.message) if refused else None


def secret_value(body: Object, key: str) -> str | None:
    """A value of a Secret as text; None where it is not there or no text."""
    try:
        return base64.b64decode((body.get("data") or {})[key], validate=True).decode() or None
    except (KeyError, ValueError, TypeError):
        return None
