"""Which nodes a pod may get, and how soon it leaves one that is lost. Both are laid over the user's template, not under it."""

from __future__ import annotations

from typing import Any

from fp8rl_operator import names
from fp8rl_operator.manifests.meta import Object
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob

LOST_NODE_SECONDS = 30
"""How long a pod stays on a node that is not ready or not reachable: the API server would make it 300."""
LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def scheduling(job: FP8RLJob) -> Object:
    """Node selector, tolerations, priority: what a template may replace."""
    topology = job.spec.topology
    spec: Object = {}
    if topology.node_selector:
        spec["nodeSelector"] = dict(topology.node_selector)
    if topology.tolerations:
        spec["tolerations"] = [item.model_dump(by_alias=True, exclude_none=True) for item in topology.tolerations]
    if job.spec.priority_class_name is not None:
        spec["priorityClassName"] = job.spec.priority_class_name
    return spec


def placed(job: FP8RLJob, role: str, gpus: int, pod: Object, plan: Plan) -> Object:
    """A merged pod with the job's own conditions on nodes: each of the user's terms holds together with them."""
    expressions: list[Object] = []
    if job.spec.topology.gpu_product and gpus and names.GPU_PRODUCT_LABEL not in pod.get("nodeSelector", {}):
        expressions.append(
            {"key": names.GPU_PRODUCT_LABEL, "operator": "In", "values": list(job.spec.topology.gpu_product)}
        )
    if excluded := plan.excluded_from(role):
        expressions.append({"key": names.LABEL_HOSTNAME, "operator": "NotIn", "values": sorted(excluded)})
    chosen = pod | {"affinity": with_conditions(pod.get("affinity") or {}, expressions)} if expressions else pod
    return chosen | {"tolerations": with_lost_nodes(pod.get("tolerations") or [])}


def with_conditions(affinity: Object, expressions: list[Object]) -> Object:
    """An affinity whose every node selector term also holds `expressions`. Terms are alternatives; an empty one fits no node."""
    node = affinity.get("nodeAffinity") or {}
    required = node.get(REQUIRED) or {}
    terms = [term for term in required.get("nodeSelectorTerms") or [] if any(term.values())] or [{}]
    both = [{**term, "matchExpressions": [*(term.get("matchExpressions") or []), *expressions]} for term in terms]
    return {**affinity, "nodeAffinity": {**node, REQUIRED: {**required, "nodeSelectorTerms": both}}}


def with_lost_nodes(tolerations: list[Any]) -> list[Any]:
    """Tolerations with those of a lost node's taints, where none of the user's covers them."""
    missing = [key for key in LOST_NODE_TAINTS if not any(covers(item, key) for item in tolerations)]
    own = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
    return [*tolerations, *({"key": key, **own} for key in missing)]


def covers(toleration: Object, key: str) -> bool:
    """Whether a toleration is for NoExecute taints of this key; what it has no key for it covers as Exists."""
    return (toleration.get("key") or key) == key and toleration.get("effect") in (None, "", "NoExecute")
