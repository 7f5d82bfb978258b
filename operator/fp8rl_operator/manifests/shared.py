"""Objects that belong to no single role: token, account, disruption budgets, network policy."""

from __future__ import annotations

import base64

from fp8rl_operator import names
from fp8rl_operator.manifests.meta import CONTROL_SECRET, TOKEN_KEY, WORKERS, Object, metadata, selector
from fp8rl_operator.spec import FP8RLJob

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


def disruption_budgets(job: FP8RLJob) -> list[Object]:
    """Trainer and orchestrator are never evicted, the engines keep minReplicas."""
    if job.spec.pod_disruption_budget == "disabled":
        return []
    limits: dict[str, Object] = {
        names.TRAINER: {"maxUnavailable": 0},
        names.ORCHESTRATOR: {"maxUnavailable": 0},
        names.INFERENCE: {"minAvailable": job.spec.inference.min_replicas},
    }
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, role),
            "spec": {**limit, "selector": {"matchLabels": selector(job, role)}},
        }
        for role, limit in limits.items()
    ]


def network_policies(job: FP8RLJob) -> list[Object]:
    """The job's own pods get in everywhere; the operator and Prometheus only where a bearer token or nothing secret is asked for.

    The store of an epoch and the transport between ranks know no token: this policy is their defence.
    """
    if job.spec.network_policy == "disabled":
        return []
    own = {"from": [{"podSelector": {"matchLabels": selector(job)}}]}
    visitors = {
        "from": [
            {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABEL}},
            {"namespaceSelector": {}, "podSelector": {"matchLabels": PROMETHEUS_LABEL}},
        ],
        "ports": [{"port": "http", "protocol": "TCP"}],
    }
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(job, WORKERS),
            "spec": {
                "podSelector": {"matchLabels": selector(job)},
                "policyTypes": ["Ingress"],
                "ingress": [own, visitors],
            },
        }
    ]
