"""A certificate authority of the cluster, certificates (CN and O are what RBAC sees) and kubeconfigs. About one second."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from testcluster.layout import API_PORT, SERVICE_IP, Cluster

DAYS = "365"
CONTROL_PLANE = ("kube-controller-manager", "kube-scheduler", "kube-proxy")


def openssl(*arguments: str) -> None:
    """Runs openssl; its words go into the error."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True)


def make(cluster: Cluster) -> None:
    """Makes what is not there yet."""
    cluster.pki.mkdir(parents=True, exist_ok=True)
    cluster.pki.chmod(0o700)
    _authority(cluster.pki)
    hosts = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    hosts.append("kubernetes.default.svc.cluster.local")
    addresses = {"127.0.0.1", cluster.api_address, SERVICE_IP}
    names = [f"DNS:{host}" for host in hosts] + [f"IP:{address}" for address in sorted(addresses)]
    _certificate(cluster.pki, "apiserver", "/CN=kube-apiserver", names)
    _certificate(cluster.pki, "apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    client(cluster, "admin", "/O=system:masters/CN=admin")
    client(cluster, "coredns", "/O=system:masters/CN=coredns")
    for name in CONTROL_PLANE:
        client(cluster, name, f"/CN=system:{name}")
    for index in range(1, cluster.options.nodes + 1):
        node = f"node{index}"
        client(cluster, node, f"/O=system:nodes/CN=system:node:{node}")
        own = [f"DNS:{node}", "IP:127.0.0.1", f"IP:{cluster.node_address(index)}"]
        _certificate(cluster.pki, f"{node}-server", f"/CN={node}", own)


def client(cluster: Cluster, name: str, subject: str) -> Path:
    """A kubeconfig for `subject` (`/O=group/CN=user`)."""
    _certificate(cluster.pki, name, subject)
    path = cluster.pki / f"{name}.kubeconfig"
    if not path.exists():
        server = f"https://{cluster.api_address}:{API_PORT}"
        files = {"client-certificate": f"{cluster.pki}/{name}.crt", "client-key": f"{cluster.pki}/{name}.key"}
        authority = str(cluster.pki / "ca.crt")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": authority}}],
            "users": [{"name": name, "user": files}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config, indent=1))
    return path


def _key(path: Path) -> None:
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))


def _authority(folder: Path) -> None:
    if (folder / "service-accounts.pub").exists():
        return
    _key(folder / "ca.key")
    extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"]
    flags = [flag for extension in extensions for flag in ("-addext", extension)]
    request = ["req", "-x509", "-new", "-sha256", "-days", DAYS, "-subj", "/CN=fp8rl-test-cluster"]
    openssl(*request, "-key", str(folder / "ca.key"), "-out", str(folder / "ca.crt"), *flags)
    _key(folder / "service-accounts.key")
    public = ["-pubout", "-out", str(folder / "service-accounts.pub")]
    openssl("ec", "-in", str(folder / "service-accounts.key"), *public)


def _certificate(folder: Path, name: str, subject: str, hosts: list[str] | None = None) -> None:
    """A certificate of a server at `hosts`, or of a client when there are none."""
    target, key = folder / f"{name}.crt", folder / f"{name}.key"
    if target.exists():
        return
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    _key(key)
    openssl("req", "-new", "-key", str(key), "-subj", subject, "-out", str(request))
    lines = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature,keyEncipherment"]
    lines.append(f"extendedKeyUsage={'serverAuth' if hosts else 'clientAuth'}")
    extensions.write_text("\n".join(lines + ([f"subjectAltName={','.join(hosts)}"] if hosts else [])) + "\n")
    authority = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial"]
    sign = ["x509", "-req", "-sha256", "-days", DAYS, "-in", str(request), "-extfile", str(extensions)]
    openssl(*sign, *authority, "-out", str(target))
    request.unlink()
    extensions.unlink()
