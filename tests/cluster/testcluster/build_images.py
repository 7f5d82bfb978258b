"""Container images, built for real without a container engine: debootstrap makes the base, buildah the rest; archives are cached by content."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from testcluster import prerequisites
from testcluster.layout import HERE, ClusterError, cache_root, hash_of

ROOT = HERE.parent.parent
TAG = "0.1.0"
INSIDE = "/opt/fp8rl-host"  # where the e2e workers see repository and environment: a checkout may lie below what pods cover, as /tmp
SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
ENVIRONMENT = os.environ | {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}


@dataclass(frozen=True)
class Image:
    """An image: its Dockerfile, what it copies of the repository, its build arguments and its names."""

    dockerfile: str
    sources: tuple[str, ...]
    names: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...] = ()

    def key(self) -> str:
        """16 hex digits over all that goes into it."""
        paths = [ROOT / self.dockerfile]
        for source in self.sources:
            path = ROOT / source
            found = path.rglob("*") if path.is_dir() else [path]
            paths += [one for one in found if one.is_file() and "__pycache__" not in one.parts]
        return hash_of(paths) + hash_text(json.dumps([dataclasses.asdict(self), SUITE, PACKAGES]))[:4]


def hash_text(text: str) -> str:
    """Hex digits over a text."""
    return hashlib.sha256(text.encode()).hexdigest()


PROJECT = ("pyproject.toml", "README.md", "LICENSE", "requirements", "operator/fp8rl_operator", "workers/fp8rl_workers")
OPERATOR = Image("operator/Dockerfile", PROJECT[3:], (f"fp8rl-operator:{TAG}",))
TRAINER = Image("workers/Dockerfile.trainer", PROJECT, (f"fp8rl-trainer:{TAG}",))
INFERENCE = Image("workers/Dockerfile.inference", PROJECT, (f"fp8rl-inference:{TAG}",))
ORCHESTRATOR = Image("workers/Dockerfile.orchestrator", PROJECT, (f"fp8rl-orchestrator:{TAG}",))
SHIPPED = {"operator": OPERATOR, "trainer": TRAINER, "inference": INFERENCE, "orchestrator": ORCHESTRATOR}


def e2e_workers() -> Image:
    """One image with the names of the three workers; Python is mounted from this machine."""
    names = tuple(f"fp8rl-{role}:{TAG}" for role in ("trainer", "inference", "orchestrator"))
    return Image("tests/e2e/Dockerfile.workers", (), names, (("INSIDE", INSIDE),))


def environment() -> Path:
    """The virtual environment that this program runs in.

    Raises:
        ClusterError: It runs in none.
    """
    if sys.prefix == sys.base_prefix:
        raise ClusterError("pods of the tests use the project's virtual environment: start this with .venv/bin/python")
    return Path(sys.prefix)


def host_paths() -> tuple[str, ...]:
    """What the e2e workers see of this machine: repository and virtual environment below `INSIDE`, the interpreter where it is."""
    return f"{ROOT}:{INSIDE}/repository", f"{environment()}:{INSIDE}/venv", str(Path(sys.base_prefix).resolve())


def buildah(*arguments: str) -> str:
    """stdout of buildah; its progress goes to this program's stderr."""
    done = subprocess.run(["buildah", *arguments], check=True, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    return done.stdout.strip()


def present(name: str) -> bool:
    """Whether buildah has an image of that name."""
    listed = subprocess.run(
        ["buildah", "inspect", "--type", "image", name], check=False, capture_output=True, env=ENVIRONMENT
    )
    return listed.returncode == 0


def mirror() -> str:
    """The mirror that apt of this machine takes `SUITE` from."""
    form = ["--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {SUITE}"]
    told = subprocess.run(["apt-get", "indextargets", *form], check=True, capture_output=True, text=True).stdout.split()
    if not told:
        raise ClusterError(f"apt of this machine has no source for Debian {SUITE}, from which the images' base is made")
    return told[0]


def base() -> str:
    """Name of the base image: Debian with Python, made if buildah has none."""
    name = f"localhost/fp8rl-base:{SUITE}-{hash_text(PACKAGES)[:8]}"
    if present(name):
        return name
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), mirror()]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for archive in (root / "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        container = buildah("from", "scratch")
        buildah("copy", "--quiet", container, str(root), "/")
        buildah("commit", "--quiet", "--rm", container, name)
    return name


def _settings(folder: Path) -> list[str]:
    """Mounts that give pip and uv of a build this machine's settings: none of them stays in the image."""
    pairs = {key[4:].lower().replace("_", "-"): value for key, value in os.environ.items() if key.startswith("PIP_")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.startswith("global."):
            pairs.setdefault(key.removeprefix("global."), value.strip("'\""))
    mounts = {}
    if (links := pairs.get("find-links", "")) and Path(links).is_dir():
        mounts[links] = pairs["find-links"] = "/run/find-links"
    if "cert" in pairs:
        pairs["cert"] = str(AUTHORITIES)
    (folder / "pip.conf").write_text("\n".join(["[global]", *(f"{k} = {v}" for k, v in pairs.items())]) + "\n")
    mounts[str(folder / "pip.conf")] = "/etc/pip.conf"
    links = [f'find-links = ["{pairs["find-links"]}"]'] if "find-links" in pairs else []
    index = [f'index-url = "{pairs["index-url"]}"'] if "index-url" in pairs else []
    (folder / "uv.toml").write_text("\n".join(["native-tls = true", *links, *index]) + "\n")
    mounts[str(folder / "uv.toml")] = "/etc/uv/uv.toml"
    if AUTHORITIES.exists():
        mounts[str(AUTHORITIES)] = str(AUTHORITIES)
    return [flag for source, target in mounts.items() for flag in ("--volume", f"{source}:{target}:ro")]


def _caches() -> list[str]:
    """uv's cache of this machine, writable: what `make` has downloaded is not downloaded again."""
    cache = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv"))
    cache.mkdir(parents=True, exist_ok=True)
    return ["--volume", f"{cache}:/root/.cache/uv"]


def build(image: Image) -> str:
    """Builds an image; layers that did not change are taken from buildah's own cache. Its local name."""
    prerequisites.require(prerequisites.IMAGES)
    name = f"localhost/{Path(image.dockerfile).suffix.strip('.') or 'operator'}:{image.key()}"
    if present(name):
        return name
    arguments = {"BASE": base()} | dict(image.arguments)
    given = [flag for key, value in arguments.items() for flag in ("--build-arg", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        mounts = _settings(Path(folder)) + _caches()
        flags = ["--layers", "--network", "host", "--quiet", *mounts, *given]
        buildah("bud", *flags, "--file", str(ROOT / image.dockerfile), "--tag", name, str(ROOT))
    return name


def build_shipped(role: str, requirements: str = "") -> str:
    """Builds one of the images that a release ships; `requirements` may say cpu for trainer and inference. Its local name."""
    arguments = (("REQUIREMENTS", requirements),) if requirements else ()
    return build(dataclasses.replace(SHIPPED[role], arguments=arguments))


def archive(image: Image) -> Path:
    """A docker-archive of an image under all its names, as kubelets look for them."""
    target = cache_root() / "images" / f"{image.names[0].partition(':')[0]}-{image.key()}.tar"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _export(image, target)
    return target


def _export(image: Image, target: Path) -> None:
    name = build(image)
    first, *others = (f"docker.io/library/{one}" for one in image.names)
    plain = target.with_suffix(".plain")
    plain.unlink(missing_ok=True)  # of a build that was killed
    buildah("push", "--quiet", name, f"docker-archive:{plain}:{first}")
    if others:
        _rename(plain, target, [first, *others])
        plain.unlink()
    else:
        plain.rename(target)
    _prune(target)


def _prune(newest: Path) -> None:
    """Removes archives of the same image that were made an hour ago or earlier: none is half imported any more."""
    stem = newest.stem.rpartition("-")[0]
    for path in newest.parent.glob(f"{stem}-*"):
        if path != newest and path.stat().st_mtime < time.time() - 3600:
            path.unlink()


def _rename(source: Path, target: Path, names: list[str]) -> None:
    """Copies a docker-archive of one image, with other names in its manifest."""
    partial = target.with_suffix(".partial")
    with tarfile.open(source) as old, tarfile.open(partial, "w") as new:
        for member in old:
            content = old.extractfile(member)
            if member.name == "manifest.json" and content is not None:
                text = json.dumps([json.load(content)[0] | {"RepoTags": names}]).encode()
                member.size = len(text)
                content = io.BytesIO(text)
            new.addfile(member, content)
    partial.rename(target)
    shutil.copymode(source, target)


def for_tests() -> list[Path]:
    """Archives that the end-to-end tests need: the real operator, and workers with this machine's Python."""
    prerequisites.require(prerequisites.NODES | prerequisites.IMAGES)
    return [archive(OPERATOR), archive(e2e_workers())]
