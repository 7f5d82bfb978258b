"""Objects that belong to no single role: token, account, disruption budgets, network policy."""

from __future__ import annotations

import base64

from fp8rl_operator import names
from fp8rl_operator.manifests.meta import CONTROL_SECRET, TOKEN_KEY, WORKERS, Object, metadata, selector
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob

CONTROL = "control"
OPERATOR_LABEL = {names.LABEL_NAME: names.FIELD_MANAGER}
PROMETHEUS_LABEL = {names.LABEL_NAME: "prometheus"}


def secret(job: FP8RLJob, token: str) -> Object:
    """The control token of the job's processes."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, CONTROL_SECRET),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def service_account(job: FP8RLJob) -> Object:
    """The pods' account: no rights, no token mounted."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, WORKERS),
        "automountServiceAccountToken": False,
    }


def disruption_budgets(job: FP8RLJob, plan: Plan) -> list[Object]:
    """Trainer and orchestrator are never evicted, the engines keep minReplicas; of a finished job all may go.

    A budget asks for no more engines than the plan wants, or it would block every eviction; pods that are not Ready may always go.
    """
    if job.spec.pod_disruption_budget == "disabled" or plan.verdict is not None:
        return []
    engines = plan.replicas(names.INFERENCE, job.spec.inference.replicas)
    limits: dict[str, Object] = {
        names.TRAINER: {"maxUnavailable": 0},
        names.ORCHESTRATOR: {"maxUnavailable": 0},
        names.INFERENCE: {"minAvailable": min(job.spec.inference.min_replicas, engines)},
    }
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, role),
            "spec": {
                **limit,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": selector(job, role)},
            },
        }
        for role, limit in limits.items()
    ]


def network_policies(job: FP8RLJob, operator_namespace: str | None) -> list[Object]:
    """The job's own pods get in everywhere, Prometheus to the HTTP ports, the operator to those of trainer and orchestrator.

    What answers on the HTTP ports beside health and metrics asks for the job's token. The store of an epoch and the transport
    between ranks know no token: this policy is their defence.
    """
    if job.spec.network_policy == "disabled":
        return []
    place = {} if operator_namespace is None else {"matchLabels": {names.LABEL_NAMESPACE: operator_namespace}}
    operator = {"namespaceSelector": place, "podSelector": {"matchLabels": OPERATOR_LABEL}}
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": PROMETHEUS_LABEL}}
    controlled = {"key": names.LABEL_COMPONENT, "operator": "In", "values": [names.TRAINER, names.ORCHESTRATOR]}
    own = {"matchLabels": selector(job)}
    return [
        network_policy(job, WORKERS, own, [{"from": [{"podSelector": own}]}, visits(prometheus)]),
        network_policy(job, CONTROL, {**own, "matchExpressions": [controlled]}, [visits(operator)]),
    ]


def visits(peer: Object) -> Object:
    """A rule that lets a peer to the port `http`."""
    return {"from": [peer], "ports": [{"port": "http", "protocol": "TCP"}]}


def network_policy(job: FP8RLJob, component: str, pods: Object, rules: list[Object]) -> Object:
    """A policy for connections to some of the job's pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, component),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules},
    }
