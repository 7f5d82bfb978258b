"""Two images made of nothing but a program: `localhost/pause:1`, which pods need, and `localhost/busybox:1`, for tests."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

from testcluster.layout import FILES, ClusterError, cache_root, hash_of

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _add(tar: tarfile.TarFile, name: str, *, data: bytes | None = None, link: str = "", mode: int = 0o755) -> None:
    """A file of `data`, a symbolic link, or a folder."""
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    entry.size = len(data or b"")
    entry.linkname = link
    entry.type = tarfile.SYMTYPE if link else tarfile.DIRTYPE if data is None else tarfile.REGTYPE
    tar.addfile(entry, io.BytesIO(data) if data is not None else None)


def _pack(target: Path, reference: str, command: list[str], layer: bytes) -> None:
    """A docker-archive of one layer."""
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {"Env": [PATH], "Cmd": command},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}/layer.tar"]}]).encode()
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for member, data in ((name, config), (f"{digest}/layer.tar", layer), ("manifest.json", manifest)):
            _add(tar, member, data=data, mode=0o644)
    partial.rename(target)


def _pause(target: Path, folder: Path) -> None:
    program = folder / "pause"
    subprocess.run(["gcc", "-Os", "-static", "-o", str(program), str(FILES / "pause.c")], check=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("dev", "proc", "sys", "etc"):
            _add(tar, name)
        _add(tar, "pause", data=program.read_bytes())
    _pack(target, "localhost/pause:1", ["/pause"], layer.getvalue())


def _busybox(target: Path) -> None:
    program = shutil.which("busybox")
    if program is None:
        raise ClusterError("busybox is not on PATH")
    applets = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("usr", "usr/bin", "dev", "proc", "sys", "run", "var", "root", "etc"):
            _add(tar, name)
        _add(tar, "tmp", mode=0o1777)
        _add(tar, "bin", link="usr/bin")
        _add(tar, "usr/bin/busybox", data=Path(program).read_bytes())
        for applet in applets:
            if applet != "busybox":
                _add(tar, f"usr/bin/{applet}", link="busybox")
    _pack(target, "localhost/busybox:1", ["/bin/sh"], layer.getvalue())


def build() -> list[Path]:
    """The archives of both, made if they are not there."""
    folder = cache_root() / f"tiny-{hash_of([FILES / 'pause.c', Path(__file__)])}"
    folder.mkdir(parents=True, exist_ok=True)
    pause, busybox = folder / "pause.tar", folder / "busybox.tar"
    if not pause.exists():
        _pause(pause, folder)
    if not busybox.exists():
        _busybox(busybox)
    return [pause, busybox]
