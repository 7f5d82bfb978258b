"""The command line: `python3 tests/cluster up --nodes 2`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from testcluster import binaries, build_images, images, lifecycle, network, prerequisites
from testcluster.layout import Cluster, ClusterError, Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/cluster", description="A Kubernetes cluster of real parts, for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the binaries")
    commands.add_parser("images", help="build the images that the end-to-end tests run; prints their archives")
    image = commands.add_parser("image", help="build one image that a release ships; prints its name for buildah")
    image.add_argument("role", choices=sorted(build_images.SHIPPED))
    image.add_argument(
        "--requirements", default="", choices=("", "cpu"), help="cpu: of trainer and inference, without GPUs"
    )
    words = {
        "up": "bring a cluster up, or back up",
        "down": "take it down",
        "stop": "end one of its processes, or nodeI as a power cut does",
        "start": "start one of its processes, or nodeI, again",
        "load": "import docker-archives into every node",
        "podresources": "what node I has given to containers, JSON",
    }
    for name, help_ in words.items():
        command = commands.add_parser(name, help=help_)
        command.add_argument("--name", default=os.environ.get("CLUSTER", "main"), help="of the cluster (CLUSTER, main)")
    commands.choices["down"].add_argument("--purge", action="store_true", help="forget the imported images too")
    for name in ("stop", "start"):
        commands.choices[name].add_argument("process", help="such as kube-apiserver, kubelet2, node2")
    commands.choices["load"].add_argument("archives", nargs="+", type=Path)
    commands.choices["podresources"].add_argument("index", type=int)
    _up_flags(commands.choices["up"])
    return parser


def _up_flags(up: argparse.ArgumentParser) -> None:
    """Each flag's default is an environment variable, for `make cluster NODES=2`."""
    env = os.environ.get
    up.add_argument("--nodes", type=int, default=int(env("NODES", "1")), help="0: a control plane alone (NODES, 1)")
    up.add_argument("--numa", default=env("NUMA", ""), help="CPU lists of NUMA nodes to pretend, '0;1' (NUMA)")
    up.add_argument(
        "--meminfo-kb", type=int, default=int(env("MEMINFO_KB", "0")), help="memory to pretend (MEMINFO_KB)"
    )
    up.add_argument("--gpus", type=int, default=int(env("GPUS", "0")), help="fake GPUs of every node (GPUS, 0)")
    up.add_argument(
        "--no-cpuset",
        action="store_true",
        default=_switch("NO_CPUSET"),
        help="for --numa with CPUs that are not there (NO_CPUSET)",
    )
    up.add_argument(
        "--hostfs", default=env("HOSTFS", ""), help="paths that runtime hostfs shows read-only, 'A B:C' (HOSTFS)"
    )
    up.add_argument(
        "--runtime", default=env("RUNTIME", "runc"), choices=("runc", "hostfs"), help="of all pods (RUNTIME)"
    )
    up.add_argument(
        "--kubelet", default=env("KUBELET", ""), help="JSON fields over the kubelets' configuration (KUBELET)"
    )
    up.add_argument(
        "--controllers", default=env("CONTROLLERS", ""), help="flags of the controller manager (CONTROLLERS)"
    )
    up.add_argument("--images", default=env("IMAGES", ""), help="docker-archives to import, 'A B' (IMAGES)")
    up.add_argument(
        "--fp8rl",
        action="store_true",
        default=_switch("FP8RL"),
        help="with the images of the operator and the workers (FP8RL)",
    )
    up.add_argument("--audit", action="store_true", default=_switch("AUDIT"), help="write an audit log (AUDIT)")


def _switch(variable: str) -> bool:
    return os.environ.get(variable, "") not in {"", "0"}


def _options(given: argparse.Namespace) -> Options:
    options = Options(
        nodes=given.nodes,
        numa=given.numa,
        meminfo_kb=given.meminfo_kb,
        gpus=given.gpus,
        no_cpuset=given.no_cpuset,
        hostfs=tuple(given.hostfs.split()),
        runtime=given.runtime,
        kubelet=given.kubelet,
        controllers=tuple(given.controllers.split()),
        images=tuple(given.images.split()),
        audit=given.audit,
    )
    if not given.fp8rl:
        return options
    images = (*options.images, *map(str, build_images.for_tests()))
    hostfs = (*options.hostfs, *build_images.host_paths())
    return dataclasses.replace(options, images=images, hostfs=hostfs, runtime="hostfs")


def _up(given: argparse.Namespace) -> None:
    cluster = Cluster(given.name, _options(given))
    prerequisites.check(cluster.options)
    binaries.build()
    network.enter(cluster)
    begun = time.monotonic()
    lifecycle.up(cluster)
    print(f"# cluster {cluster.name} is up after {time.monotonic() - begun:.1f} s", file=sys.stderr)
    if cluster.netns:
        print(f"# its addresses exist in its network namespace only: nsenter --net=/run/netns/{cluster.netns} COMMAND")
    if cluster.options.audit:
        print(f"# audit log: {cluster.audit_log}")
    print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))} PATH={binaries.folder()}:$PATH")


def _load(cluster: Cluster, archives: list[Path]) -> None:
    for index in range(1, cluster.options.nodes + 1):
        images.load(cluster, index, archives)


def _podresources(cluster: Cluster, index: int) -> None:
    socket = cluster.node(index) / "kubelet" / "pod-resources" / "kubelet.sock"
    subprocess.run([binaries.folder() / "podresources", socket], check=True)


def _loaded(name: str) -> Cluster:
    cluster = Cluster.load(name)
    if cluster is None:
        raise ClusterError(f"there is no cluster {name}")
    return cluster


def run(arguments: list[str]) -> None:
    """Runs one command."""
    given = _parser().parse_args(arguments)
    match given.command:
        case "build":
            print(binaries.build())
        case "images":
            print(*build_images.for_tests(), sep="\n")
        case "image":
            print(build_images.build_shipped(given.role, given.requirements))
        case "up":
            _up(given)
        case "down":
            lifecycle.down(given.name, purge=given.purge)
        case "stop":
            lifecycle.stop(_loaded(given.name), given.process)
        case "start":
            network.enter(_loaded(given.name))
            lifecycle.start(_loaded(given.name), given.process)
        case "load":
            _load(_loaded(given.name), given.archives)
        case "podresources":
            _podresources(_loaded(given.name), given.index)


def main() -> None:
    """Exits 1 with one message when a cluster cannot do what was asked."""
    try:
        run(sys.argv[1:])
    except ClusterError as error:
        sys.exit(f"tests/cluster: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"tests/cluster: {' '.join(map(str, error.cmd))} exited {error.returncode}\n{error.stderr or ''}")
