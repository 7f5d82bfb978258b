"""The binaries: all of Kubernetes in one Go program that looks at its own name, and CoreDNS; built once per state of their sources."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.layout import HERE, ClusterError, cache_root, hash_of

VERSION = "1.37.2"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NAMES = (*CONTROL_PLANE, "kubelet", "kube-proxy", "kubectl", "gpu-plugin", "podresources")
GO = (1, 26)


def folder() -> Path:
    """Where the binaries of these sources are, or will be; FP8RL_CLUSTER_BIN overrides it."""
    if override := os.environ.get("FP8RL_CLUSTER_BIN"):
        return Path(override)
    sources = [path for part in ("node", "dns") for path in (HERE / part).iterdir()]
    return cache_root() / f"{VERSION}-{hash_of(sources)}"


def built() -> bool:
    """Whether there is nothing left to build."""
    return all((folder() / name).exists() for name in (*NAMES, "coredns"))


def why_not() -> str | None:
    """Why the binaries can be neither found nor built; None if they can."""
    if built():
        return None
    go = shutil.which("go")
    if go is None:
        return f"Go {GO[0]}.{GO[1]} or newer is not on PATH, and {folder()} has no binaries that were built before"
    words = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout.strip()
    found = tuple(int(part) for part in words.removeprefix("go").split("-")[0].split(".")[:2])
    return None if found >= GO else f"Go {GO[0]}.{GO[1]} or newer is needed, {go} is {words}"


def build() -> Path:
    """Builds what is missing: 10 to 14 minutes on two cores with a cold Go cache, under a minute with a warm one.

    Raises:
        ClusterError: There is no Go that can.
    """
    if reason := why_not():
        raise ClusterError(reason)
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built():
            _compile("node", target / "node", _version_flags())
            _compile("dns", target / "coredns", "")
            for name in NAMES:
                (target / name).unlink(missing_ok=True)
                (target / name).symlink_to("node")
    return target


def _version_flags() -> str:
    major, minor, _ = VERSION.split(".")
    values = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())


def _compile(part: str, target: Path, flags: str) -> None:
    if target.exists():
        return
    print(f"building {target} (minutes, once)", file=sys.stderr, flush=True)
    partial = target.with_suffix(".partial")
    command = ["go", "build", "-trimpath", "-mod=readonly", "-ldflags", f"-s -w {flags}", "-o", str(partial), "."]
    subprocess.run(command, cwd=HERE / part, env=os.environ | {"CGO_ENABLED": "0"}, check=True)
    partial.rename(target)
