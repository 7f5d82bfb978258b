"""Folders of nodes and files below a volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob

BACKWARD = "(^|/)[.][.](/|$)"


def host_paths_are_absolute(job: FP8RLJob) -> Iterator[Fault]:
    """A folder of the node is an absolute path without `..`: Kubernetes refuses any other."""
    for path, folder in _host_paths(job):
        if not folder.startswith("/") or ".." in PurePosixPath(folder).parts:
            yield Fault(path, folder, "is no absolute path without `..`", "write the folder's whole path")


def prompts_are_below_their_volume(job: FP8RLJob) -> Iterator[Fault]:
    """The file of prompts lies below the claim or the folder that holds it."""
    volume = job.spec.rollout.dataset.volume
    if volume is None or (volume.claim_name is None and volume.host_path is None):
        return
    if ".." in PurePosixPath(volume.path).parts:
        yield Fault(
            "spec.rollout.dataset.volume.path",
            volume.path,
            "is not below its volume",
            "write a path without `..`",
        )


def _host_paths(job: FP8RLJob) -> Iterator[tuple[str, str]]:
    spec = job.spec
    found = {
        "spec.model.source.hostPath.path": spec.model.source
        and spec.model.source.host_path
        and spec.model.source.host_path.path,
        "spec.orchestrator.volume.hostPath": spec.orchestrator.volume and spec.orchestrator.volume.host_path,
        "spec.releases.volume.hostPath": spec.releases and spec.releases.volume.host_path,
        "spec.rollout.dataset.volume.hostPath": spec.rollout.dataset.volume and spec.rollout.dataset.volume.host_path,
    }
    for path, folder in found.items():
        if folder:
            yield path, folder


HOST_PATHS = (
    "spec.model.source.hostPath.path",
    "spec.orchestrator.volume.hostPath",
    "spec.releases.volume.hostPath",
    "spec.rollout.dataset.volume.hostPath",
)

CHECKS = (
    Check(
        host_paths_are_absolute,
        reads=HOST_PATHS,
        cel=tuple(
            Cel(
                path,
                f"self.startsWith('/') && !self.matches('{BACKWARD}')",
                "must be an absolute path without `..`",
            )
            for path in HOST_PATHS
        ),
    ),
    Check(
        prompts_are_below_their_volume,
        reads=("spec.rollout.dataset.volume",),
        cel=(
            Cel(
                "spec.rollout.dataset.volume",
                f"!(has(self.claimName) || has(self.hostPath)) || !self.path.matches('{BACKWARD}')",
                "path: must be below the volume; write it without `..`",
            ),
        ),
    ),
)
