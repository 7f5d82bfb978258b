"""The programs of this machine that a cluster needs, and the Debian packages that have them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from testcluster.layout import ClusterError, Options

CONTROL_PLANE = {"openssl": "openssl"}
NODES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/conntrack": "conntrack",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "gcc": "gcc",
    "/usr/include/stdlib.h": "libc6-dev",
}
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}


def missing(programs: dict[str, str]) -> list[str]:
    """Packages of the programs that are not there."""
    absent = {package for program, package in programs.items() if not (shutil.which(program) or Path(program).exists())}
    return sorted(absent)


def require(programs: dict[str, str]) -> None:
    """Checks for programs; in CI (variable CI) as root, installs what is missing.

    Raises:
        ClusterError: Something is missing.
    """
    packages = missing(programs)
    if not packages:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(install, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    else:
        raise ClusterError(f"this needs Debian packages that are not installed: {' '.join(install)}")


def check(options: Options) -> None:
    """Checks what a cluster of these options needs.

    Raises:
        ClusterError: It is not there.
    """
    require(CONTROL_PLANE | (NODES if options.nodes else {}))
    if options.nodes and os.geteuid() != 0:
        raise ClusterError("nodes need root: namespaces, mounts and cgroups")
    if options.nodes and not Path("/sys/fs/cgroup/pids").is_dir():
        raise ClusterError("nodes need the controllers of cgroup v1 below /sys/fs/cgroup, as hybrid mounts have them")
