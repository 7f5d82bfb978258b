"""A node: containerd, a kubelet and, if it has GPUs, their device plugin; kube-proxy and CoreDNS run once, beside node 1."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from string import Template
from typing import Any

from testcluster import binaries, hardware, processes
from testcluster.layout import FILES, Cluster, ClusterError

# the controllers of cgroup v1 that a kubelet keeps pods in
CGROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
PROCESS = re.compile(r"(containerd|kubelet|gpu-plugin)([1-9][0-9]*)")


def names(cluster: Cluster, kind: str) -> list[str]:
    """Names of a process that every node has."""
    return [f"{kind}{index}" for index in range(1, cluster.options.nodes + 1)]


def prepare(cluster: Cluster, index: int) -> None:
    """Writes a node's files."""
    node, options = cluster.node(index), cluster.options
    for folder in ("kubelet", "cni", "volumeplugins", "podlogs"):
        (node / folder).mkdir(parents=True, exist_ok=True)
    Path("/var/lib/kubelet").mkdir(parents=True, exist_ok=True)
    hardware.pretend(node, options)
    (node / "hostfs.json").write_text(json.dumps(_hostfs_spec(options.hostfs)))
    runc = FILES / "runc-without-cpusets" if options.no_cpuset else "/usr/sbin/runc"
    values = {"content": cluster.content / f"n{index}", "node": node, "runtime": options.runtime, "runc": runc}
    (node / "containerd.toml").write_text(Template((FILES / "containerd.toml").read_text()).substitute(values))
    (node / "cni" / "10-pods.conflist").write_text(json.dumps(_cni(node, index)))
    (node / "kubelet.json").write_text(json.dumps(_kubelet(cluster, index), indent=1))
    if options.gpus:
        hardware.gpu_state(node / "gpus.json", options)


def _hostfs_spec(paths: tuple[str, ...]) -> dict[str, Any]:
    """containerd's own OCI spec with read-only binds, and without its rlimits: they pin open files to 1024."""
    done = subprocess.run(["ctr", "oci", "spec"], capture_output=True, check=True, text=True)
    spec: dict[str, Any] = json.loads(done.stdout)
    spec["process"].pop("rlimits", None)
    for path in paths:
        source, _, target = path.partition(":")
        bind = {"type": "bind", "source": source, "destination": target or source}
        spec["mounts"].append(bind | {"options": ["rbind", "ro", "rprivate"]})
    return spec


def _cni(node: Path, index: int) -> dict[str, Any]:
    subnet = {"ranges": [[{"subnet": f"10.244.{index}.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": f"cni{index}", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    bridge["ipam"] = {"type": "host-local", "dataDir": str(node / "ipam")} | subnet
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": f"node{index}", "plugins": [bridge, ports]}


def _kubelet(cluster: Cluster, index: int) -> dict[str, Any]:
    pki, node = cluster.pki, cluster.node(index)
    serving = {
        "address": cluster.node_address(index),
        "port": 10250,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 11240 + index,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/node{index}-server.crt",
        "tlsPrivateKeyFile": f"{pki}/node{index}-server.key",
        "clusterDomain": "cluster.local",
        "clusterDNS": [cluster.node_address(1)],
        "resolvConf": "/etc/resolv.conf",
        "podLogsDir": str(node / "podlogs"),
        "volumePluginDir": str(node / "volumeplugins"),
        "makeIPTablesUtilChains": False,
    }
    # the cgroup of the pods is made beforehand and not limited, so that a node may pretend to hardware that is not there
    resources = {
        "containerRuntimeEndpoint": f"unix://{node}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.cgroup(index)}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["none"],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    pace = {
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "10s",
        "shutdownGracePeriod": "0s",
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "eventRecordQPS": 0,
        "serializeImagePulls": False,
        "logging": {"verbosity": 2},
    }
    kind = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    return kind | serving | resources | pace | json.loads(cluster.options.kubelet or "{}")


def make_cgroups(cluster: Cluster, index: int) -> None:
    """The node's cgroup and that of its pods, with every CPU and memory node of the machine."""
    for group in (cluster.cgroup(index), f"{cluster.cgroup(index)}/kubepods"):
        for controller in CGROUPS:
            parent = Path("/sys/fs/cgroup") / controller
            if parent.exists():
                (parent / group).mkdir(parents=True, exist_ok=True)
        cpuset = Path("/sys/fs/cgroup/cpuset")
        for name in ("cpuset.cpus", "cpuset.mems"):
            (cpuset / group / name).write_text((cpuset / name).read_text())


def command(cluster: Cluster, name: str) -> list[str]:
    """Command line of `containerdI`, `kubeletI` or `gpu-pluginI`."""
    match = PROCESS.fullmatch(name)
    if match is None:
        raise ClusterError(
            f"{name} is no process of a cluster; {processes.log_of(cluster, name).parent} has a log of each"
        )
    kind, index = match[1], int(match[2])
    node = cluster.node(index)
    if kind == "containerd":
        return _containerd(cluster, index)
    if kind == "gpu-plugin":
        return [str(binaries.folder() / kind), str(node / "kubelet" / "device-plugins"), str(node / "gpus.json")]
    join = ["nsenter", f"--target={processes.pid_of(cluster, f'containerd{index}')}", "--mount"]
    return [*join, str(binaries.folder() / "kubelet"), *_kubelet_flags(cluster, index)]


def _containerd(cluster: Cluster, index: int) -> list[str]:
    """In a mount namespace of its own; after a restart in that of the node's kubelet, where its containers' mounts are."""
    node = cluster.node(index)
    if (kubelet := processes.pid_of(cluster, f"kubelet{index}")) is not None:
        return ["nsenter", f"--target={kubelet}", "--mount", "containerd", "-c", str(node / "containerd.toml")]
    return ["unshare", "--mount", "--propagation", "private", "bash", str(FILES / "containerd.sh"), str(node)]


def _kubelet_flags(cluster: Cluster, index: int) -> list[str]:
    node = cluster.node(index)
    return [
        f"--config={node}/kubelet.json",
        f"--kubeconfig={cluster.pki}/node{index}.kubeconfig",
        f"--hostname-override=node{index}",
        f"--node-ip={cluster.node_address(index)}",
        "--root-dir=/var/lib/kubelet",
        f"--cert-dir={node}/kubelet-pki",
    ]


def start_runtime(cluster: Cluster, index: int) -> None:
    """Starts a node's containerd and waits for its socket."""
    name = f"containerd{index}"
    if processes.pid_of(cluster, name) is None:
        (cluster.node(index) / "containerd.sock").unlink(missing_ok=True)
    processes.start(cluster, name, command(cluster, name))
    answers = ["ctr", "--address", str(cluster.node(index) / "containerd.sock"), "version"]
    processes.wait(
        cluster,
        "an answer of containerd",
        lambda: subprocess.run(answers, check=False, capture_output=True).returncode == 0,
        process=name,
    )


def start_kubelet(cluster: Cluster, index: int) -> None:
    """Starts a node's kubelet, and its GPU plugin."""
    make_cgroups(cluster, index)
    name = f"kubelet{index}"
    processes.start(cluster, name, command(cluster, name))
    if cluster.options.gpus:
        processes.start(cluster, f"gpu-plugin{index}", command(cluster, f"gpu-plugin{index}"))
