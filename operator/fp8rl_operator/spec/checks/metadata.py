"""Names and the model's source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from fp8rl_operator.errors import Fault
from fp8rl_operator.names import (
    MAX_JOB_NAME,
    MAX_NAME,
    RESERVED_LABEL_PREFIXES,
    generated_pod_name,
    longest_pod_name,
    pool_component,
)
from fp8rl_operator.spec.base import DNS_LABEL
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob
from fp8rl_operator.spec.pods import PodTemplate

SAMPLER_ROOM = MAX_NAME - len(generated_pod_name("", pool_component("")))


def name_is_a_label(job: FP8RLJob) -> Iterator[Fault]:
    """Services of the job carry its name, so it is a DNS label that starts with a letter."""
    if not re.fullmatch(DNS_LABEL, job.name):
        yield Fault(
            "metadata.name",
            job.name,
            "names Services, which take lower-case letters, digits and dashes, and start with a letter",
            f"match {DNS_LABEL}",
        )


def names_fit(job: FP8RLJob) -> Iterator[Fault]:
    """Names of pods are labels of at most 63 characters; Kubernetes would cut them silently or refuse the pod."""
    longest = longest_pod_name(job.name)
    if len(longest) > MAX_NAME:
        yield Fault(
            "metadata.name",
            job.name,
            f"has {len(job.name)} characters, and its longest pod name {longest} has {len(longest)}, over {MAX_NAME}",
            f"use at most {MAX_JOB_NAME} characters",
        )
        return
    for index, sampler in enumerate(job.spec.samplers):
        longest = generated_pod_name(job.name, pool_component(sampler.name))
        if len(longest) > MAX_NAME:
            room = SAMPLER_ROOM - len(job.name)
            yield Fault(
                f"spec.samplers[{index}].name",
                sampler.name,
                f"makes the pod name {longest} of {len(longest)} characters, over {MAX_NAME}",
                f"use at most {room} characters beside this job name" if room > 0 else "shorten metadata.name",
            )


def model_has_one_source(job: FP8RLJob) -> Iterator[Fault]:
    """Exactly one of pvc, hostPath, hub, builtin; without a source, a path."""
    model = job.spec.model
    if model.source is None:
        if model.path is None:
            yield Fault(
                "spec.model",
                None,
                "names no model: neither path nor source is set",
                "set source.hub.repository, source.pvc, source.hostPath or source.builtin, or path to a local folder",
            )
        return
    given = [name for name in ("pvc", "hostPath", "hub", "builtin") if _source(job, name)]
    if len(given) != 1:
        yield Fault(
            "spec.model.source",
            ", ".join(given) or None,
            f"has {len(given)} sources and needs exactly one",
            "keep one of pvc, hostPath, hub, builtin",
        )


def model_path_fits_its_source(job: FP8RLJob) -> Iterator[Fault]:
    """A path below the volume, none with hub and builtin; a revision with a hub only."""
    model, source = job.spec.model, job.spec.model.source
    if model.revision is not None and (source is None or source.hub is None):
        yield Fault("spec.model.revision", model.revision, "only a hub has revisions", "remove it, or set source.hub")
    if model.path is None or source is None:
        return
    if source.hub or source.builtin:
        yield Fault(
            "spec.model.path", model.path, "the files of hub and builtin models have a place of their own", "remove it"
        )
    elif PurePosixPath(model.path).is_absolute() or ".." in PurePosixPath(model.path).parts:
        yield Fault(
            "spec.model.path",
            model.path,
            "is not below the source's root",
            "write a relative path without `..`, or leave it out",
        )


def labels_are_not_reserved(job: FP8RLJob) -> Iterator[Fault]:
    """Labels that the operator selects by cannot come from a template."""
    for path, template in _templates(job):
        for key in template.metadata.labels:
            if key.startswith(RESERVED_LABEL_PREFIXES):
                yield Fault(
                    f"{path}.metadata.labels.{key}",
                    template.metadata.labels[key],
                    "the operator finds its own pods by this label",
                    f"use a label outside {' and '.join(RESERVED_LABEL_PREFIXES)}",
                )


def _source(job: FP8RLJob, name: str) -> bool:
    source = job.spec.model.source
    return source is not None and getattr(source, {"hostPath": "host_path"}.get(name, name)) is not None


def _templates(job: FP8RLJob) -> list[tuple[str, PodTemplate]]:
    spec = job.spec
    samplers = [(f"spec.samplers[{i}].template", sampler.template) for i, sampler in enumerate(spec.samplers)]
    return [
        ("spec.trainer.template", spec.trainer.template),
        ("spec.orchestrator.template", spec.orchestrator.template),
        ("spec.inference.template", spec.inference.template),
        *samplers,
    ]


LABELS_RULE = " && ".join(f"!k.startsWith('{prefix}')" for prefix in RESERVED_LABEL_PREFIXES)

CHECKS = (
    Check(
        name_is_a_label,
        reads=("metadata.name",),
        cel=(
            Cel(
                "",
                f"self.metadata.name.matches('{DNS_LABEL}')",
                f"metadata.name must match {DNS_LABEL}: it names Services",
            ),
        ),
    ),
    Check(
        names_fit,
        reads=("metadata.name", "spec.samplers"),
        cel=(
            Cel(
                "",
                f"size(self.metadata.name) <= {MAX_JOB_NAME}",
                f"metadata.name must have at most {MAX_JOB_NAME} characters",
                filled=f"metadata.name has %d characters; with -inference-<10>-<5> behind it a pod name of %d, over {MAX_NAME}: use at"
                f" most {MAX_JOB_NAME}",
                values=("size(self.metadata.name)", f"size(self.metadata.name) + {MAX_NAME - MAX_JOB_NAME}"),
            ),
            Cel(
                "",
                "!has(self.spec) || !has(self.spec.samplers) || self.spec.samplers.all(s, size(self.metadata.name) +"
                f" size(s.name) <= {SAMPLER_ROOM})",
                f"metadata.name and samplers[].name together must have at most {SAMPLER_ROOM} characters: pod names end at 63",
            ),
        ),
    ),
    Check(
        model_has_one_source,
        reads=("spec.model.path", "spec.model.source"),
        cel=(
            Cel(
                "spec.model",
                "has(self.source) || has(self.path)",
                "names no model: set source, or path to a local folder",
            ),
            Cel(
                "spec.model.source",
                "[has(self.pvc), has(self.hostPath), has(self.hub), has(self.builtin)].filter(x, x).size() == 1",
                "needs exactly one of pvc, hostPath, hub, builtin",
            ),
        ),
    ),
    Check(
        model_path_fits_its_source,
        reads=("spec.model.path", "spec.model.source", "spec.model.revision"),
        cel=(
            Cel(
                "spec.model",
                "!has(self.revision) || (has(self.source) && has(self.source.hub))",
                "revision: only a hub has revisions; remove it, or set source.hub",
            ),
            Cel(
                "spec.model",
                "!has(self.path) || !has(self.source) || !(has(self.source.hub) || has(self.source.builtin))",
                "path: the files of hub and builtin models have a place of their own; remove it",
            ),
            Cel(
                "spec.model",
                "!has(self.path) || !has(self.source) || !(self.path.startsWith('/') ||"
                " self.path.matches('(^|/)[.][.](/|$)'))",
                "path: must be below the source's root; write a relative path without `..`",
            ),
        ),
    ),
    Check(
        labels_are_not_reserved,
        reads=("spec.trainer.template", "spec.orchestrator.template", "spec.inference.template", "spec.samplers"),
        cel=tuple(
            Cel(
                f"{path}.template.metadata.labels",
                f"self.all(k, {LABELS_RULE})",
                "labels under fp8rl.dev/ and app.kubernetes.io/ are the operator's",
            )
            for path in ("spec.trainer", "spec.orchestrator", "spec.inference", "spec.samplers[]")
        ),
    ),
)
