"""The little that starting a cluster asks its apiserver and its etcd."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from testcluster.layout import API_PORT, ETCD_PORT, Cluster


def get(cluster: Cluster, path: str) -> Any:
    """Body of a path of the apiserver, asked as the administrator: JSON, or text where it is none; None: no answer."""
    context = ssl.create_default_context(cafile=str(cluster.pki / "ca.crt"))
    context.load_cert_chain(cluster.pki / "admin.crt", cluster.pki / "admin.key")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"https://{cluster.api_address}:{API_PORT}{path}", timeout=5) as answer:
            body = answer.read().decode()
            return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def node_ready(cluster: Cluster, name: str) -> bool:
    """Whether a node says Ready."""
    node = get(cluster, f"/api/v1/nodes/{name}") or {}
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def etcd(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    """Answer of etcd's JSON gateway; None: no answer."""
    url = f"http://{cluster.address}:{ETCD_PORT}/{path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, json.dumps(body).encode()), timeout=5) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def compact(cluster: Cluster) -> int:
    """Lets etcd forget every revision before the present one, which is returned."""
    revision = int(etcd(cluster, "v3/kv/range", {"key": "AA=="})["header"]["revision"])
    etcd(cluster, "v3/kv/compaction", {"revision": str(revision), "physical": True})
    return revision
