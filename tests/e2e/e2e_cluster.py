"""Brings the clusters of the e2e tests up, and this process into their network namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kube_world import World, enter, until
from testcluster import build_images, images, lifecycle
from testcluster.layout import Cluster, Options
from testcluster.network import NETNS

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "fp8rl.dev_fp8rljobs.yaml"
TOYS = "toys"
# a node counts as lost 8 s after its kubelet's last word, not 50
FAST_NODE_LOSS = ("--node-monitor-period=1s", "--node-monitor-grace-period=8s")
FAST_LEASE = '{"nodeLeaseDurationSeconds": 4}'


def options(run: Path, **more: object) -> Options:
    """Nodes whose pods see this machine's Python and the steering folder of the stand-ins, read-only."""
    chosen = {
        "nodes": 2,
        "hostfs": (*build_images.host_paths(), str(run / TOYS)),
        "runtime": "hostfs",
        "controllers": FAST_NODE_LOSS,
        "kubelet": FAST_LEASE,
    }
    return Options(**{**chosen, **more})


def bring_up(name: str, **more: object) -> World:
    """The cluster, up, with the CRD; this process is in its network namespace. `more`: other `Options`, of one that is not up."""
    archives = build_images.for_tests()  # before the namespace, in which there is no network
    (Cluster(name).run / TOYS).mkdir(parents=True, exist_ok=True)
    cluster = Cluster.load(name) or Cluster(name, options(Cluster(name).run, **more))
    assert cluster.netns is not None, "an e2e cluster has nodes"
    if not (NETNS / cluster.netns).exists():
        subprocess.run(["ip", "netns", "add", cluster.netns], check=True)
        subprocess.run(["nsenter", f"--net={NETNS / cluster.netns}", "ip", "link", "set", "lo", "up"], check=True)
    enter(cluster.netns)
    lifecycle.up(cluster)
    for index in range(1, cluster.options.nodes + 1):
        images.load(cluster, index, archives)
    world = World(cluster)
    world.toys = cluster.run / TOYS
    world.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    until(lambda: world.kubectl("explain", "fp8rljob.spec"), 60, "the schema is published")
    return world


def take_down(name: str) -> None:
    """Nothing of it is left."""
    lifecycle.down(name)
