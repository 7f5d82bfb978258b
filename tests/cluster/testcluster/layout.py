"""What a cluster of this machine is made of: its options, and where its files and addresses are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
FILES = HERE / "files"
API_PORT, ETCD_PORT, ETCD_PEER_PORT, CONTROLLERS_PORT, SCHEDULER_PORT = 6443, 2379, 2380, 10257, 10259
SERVICE_IP = "10.96.0.1"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class ClusterError(Exception):
    """Something a person has to look at; the message says where."""


@dataclass(frozen=True)
class Options:
    """What `up` is asked for.

    Attributes:
        nodes: Nodes; 0 is a control plane alone, without a network namespace.
        numa: CPU lists of the NUMA nodes that every node pretends to have, joined by `;`. Empty: this machine's own.
        meminfo_kb: Memory that every node pretends to have, KiB. 0: this machine's own.
        gpus: Fake GPUs of every node; `nI/gpus.json` in the run folder changes them while the cluster runs.
        no_cpuset: Leave cpusets out of containers: for `numa` with more CPUs than there are.
        hostfs: Paths of this machine that containers of the runtime `hostfs` see read-only, `SRC` or `SRC:DEST`.
        runtime: Runtime of a pod that names none: `runc` or `hostfs`.
        kubelet: JSON object of fields laid over every kubelet's configuration.
        controllers: Flags added to the controller manager.
        images: docker-archive files that every node imports.
        audit: Let the apiserver write an audit log (who asked for what; no bodies).
    """

    nodes: int = 0
    numa: str = ""
    meminfo_kb: int = 0
    gpus: int = 0
    no_cpuset: bool = False
    hostfs: tuple[str, ...] = ()
    runtime: str = "runc"
    kubelet: str = ""
    controllers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    audit: bool = False


def run_root() -> Path:
    """Folder of all clusters' sockets, certificates, logs and process ids."""
    if os.geteuid() == 0:
        return Path("/run/fp8rl-cluster")
    return Path(tempfile.gettempdir()) / f"fp8rl-cluster-{os.geteuid()}"


def cache_root() -> Path:
    """Folder of what is made once: binaries and images."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fp8rl" / "cluster"


def hash_of(paths: list[Path]) -> str:
    """16 hex digits over names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        total.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Cluster:
    """One cluster, known by its name: two of different names share no file, no address and no cgroup."""

    name: str
    options: Options = Options()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ClusterError(f"cluster name {self.name!r}: lower-case letters, digits and '-', at most 32")

    @property
    def run(self) -> Path:
        """Sockets, process ids, certificates, logs: gone with `down`."""
        return run_root() / self.name

    @property
    def content(self) -> Path:
        """What the nodes' containerds keep, so that an image is imported once."""
        return Path("/var/tmp/fp8rl-cluster") / self.name

    @property
    def pki(self) -> Path:
        """Keys, certificates and kubeconfigs."""
        return self.run / "pki"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster's administrator."""
        return self.pki / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """Audit log of the apiserver: one JSON document a line."""
        return self.run / "log" / "audit.jsonl"

    @property
    def netns(self) -> str | None:
        """Network namespace; None for a control plane alone."""
        return f"fp8rl-{self.name}" if self.options.nodes else None

    @property
    def address(self) -> str:
        """Where etcd, controller manager and scheduler listen."""
        if self.options.nodes:
            return "127.0.0.1"
        a, b, c = hashlib.sha256(self.name.encode()).digest()[:3]
        return f"127.{64 + a % 128}.{b}.{1 + c % 254}"

    @property
    def api_address(self) -> str:
        """Where the apiserver listens."""
        return self.node_address(1) if self.options.nodes else self.address

    def node_address(self, index: int) -> str:
        """Address of node `index`, counted from 1; exists inside the network namespace only."""
        return f"10.250.0.{index}"

    def node(self, index: int) -> Path:
        """Files of node `index`."""
        return self.run / f"n{index}"

    def cgroup(self, index: int) -> str:
        """Name of the cgroup that node `index` keeps to."""
        return f"fp8rl-{self.name}-node{index}"

    def without_images(self) -> Cluster:
        """The same cluster before anything is imported: images may come while it runs."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, images=()))

    def save(self) -> None:
        """Remembers the options for the other commands."""
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "options.json").write_text(json.dumps(dataclasses.asdict(self.options), indent=1))

    @classmethod
    def load(cls, name: str) -> Cluster | None:
        """The cluster of that name as `up` left it; None if there is none."""
        path = cls(name).run / "options.json"
        if not path.exists():
            return None
        raw = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(path.read_text()).items()}
        return cls(name, Options(**raw))
