"""Hardware that a node pretends to have: what the kubelet reads of it below /sys and /proc, and its GPUs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from testcluster.layout import Options


def cpus(listed: str) -> list[int]:
    """CPUs of a list as the kernel writes it: `0-2,5`."""
    bounds = [part.split("-") for part in listed.split(",")]
    return [cpu for part in bounds for cpu in range(int(part[0]), int(part[-1]) + 1)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def numa_tree(folder: Path, numa: str, memory_kb: int) -> None:
    """/sys/devices/system/node with the NUMA nodes of `Options.numa`, which share `memory_kb` evenly."""
    lists = numa.split(";")
    shutil.rmtree(folder, ignore_errors=True)
    every = "0" if len(lists) == 1 else f"0-{len(lists) - 1}"
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        _write(folder / name, every)
    _write(folder / "cpu_online", ",".join(lists))
    share = memory_kb // len(lists)
    for index, listed in enumerate(lists):
        node = folder / f"node{index}"
        _write(node / "cpulist", listed)
        _write(node / "cpumap", f"{sum(1 << cpu for cpu in cpus(listed)):x}")
        _write(node / "distance", " ".join("10" if other == index else "20" for other in range(len(lists))))
        _write(node / "meminfo", f"Node {index} MemTotal: {share} kB\nNode {index} MemFree: {share} kB")
        for cpu in cpus(listed):
            topology = {
                "core_id": cpu,
                "physical_package_id": index,
                "thread_siblings_list": cpu,
                "core_cpus_list": cpu,
            }
            for name, value in topology.items():
                _write(node / f"cpu{cpu}" / "topology" / name, str(value))


def pretend(node: Path, options: Options) -> None:
    """Writes what files/containerd.sh mounts over this machine's own."""
    real = Path("/proc/meminfo").read_text()
    memory_kb = options.meminfo_kb or int(real.split()[1])
    if options.numa:
        numa_tree(node / "numa", options.numa, memory_kb)
    if options.meminfo_kb:
        (node / "meminfo").write_text(re.sub(r"^MemTotal:.*", f"MemTotal: {memory_kb} kB", real, flags=re.MULTILINE))


def gpu_state(path: Path, options: Options) -> None:
    """The state file of the GPU plugin, unless there is one: `options.gpus` GPUs, dealt evenly to the NUMA nodes in order."""
    if path.exists():
        return
    nodes = len(options.numa.split(";")) if options.numa else 1
    devices = [{"id": f"gpu-{i}", "numa": i * nodes // options.gpus} for i in range(options.gpus)]
    path.write_text(json.dumps({"devices": devices, "fail": False}, indent=1))
