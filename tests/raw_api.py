"""An API server spoken to over one kept connection, request by request: fast enough for thousands of dry runs."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

DRY = "dryRun=All&fieldValidation=Strict"
PLURALS = {
    "Secret": ("api/v1", "secrets"),
    "Service": ("api/v1", "services"),
    "ConfigMap": ("api/v1", "configmaps"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "StatefulSet": ("apis/apps/v1", "statefulsets"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "FP8RLJob": ("apis/fp8rl.dev/v1alpha1", "fp8rljobs"),
}


class RawApi:
    """Requests with the client certificate of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=_file(kubeconfig, cluster, "certificate-authority"))
        certificate = _file(kubeconfig, user, "client-certificate")
        context.load_cert_chain(certificate, _file(kubeconfig, user, "client-key"))
        url = urlsplit(cluster["server"])
        self.connection = http.client.HTTPSConnection(url.hostname or "", url.port or 443, context=context, timeout=60)

    def request(self, verb: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        """(HTTP status, the answer's JSON)."""
        text = None if body is None else json.dumps(body)
        self.connection.request(verb, path, text, {"Content-Type": kind, "Accept": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def create(self, job: dict[str, Any], namespace: str, flags: str = DRY) -> tuple[int, Any]:
        """Create a job; a dry run unless `flags` say else."""
        return self.request("POST", f"/apis/fp8rl.dev/v1alpha1/namespaces/{namespace}/fp8rljobs?{flags}", job)

    def apply(self, item: dict[str, Any], namespace: str, flags: str = DRY) -> tuple[int, Any]:
        """Server-side apply of an object; a dry run unless `flags` say else."""
        group, plural = PLURALS[item["kind"]]
        path = f"/{group}/namespaces/{namespace}/{plural}/{item['metadata']['name']}"
        query = f"fieldManager=fp8rl-operator&force=true&{flags}"
        return self.request("PATCH", f"{path}?{query}", item, "application/apply-patch+yaml")


def _file(kubeconfig: Path, entry: dict[str, Any], name: str) -> str:
    """A file of the kubeconfig, or what stands in it written to one."""
    if name in entry:
        return str(kubeconfig.parent / entry[name])
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(base64.b64decode(entry[f"{name}-data"]))
    return file.name
