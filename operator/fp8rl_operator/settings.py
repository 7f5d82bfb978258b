"""Settings of the operator's process, from `FP8RL_*` variables; and what they forbid in a job.

Everything that is wrong with the variables is said at once (`InvalidSettings`). Lists are separated by commas; names of
namespaces in the `..._NAMESPACES` variables may be shell patterns: `*` allows all, empty allows none.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.errors import Fault
from fp8rl_operator.manifests import Images
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.base import DNS_SUBDOMAIN

PREFIX = "FP8RL_"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LEASE_SECONDS_LEAST = 3
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(DNS_SUBDOMAIN)
PATTERN = re.compile(r"[-a-z0-9*?\[\]!]{1,253}")
IMAGE = re.compile(r"[^\s,]{1,1024}")


class InvalidSettings(ValueError):  # noqa: N818 - named as InvalidSpec is
    """Raised when variables cannot be read. One line each."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


def own_namespace() -> str:
    """The namespace of this pod; `default` outside a cluster."""
    return OWN_NAMESPACE.read_text(encoding="utf-8").strip() if OWN_NAMESPACE.is_file() else "default"


def own_identity() -> str:
    """A name that no other process has; in a pod the Deployment gives the pod's."""
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"


def listed(pattern: re.Pattern[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """A reader of lists whose items have a form."""

    def read(text: str) -> tuple[str, ...]:
        items = tuple(part.strip() for part in text.split(",") if part.strip())
        wrong = [item for item in items if not pattern.fullmatch(item)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} is no {what}")
        return tuple(dict.fromkeys(items))

    return read


def formed(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    """A reader of one word of a form."""

    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"is no {what}")
        return text

    return read


def whole(least: int, most: int, unit: str = "") -> Callable[[str], int]:
    """A reader of whole numbers between two."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"is no whole number{unit} from {least} to {most}")
        return int(text)

    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return text

    return read


def setting(read: Callable[[str], Any], default: Any, help_text: str) -> Any:
    """A field with its reader and its words. A callable default is asked once per process."""
    metadata = {"read": read, "help": help_text}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


PATTERNS = listed(PATTERN, "pattern of namespaces (letters, digits, - and * ? [ ])")
PORT = whole(0, 65535)
ADDRESS = formed(re.compile(r"[0-9a-fA-F.:]{2,45}"), "IP address")
OCI = formed(IMAGE, "image")


@dataclass(frozen=True)
class Settings:
    """How this process runs. Each field is read from `FP8RL_` and its name in capitals."""

    namespaces: tuple[str, ...] = setting(
        listed(LABEL, "name of a namespace"), (), "Namespaces whose jobs are served. Empty: all of the cluster."
    )
    operator_namespace: str = setting(
        formed(LABEL, "name of a namespace"),
        "",
        "Where the operator's pods run: jobs' NetworkPolicies let them in. Empty: any.",
    )
    trainer_image: str = setting(OCI, Images.trainer, "Image of the trainer's pods.")
    inference_image: str = setting(OCI, Images.inference, "Image of the engines' pods.")
    orchestrator_image: str = setting(OCI, Images.orchestrator, "Image of the orchestrator's pod.")
    host_path_namespaces: tuple[str, ...] = setting(
        PATTERNS, (), "Namespaces whose jobs may mount folders of nodes (hostPath), in templates too."
    )
    remote_code_namespaces: tuple[str, ...] = setting(
        PATTERNS, (), "Namespaces whose jobs may set model.trustRemoteCode."
    )
    service_account_namespaces: tuple[str, ...] = setting(
        PATTERNS, (), "Namespaces whose jobs may name a service account in a template."
    )
    concurrency: int = setting(whole(1, 256), 16, "Passes at a time.")
    resync_seconds: int = setting(
        whole(10, 86_400, " of seconds"), 600, "Every so often all objects are listed again, whatever the watches said."
    )
    lease_name: str = setting(formed(SUBDOMAIN, "name of an object"), "fp8rl-operator", "Lease of the leader.")
    lease_namespace: str = setting(
        formed(LABEL, "name of a namespace"), own_namespace, "Namespace of that Lease. Unset: the pod's own."
    )
    lease_identity: str = setting(
        formed(re.compile(r"[-.\w]{1,253}"), "name of a pod"), own_identity, "Name of this process in the Lease."
    )
    lease_seconds: int = setting(
        whole(LEASE_SECONDS_LEAST, 300, " of seconds"), 15, "So long after its last word a leader counts as lost."
    )
    metrics_address: str = setting(ADDRESS, "0.0.0.0", "Address that /metrics listens at.")
    metrics_port: int = setting(PORT, 8080, "Port of /metrics. 0: any free one, told in the log.")
    health_address: str = setting(ADDRESS, "0.0.0.0", "Address that /healthz and /readyz listen at.")
    health_port: int = setting(PORT, 8081, "Port of /healthz and /readyz. 0: any free one, told in the log.")
    log_format: str = setting(one_of("text", "json"), "text", "One line for people, or one JSON object, per record.")
    log_level: str = setting(one_of("debug", "info", "warning", "error"), "info", "Least level that is logged.")

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """The settings that a process environment gives.

        Raises:
            InvalidSettings: with every variable that cannot be read, and every one under the prefix that does not exist.
        """
        known = {variable(item.name): item for item in fields(cls)}
        values: dict[str, Any] = {}
        faults = []
        for name, text in sorted(environ.items()):
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                faults.append(f"{name}: there is no such setting; known: {', '.join(sorted(known))}")
                continue
            try:
                values[known[name].name] = known[name].metadata["read"](text.strip())
            except ValueError as error:
                faults.append(f"{name}: value {text!r}: {error}")
        if faults:
            raise InvalidSettings(faults)
        return cls(**values)

    @property
    def images(self) -> Images:
        """Image of each role."""
        return Images(self.trainer_image, self.inference_image, self.orchestrator_image)


def variable(name: str) -> str:
    """The variable of a field."""
    return f"{PREFIX}{name.upper()}"


def refusals(job: FP8RLJob, settings: Settings) -> list[Fault]:
    """What the operator's settings forbid in the job's namespace, each with the way out."""
    rules = (
        ("hostPath volumes are", settings.host_path_namespaces, "host_path_namespaces", host_paths(job)),
        ("trustRemoteCode is", settings.remote_code_namespaces, "remote_code_namespaces", remote_code(job)),
        ("a service account is", settings.service_account_namespaces, "service_account_namespaces", accounts(job)),
    )
    return [
        Fault(
            path,
            value,
            f"{what} not allowed in namespace {job.namespace} by the operator's settings",
            f"remove it, or let {job.namespace} into {variable(name)} of the operator",
        )
        for what, allowed, name, found in rules
        if not any(fnmatchcase(job.namespace, pattern) for pattern in allowed)
        for path, value in found
    ]


def remote_code(job: FP8RLJob) -> Iterator[tuple[str, Any]]:
    """Where the job asks to run code that came with a model."""
    if job.spec.model.trust_remote_code:
        yield "spec.model.trustRemoteCode", True


def host_paths(job: FP8RLJob) -> Iterator[tuple[str, Any]]:
    """Every folder of a node that the job or one of its templates mounts."""
    spec = job.spec
    source = None if spec.model.source is None else spec.model.source.host_path
    if source is not None:
        yield "spec.model.source.hostPath.path", source.path
    places = {
        "spec.orchestrator.volume": spec.orchestrator.volume,
        "spec.rollout.dataset.volume": spec.rollout.dataset.volume,
        "spec.releases.volume": None if spec.releases is None else spec.releases.volume,
    }
    for path, place in places.items():
        if place is not None and place.host_path is not None:
            yield f"{path}.hostPath", place.host_path
    for path, template in templates(job):
        for index, volume in enumerate(items(template.get("volumes"))):
            if "hostPath" in volume:
                value = volume["hostPath"]
                yield f"{path}.volumes[{index}].hostPath", value.get("path") if isinstance(value, dict) else value


def accounts(job: FP8RLJob) -> Iterator[tuple[str, Any]]:
    """Every service account that a template names."""
    for path, template in templates(job):
        for key in ("serviceAccountName", "serviceAccount"):
            if template.get(key):
                yield f"{path}.{key}", template[key]


def templates(job: FP8RLJob) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod specs that overrides give, with their paths."""
    spec = job.spec
    for role, part in ((names.TRAINER, spec.trainer), (names.ORCHESTRATOR, spec.orchestrator)):
        yield f"spec.{role}.template.spec", part.template.spec
    yield f"spec.{names.INFERENCE}.template.spec", spec.inference.template.spec
    for index, sampler in enumerate(spec.samplers):
        yield f"spec.samplers[{index}].template.spec", sampler.template.spec


def items(value: Any) -> list[dict[str, Any]]:
    """The records of a list of a template; nothing where it is none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
