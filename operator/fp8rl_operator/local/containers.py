"""What a container's process gets, as pure functions of the pod: arguments, environment, folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl_operator.local.volumes import FindObject, Mounts, Object, object_data
from fp8rl_operator.manifests.pod import THREADS

REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_]*)\))")
INTERPRETERS = ("python", "python3")
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class Process:
    """One process to start."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class Machine:
    """What the machine lends to a pod: its own environment, threads for each process, ids of the GPUs given to the pod."""

    environ: Mapping[str, str]
    threads: int
    gpus: tuple[str, ...] = ()


def expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' `$(NAME)`: replaced if NAME is defined, else left; `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return REFERENCE.sub(value, text)


def field_value(path: str, pod: Object, address: str) -> str:
    """A value of the downward API.

    Raises:
        ValueError: the field is not served here.
    """
    metadata = pod["metadata"]
    if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", "default"),
        "metadata.uid": metadata["uid"],
        "status.podIP": address,
        "status.hostIP": address,
        "spec.nodeName": "localhost",
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
    }
    if path not in simple:
        raise ValueError(f"fieldRef {path} of pod {metadata['name']}: not known; known are {', '.join(sorted(simple))}")
    return str(simple[path])


def variable(entry: Object, pod: Object, address: str, find: FindObject) -> str | None:
    """Value of one entry of `env` that is no plain value; None for an optional reference to nothing.

    Raises:
        ValueError: the source is not known.
        KeyError: a referenced object or key does not exist.
    """
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return field_value(source["fieldRef"]["fieldPath"], pod, address)
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if key in source:
            reference = source[key]
            try:
                return object_data(find(kind, reference["name"]))[reference["key"]].decode()
            except KeyError:
                if reference.get("optional"):
                    return None
                raise KeyError(
                    f"env {entry['name']} of pod {pod['metadata']['name']}: {kind} {reference['name']} has no key"
                    f" {reference['key']} on this machine, which has only the job's own objects; write the value itself, or"
                    " optional: true"
                ) from None
    raise ValueError(f"env {entry['name']} of pod {pod['metadata']['name']}: source {sorted(source)} is not known")


def environment(container: Object, pod: Object, address: str, mounts: Mounts, find: FindObject) -> dict[str, str]:
    """The container's own variables, in order, references resolved, mount paths replaced.

    Raises:
        ValueError: a source is not known.
        KeyError: a referenced object or key does not exist.
    """
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if key in source:
                data = object_data(find(kind, source[key]["name"]))
                env |= {source.get("prefix", "") + name: text.decode() for name, text in data.items()}
    for entry in container.get("env", []):
        value = variable(entry, pod, address, find) if "valueFrom" in entry else expand(entry.get("value", ""), env)
        if value is not None:
            env[entry["name"]] = mounts.real(value)
    return env


def resolve(
    container: Object, pod: Object, address: str, mounts: Mounts, find: FindObject, *, machine: Machine
) -> Process:
    """Arguments and whole environment of a container's process.

    Raises:
        ValueError: a source of a variable is not known, or the container names no command.
        KeyError: a referenced object or key does not exist.
    """
    own = environment(container, pod, address, mounts, find)
    words = [*container.get("command", []), *container.get("args", [])]
    if not container.get("command"):
        raise ValueError(f"container {container['name']} of pod {pod['metadata']['name']} names no command to run here")
    argv = [mounts.real(expand(word, own)) for word in words]
    if argv[0] in INTERPRETERS:
        argv[0] = sys.executable
    inherited = {name: value for name, value in machine.environ.items() if not name.startswith("FP8RL_")}
    if "cpu" not in resources(container) and own.get(THREADS) == "1":
        del own[THREADS]  # nobody asked for CPUs: the machine gives each process its share
    inherited = {THREADS: str(machine.threads)} | inherited
    return Process(argv, inherited | {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus)} | own)


def gpus_wanted(pod: Object) -> int:
    """GPUs that the pod's containers ask for."""
    return sum(int(resources(container).get(GPU_RESOURCE, 0)) for container in pod["spec"]["containers"])


def resources(container: Object) -> dict[str, Any]:
    """Limits of a container."""
    return dict(container.get("resources", {}).get("limits", {}))
