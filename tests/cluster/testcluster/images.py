"""Images into the containerd of a node."""

from __future__ import annotations

import subprocess
from pathlib import Path

from testcluster.layout import Cluster


def load(cluster: Cluster, index: int, archives: list[Path]) -> None:
    """Imports docker-archives that the node has not imported yet; a node keeps its images over `down` and `up`."""
    marks = cluster.content / f"n{index}.imported"
    marks.mkdir(parents=True, exist_ok=True)
    ctr = ["ctr", "--address", str(cluster.node(index) / "containerd.sock"), "--namespace", "k8s.io"]
    for archive in archives:
        stat = archive.stat()
        mark = marks / f"{archive.stem}-{stat.st_size}-{stat.st_mtime_ns}"
        if not mark.exists():
            subprocess.run([*ctr, "images", "import", str(archive)], check=True, stdout=subprocess.DEVNULL)
            mark.touch()
