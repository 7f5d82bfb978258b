"""Volumes of a pod as folders of this machine.

A container here has no mount namespace. So each mount path is mapped to a real folder, and everywhere that the objects
name a path below it (environment, arguments, JSON in ConfigMaps) the real one is written instead: `Mounts.real`.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED_PATHS = ("/tmp", "/dev/shm")  # noqa: S108 - the machine's own serve: socket paths must stay short

Object = dict[str, Any]
FindObject = Callable[[str, str], Object]


@dataclass(frozen=True)
class Mounts:
    """Mount path to real folder."""

    folders: Mapping[str, Path] = field(default_factory=dict)

    def real(self, text: str) -> str:
        """`text` with a leading mount path replaced; the longest that fits wins."""
        for path in sorted(self.folders, key=len, reverse=True):
            if text == path or text.startswith(path + "/"):
                return str(self.folders[path]) + text[len(path) :]
        return text

    def rewrite(self, value: Any) -> Any:
        """`real` applied to every string of a JSON value."""
        if isinstance(value, str):
            return self.real(value)
        if isinstance(value, list):
            return [self.rewrite(item) for item in value]
        if isinstance(value, dict):
            return {key: self.rewrite(item) for key, item in value.items()}
        return value


@dataclass(frozen=True)
class Folders:
    """Where this run keeps things. `shared`: folder of a volume by its name, whatever claim or emptyDir it is."""

    root: Path
    shared: Mapping[str, Path] = field(default_factory=dict)

    @property
    def pods(self) -> Path:
        """Folders of single pods, gone with them."""
        return self.root / ".local" / "pods"

    @property
    def logs(self) -> Path:
        """One log a pod."""
        return self.root / "logs"

    def claim(self, name: str) -> Path:
        """Folder of a PersistentVolumeClaim."""
        return self.root / "claims" / name


def volume_folder(volume: Object, pod: Object, folders: Folders) -> Path:
    """The real folder of one entry of `spec.volumes`.

    Raises:
        ValueError: the volume's kind cannot exist on one machine.
    """
    name: str = volume["name"]
    if "hostPath" in volume:
        return Path(str(volume["hostPath"]["path"]))
    if name in folders.shared:
        return folders.shared[name]
    if "persistentVolumeClaim" in volume:
        return folders.claim(str(volume["persistentVolumeClaim"]["claimName"]))
    if volume.keys() & {"emptyDir", "configMap", "secret"}:
        return folders.pods / str(pod["metadata"]["uid"]) / str(name)
    kinds = ", ".join(sorted(volume.keys() - {"name"}))
    raise ValueError(
        f"volume {name} of pod {pod['metadata']['name']}: {kinds} cannot be had on one machine; "
        "use emptyDir, hostPath, configMap, secret or a claim"
    )


def pod_mounts(pod: Object, folders: Folders) -> Mounts:
    """Mount paths of all containers of a pod.

    Raises:
        ValueError: see `volume_folder`.
    """
    spec = pod["spec"]
    real = {volume["name"]: volume_folder(volume, pod, folders) for volume in spec.get("volumes", [])}
    found = {}
    for container in spec.get("initContainers", []) + spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] not in SHARED_PATHS:
                found[mount["mountPath"].rstrip("/")] = real[mount["name"]] / mount.get("subPath", "")
    return Mounts(found)


def volume_files(volume: Object, find: FindObject) -> dict[str, bytes]:
    """File name to content of a ConfigMap or Secret volume; empty for the others.

    Raises:
        KeyError: the object or one of its keys does not exist.
    """
    if "configMap" in volume:
        source, data = volume["configMap"], find("ConfigMap", volume["configMap"]["name"])
    elif "secret" in volume:
        source, data = volume["secret"], find("Secret", volume["secret"]["secretName"])
    else:
        return {}
    content = object_data(data)
    items = source.get("items") or [{"key": key, "path": key} for key in content]
    return {item["path"]: content[item["key"]] for item in items}


def object_data(source: Object) -> dict[str, bytes]:
    """Decoded data of a ConfigMap or Secret."""
    plain = {key: text.encode() for key, text in (source.get("stringData") or {}).items()}
    if source["kind"] == "ConfigMap":
        return plain | {key: text.encode() for key, text in (source.get("data") or {}).items()}
    return plain | {key: base64.b64decode(text) for key, text in (source.get("data") or {}).items()}


def make_volumes(pod: Object, folders: Folders, mounts: Mounts, find: FindObject) -> None:
    """Make the folders of a pod and write its ConfigMaps and Secrets (files 0600), paths in JSON rewritten.

    Raises:
        KeyError: a ConfigMap, Secret or key does not exist.
        ValueError: a hostPath of type Directory is none.
        OSError: a folder or file cannot be written.
    """
    for volume in pod["spec"].get("volumes", []):
        folder = volume_folder(volume, pod, folders)
        kind = volume.get("hostPath", {"type": "DirectoryOrCreate"}).get("type", "")
        if kind == "DirectoryOrCreate":
            folder.mkdir(parents=True, exist_ok=True)
        elif kind == "Directory" and not folder.is_dir():
            raise ValueError(f"volume {volume['name']}: hostPath {folder} is no folder; correct the path or make it")
        for name, content in volume_files(volume, find).items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(rewrite_json(name, content, mounts))
    for folder in mounts.folders.values():
        if folder.is_relative_to(folders.root):
            folder.mkdir(parents=True, exist_ok=True)


def rewrite_json(name: str, content: bytes, mounts: Mounts) -> bytes:
    """Content of a file with the paths of a JSON document rewritten; other files stay as they are."""
    if not name.endswith(".json"):
        return content
    return json.dumps(mounts.rewrite(json.loads(content)), indent=2).encode()
