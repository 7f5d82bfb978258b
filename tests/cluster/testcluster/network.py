"""The network namespace of a whole cluster, kube-proxy and CoreDNS in it. Addresses 10.x exist inside it only."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from testcluster import binaries, processes
from testcluster.layout import Cluster, ClusterError

NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
SYSCTL = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
    "fs/inotify/max_user_instances": "1024",
}


def ensure(cluster: Cluster) -> Path:
    """The cluster's network namespace, made if it is not there, as a path for nsenter."""
    path = NETNS / str(cluster.netns)
    if not path.exists():
        subprocess.run(["ip", "netns", "add", path.name], check=True)
        subprocess.run(["nsenter", f"--net={path}", "ip", "link", "set", "lo", "up"], check=True)
    return path


def enter(cluster: Cluster) -> None:
    """Lets this thread, and what it starts, live in the cluster's network namespace; does nothing if it has none.

    Unlike `ip netns exec` it leaves /sys alone, and with it the cgroups.
    """
    if cluster.netns is None:
        return
    with ensure(cluster).open("rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise ClusterError(f"cannot enter network namespace {cluster.netns}: {os.strerror(ctypes.get_errno())}")


def prepare(cluster: Cluster) -> None:
    """Forwarding, and the nodes' addresses."""
    for key, value in SYSCTL.items():
        if (path := Path("/proc/sys") / key).exists():
            path.write_text(value)
    told = subprocess.run(["ip", "-json", "address", "show", "lo"], check=True, capture_output=True, text=True)
    present = {entry["local"] for link in json.loads(told.stdout) for entry in link.get("addr_info", [])}
    for index in range(1, cluster.options.nodes + 1):
        if (address := cluster.node_address(index)) not in present:
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def remove(cluster: Cluster) -> None:
    """Ends the namespace; with it go its bridges, rules and addresses."""
    if cluster.netns is not None and (NETNS / cluster.netns).exists():
        subprocess.run(["ip", "netns", "delete", cluster.netns], check=True)


def _proxy(cluster: Cluster) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{cluster.pki}/kube-proxy.kubeconfig"},
        "mode": "nftables",
        "clusterCIDR": "10.244.0.0/16",
        "hostnameOverride": "node1",
        "bindAddress": cluster.node_address(1),
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": ["primary"],
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _corefile(cluster: Cluster) -> str:
    return f"""\
.:53 {{
  bind {cluster.node_address(1)}
  errors
  health 127.0.0.1:8053
  ready 127.0.0.1:8054
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {cluster.pki}/coredns.kubeconfig
    pods insecure
    fallthrough in-addr.arpa ip6.arpa
    ttl 1
  }}
  cache 1
}}
"""


def start_services(cluster: Cluster) -> None:
    """CoreDNS and kube-proxy."""
    corefile, proxy = cluster.run / "Corefile", cluster.run / "kube-proxy.json"
    corefile.write_text(_corefile(cluster))
    proxy.write_text(json.dumps(_proxy(cluster), indent=1))
    processes.start(cluster, "coredns", [str(binaries.folder() / "coredns"), "-conf", str(corefile)])
    processes.start(cluster, "kube-proxy", [str(binaries.folder() / "kube-proxy"), f"--config={proxy}"])
