"""etcd, kube-apiserver, kube-controller-manager, kube-scheduler: their command lines and when each is ready."""

from __future__ import annotations

from pathlib import Path

from testcluster import api, binaries, processes
from testcluster.layout import (
    API_PORT,
    CONTROLLERS_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    FILES,
    SCHEDULER_PORT,
    Cluster,
)

PARTS = binaries.CONTROL_PLANE


def flags(**values: str | int) -> list[str]:
    """`a_b="c"` as `--a-b=c`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def etcd(cluster: Cluster) -> list[str]:
    clients, peers = (f"http://{cluster.address}:{port}" for port in (ETCD_PORT, ETCD_PEER_PORT))
    return flags(
        name="test",
        data_dir=str(cluster.run / "etcd"),
        listen_client_urls=clients,
        advertise_client_urls=clients,
        listen_peer_urls=peers,
        initial_advertise_peer_urls=peers,
        initial_cluster=f"test={peers}",
        unsafe_no_fsync="true",
        log_level="warn",
    )


def apiserver(cluster: Cluster) -> list[str]:
    pki, address = cluster.pki, cluster.api_address
    serving = flags(
        etcd_servers=f"http://{cluster.address}:{ETCD_PORT}",
        bind_address=address,
        advertise_address=address,
        secure_port=API_PORT,
        tls_cert_file=f"{pki}/apiserver.crt",
        tls_private_key_file=f"{pki}/apiserver.key",
        cert_dir=str(cluster.run / "apiserver"),
        service_cluster_ip_range="10.96.0.0/16",
        allow_privileged="true",
        profiling="false",
        shutdown_delay_duration="0s",
        v=1,
    )
    trust = flags(
        client_ca_file=f"{pki}/ca.crt",
        anonymous_auth="false",
        authorization_mode="Node,RBAC",
        enable_admission_plugins="NodeRestriction,OwnerReferencesPermissionEnforcement",
        service_account_issuer="https://kubernetes.default.svc.cluster.local",
        service_account_signing_key_file=f"{pki}/service-accounts.key",
        service_account_key_file=f"{pki}/service-accounts.pub",
        kubelet_client_certificate=f"{pki}/apiserver-kubelet.crt",
        kubelet_client_key=f"{pki}/apiserver-kubelet.key",
        kubelet_certificate_authority=f"{pki}/ca.crt",
        kubelet_preferred_address_types="InternalIP",
    )
    # a loopback address is no endpoint that the Service `kubernetes` may have
    alone = [] if cluster.options.nodes else flags(endpoint_reconciler_type="none")
    audit = flags(audit_policy_file=str(FILES / "audit-policy.yaml"), audit_log_path=str(cluster.audit_log))
    return serving + trust + alone + (audit if cluster.options.audit else [])


def controller_manager(cluster: Cluster) -> list[str]:
    own = flags(
        kubeconfig=str(cluster.pki / "kube-controller-manager.kubeconfig"),
        leader_elect="false",
        kube_api_qps=1000,
        kube_api_burst=2000,
        use_service_account_credentials="true",
        service_account_private_key_file=str(cluster.pki / "service-accounts.key"),
        root_ca_file=str(cluster.pki / "ca.crt"),
        allocate_node_cidrs="false",
        bind_address=cluster.address,
        secure_port=CONTROLLERS_PORT,
        cert_dir=str(cluster.run / "controllers"),
        profiling="false",
        v=1,
    )
    return own + list(cluster.options.controllers)


def scheduler(cluster: Cluster) -> list[str]:
    kubeconfig = str(cluster.pki / "kube-scheduler.kubeconfig")
    return flags(
        kubeconfig=kubeconfig,
        authentication_kubeconfig=kubeconfig,
        authorization_kubeconfig=kubeconfig,
        leader_elect="false",
        kube_api_qps=1000,
        kube_api_burst=2000,
        bind_address=cluster.address,
        secure_port=SCHEDULER_PORT,
        cert_dir=str(cluster.run / "scheduler"),
        profiling="false",
        v=1,
    )


ARGUMENTS = dict(zip(PARTS, (etcd, apiserver, controller_manager, scheduler), strict=True))


def ready(cluster: Cluster, part: str) -> bool:
    """Whether a part does its work."""
    match part:
        case "etcd":
            return api.etcd(cluster, "v3/kv/range", {"key": "AA=="}) is not None
        case "kube-apiserver":
            return api.get(cluster, "/readyz") == "ok"
        case _:
            return True


def start(cluster: Cluster, part: str) -> None:
    """Starts a part and waits until it is ready."""
    binary: Path = binaries.folder() / part
    processes.start(cluster, part, [str(binary), *ARGUMENTS[part](cluster)])
    processes.wait(cluster, f"ready {part}", lambda: ready(cluster, part), process=part)
