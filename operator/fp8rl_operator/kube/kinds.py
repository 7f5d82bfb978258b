"""The kinds that the operator reads or writes, and their addresses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fp8rl_operator import names

Object = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind as the API server serves it. `api_version`: `v1` or `<group>/<version>`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Address of an object, of a collection without `name`; without `namespace` that of all namespaces."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        middle = f"/namespaces/{namespace}" if self.namespaced and namespace is not None else ""
        end = "".join(f"/{part}" for part in (name, subresource) if part is not None)
        return f"{root}{middle}/{self.plural}{end}"


JOB: Final = Kind(names.API_VERSION, names.KIND, names.PLURAL)
POD: Final = Kind("v1", "Pod", "pods")
EVENT: Final = Kind("v1", "Event", "events")
CLAIM: Final = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
STORAGE_CLASS: Final = Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
STATEFUL_SET: Final = Kind("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments")

WORKLOADS: Final = frozenset({STATEFUL_SET.kind, DEPLOYMENT.kind})
CHILDREN: Final = (
    Kind("v1", "Secret", "secrets"),
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "Service", "services"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    STATEFUL_SET,
    DEPLOYMENT,
)
"""What the operator makes; it watches these and pods, by the label `app.kubernetes.io/managed-by`."""

SELECTOR: Final = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
"""Label selector of all children and pods of all jobs."""

BY_NAME: Final = {kind.kind: kind for kind in (JOB, POD, EVENT, CLAIM, STORAGE_CLASS, *CHILDREN)}


def kind_of(body: Object) -> Kind:
    """The kind of an object.

    Raises:
        KeyError: it is none that the operator knows.
    """
    return BY_NAME[body["kind"]]
