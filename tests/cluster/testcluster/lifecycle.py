"""Up, down, and single processes and nodes in between."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

from testcluster import (
    api,
    archive,
    binaries,
    control_plane,
    images,
    network,
    node,
    pki,
    prerequisites,
    processes,
    teardown,
)
from testcluster.layout import Cluster, ClusterError, run_root

OF_TESTS = "pytest-"  # then the process id of the test run, and what it likes
NODE = re.compile(r"node([1-9][0-9]*)")


def up(cluster: Cluster) -> None:
    """Brings a cluster up; of one that is up, starts what does not run.

    With nodes, the caller is inside the cluster's network namespace (`network.enter`).

    Raises:
        ClusterError: Something is missing, a part did not come up, or the cluster is up with other options.
    """
    before = Cluster.load(cluster.name)
    if before is not None and before.without_images() != cluster.without_images():
        raise ClusterError(f"cluster {cluster.name} is up with other options; take it down first")
    prerequisites.check(cluster.options)
    binaries.build()
    cluster.save()
    pki.make(cluster)
    if cluster.options.nodes:
        network.prepare(cluster)
    for index in _indexes(cluster):
        node.prepare(cluster, index)
        node.start_runtime(cluster, index)
    for part in control_plane.PARTS:
        control_plane.start(cluster, part)
    if cluster.options.nodes:
        _start_nodes(cluster)
    processes.wait(
        cluster,
        "ServiceAccount default",
        lambda: api.get(cluster, "/api/v1/namespaces/default/serviceaccounts/default") is not None,
        process="kube-controller-manager",
    )


def _indexes(cluster: Cluster) -> range:
    return range(1, cluster.options.nodes + 1)


def _start_nodes(cluster: Cluster) -> None:
    archives = [*archive.build(), *map(Path, cluster.options.images)]
    for index in _indexes(cluster):
        images.load(cluster, index, archives)
        node.start_kubelet(cluster, index)
    network.start_services(cluster)
    for index in _indexes(cluster):
        processes.wait(
            cluster,
            f"Ready node{index}",
            lambda i=index: api.node_ready(cluster, f"node{i}"),
            process=f"kubelet{index}",
        )


def start(cluster: Cluster, name: str) -> None:
    """Starts one process, or `nodeI`: its containerd, kubelet and GPU plugin. What runs already is left alone."""
    if name in control_plane.PARTS:
        control_plane.start(cluster, name)
    elif name in {"coredns", "kube-proxy"}:
        network.start_services(cluster)
    elif match := NODE.fullmatch(name):
        node.start_runtime(cluster, int(match[1]))
        node.start_kubelet(cluster, int(match[1]))
    else:
        processes.start(cluster, name, node.command(cluster, name))


def stop(cluster: Cluster, name: str) -> None:
    """Ends one process, or `nodeI` as a power cut does: everything that runs on it is gone at once."""
    match = NODE.fullmatch(name)
    if match is None:
        processes.stop(cluster, [name])
        return
    index = int(match[1])
    processes.stop(cluster, [f"{kind}{index}" for kind in ("kubelet", "gpu-plugin", "containerd")], sign=signal.SIGKILL)
    teardown.kill_leftovers(cluster, index)


def down(name: str, *, purge: bool = False) -> None:
    """Takes a cluster down; what is left are the images that it imported. With `purge`, and of a test run's cluster, nothing."""
    cluster = Cluster.load(name) or Cluster(name)
    processes.stop(cluster, [*node.names(cluster, "kubelet"), *node.names(cluster, "gpu-plugin")])
    for index in _indexes(cluster):
        teardown.remove_containers(cluster, index)
    processes.stop(cluster, ["coredns", "kube-proxy", *reversed(control_plane.PARTS[1:])])
    processes.stop(cluster, ["etcd", *node.names(cluster, "containerd")])
    for index in _indexes(cluster):
        teardown.kill_leftovers(cluster, index)
        teardown.remove_cgroups(cluster, index)
    network.remove(cluster)
    shutil.rmtree(cluster.run, ignore_errors=True)
    if purge or cluster.name.startswith(OF_TESTS):
        shutil.rmtree(cluster.content, ignore_errors=True)


def sweep() -> None:
    """Takes down the clusters of test runs that were killed before they could do it."""
    root = run_root()
    for folder in root.iterdir() if root.exists() else []:
        pid = folder.name.removeprefix(OF_TESTS).split("-")[0]
        if folder.name.startswith(OF_TESTS) and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            down(folder.name)
