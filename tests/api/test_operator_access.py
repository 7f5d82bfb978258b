"""The operator with the rights that `deploy/operator` gives it: none is missing and none is idle (the API server's audit log says so)."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane_kit import ROOT, ControlPlane
from operator_kit import (
    CHILDREN,
    OperatorProcess,
    children,
    condition,
    eventually,
    has_children,
    manifest,
    operators,
    ready_reason,
)
from raw_api import RawApi

from fp8rl_operator import names
from fp8rl_operator.kube.kinds import WORKLOADS

DEPLOY = ROOT / "deploy/operator"
SYSTEM = "fp8rl-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:fp8rl-operator"
# asked of the authorizer by an admission plugin that this API server does not have on
NOT_SEEN = {("fp8rl.dev", "fp8rljobs/finalizers", "update")}
DONE = {200, 201, 404}  # what is not there was asked for all the same
NO_PODS = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
Right = tuple[str, str, str]


def granted(*files: str) -> set[Right]:
    """API group, resource and verb of every rule."""
    found: set[Right] = set()
    for file in files:
        for item in yaml.safe_load_all((DEPLOY / file).read_text()):
            for rule in item.get("rules", ()):
                found |= {
                    (group, resource, verb)
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
    return found


def mine(plane: ControlPlane) -> list[dict[str, Any]]:
    """Answered requests of the operator that RBAC judges."""
    return [
        entry
        for entry in plane.audited()
        if entry["user"]["username"] == ACCOUNT and "resource" in entry.get("objectRef", {})
    ]


def right_of(entry: dict[str, Any]) -> Iterator[Right]:
    """The rights that a request needed; an apply that made its object needed two."""
    place = entry["objectRef"]
    resource = "/".join(filter(None, (place["resource"], place.get("subresource"))))
    yield place.get("apiGroup", ""), resource, entry["verb"]
    if entry["verb"] == "patch" and code_of(entry) == 201:
        yield place.get("apiGroup", ""), resource, "create"


def code_of(entry: dict[str, Any]) -> int:
    return int(entry["responseStatus"]["code"])


def refused(plane: ControlPlane) -> list[str]:
    return [entry["requestURI"] for entry in mine(plane) if code_of(entry) == 403]


def used(plane: ControlPlane) -> set[Right]:
    return {right for entry in mine(plane) if code_of(entry) in DONE for right in right_of(entry)}


def owned(job: dict[str, Any], kind: str, api_version: str, **body: Any) -> dict[str, Any]:
    """An object that looks like a child of the job which no plan asks for: an older release could have made it."""
    metadata = job["metadata"]
    labels = {
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
        names.LABEL_JOB_UID: metadata["uid"],
        names.LABEL_ROLE: names.TRAINER,
    }
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": metadata["name"], "uid": metadata["uid"]}
    meta = {"name": "stale", "labels": labels, "ownerReferences": [{**owner, "controller": True}]}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **body}


def stale_children(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One of each kind."""
    selector = {"matchLabels": {"x": "stale"}}
    template = {"metadata": {"labels": {"x": "stale"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    workload = {"replicas": 0, "selector": selector, "template": template}
    return [
        owned(job, "ConfigMap", "v1", data={"a": "b"}),
        owned(job, "Secret", "v1"),
        owned(job, "ServiceAccount", "v1"),
        owned(job, "Service", "v1", spec={"clusterIP": "None", "selector": {"x": "stale"}}),
        owned(job, "NetworkPolicy", "networking.k8s.io/v1", spec={"podSelector": selector}),
        owned(job, "PodDisruptionBudget", "policy/v1", spec={"selector": selector, "maxUnavailable": 1}),
        owned(job, "Deployment", "apps/v1", spec=workload),
        owned(job, "StatefulSet", "apps/v1", spec={**workload, "serviceName": "stale"}),
    ]


def age_a_pod(plane: ControlPlane, namespace: str) -> None:
    """A pod of an attempt that is over is ended; its StatefulSet makes the next one."""
    pod = ("pod", "job-trainer-0", "-n", namespace)
    uid = ("get", *pod, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")
    old = eventually(lambda: plane.kubectl(*uid), 30)
    plane.kubectl("annotate", "--overwrite", *pod, f"{names.ANNOTATION_ATTEMPT}=7")
    eventually(lambda: plane.kubectl(*uid) not in {"", old}, 30)


def prepare(plane: ControlPlane, namespace: str) -> None:
    """A job that has ended, whose time to live is over: an operator that starts believes its status."""
    plane.apply(manifest("ended", {"ttlSecondsAfterFinished": 1}), namespace=namespace)
    time = "2026-01-01T00:00:00Z"
    done = {
        "type": names.COMPLETE,
        "status": "True",
        "reason": names.STEPS_DONE,
        "message": "",
        "lastTransitionTime": time,
    }
    status = {"status": {"startTime": time, "completionTime": time, "conditions": [done]}}
    flags = ("-n", namespace, "--subresource=status", "--type=merge")
    plane.kubectl("patch", "fp8rljob", "ended", *flags, "-p", json.dumps(status))


def strangers(plane: ControlPlane, namespace: str, job: str, *, workloads: bool) -> list[dict[str, Any]]:
    """Objects of nobody with the names that children of `job` would have."""
    bodies = {body["kind"]: body for body in stale_children({"metadata": {"uid": "", "name": ""}})}
    taken = [key.split("/") for key in children(plane, namespace) if "/job-" in key]
    return [
        {**bodies[kind], "metadata": {"name": name.replace("job-", f"{job}-", 1)}}
        for kind, name in taken
        if (kind in WORKLOADS) == workloads
    ]


def clash(plane: ControlPlane, namespace: str, job: str, *, workloads: bool) -> None:
    """Every name that a job needs is somebody else's."""
    theirs = strangers(plane, namespace, job, workloads=workloads)
    plane.apply(*theirs, manifest(job), namespace=namespace)
    eventually(lambda: ready_reason(plane, namespace, job) == names.NAME_CLASH, 30)
    message = condition(plane.get("fp8rljob", job, namespace), "Ready")["message"]
    assert all(body["metadata"]["name"] in message for body in theirs), message


def succeed_a_namesake(plane: ControlPlane, namespace: str) -> None:
    """A job comes while a child of a deleted one of its name is still there, held by a finalizer."""
    plane.apply(manifest("twin"), namespace=namespace)
    secret = ("secret", "twin-control", "-n", namespace)
    eventually(lambda: plane.kubectl("get", *secret, "--ignore-not-found"), 30)
    held = {"metadata": {"finalizers": ["fp8rl.dev/test"]}}
    plane.kubectl("patch", *secret, "-p", json.dumps(held))
    plane.kubectl("delete", "fp8rljob", "twin", "-n", namespace)
    plane.apply(manifest("twin"), namespace=namespace)
    words = "the one of a deleted job of the same name is still there"
    eventually(lambda: words in condition(plane.get("fp8rljob", "twin", namespace), "Ready").get("message", ""), 30)
    plane.kubectl("patch", *secret, "--type=merge", "-p", json.dumps({"metadata": {"finalizers": None}}))
    eventually(lambda: len([key for key in children(plane, namespace) if "/twin-" in key]) == CHILDREN, 60)


@contextlib.contextmanager
def annotated_again_and_again(plane: ControlPlane, namespace: str, job: str) -> Iterator[None]:
    """Somebody writes to a job faster than a pass of it takes."""
    api, enough = RawApi(plane.kubeconfig), threading.Event()
    path = f"/apis/fp8rl.dev/v1alpha1/namespaces/{namespace}/fp8rljobs/{job}"

    def write() -> None:
        for number in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
            body = {"metadata": {"annotations": {"number": str(number)}}}
            code, answer = api.request("PATCH", path, body, "application/merge-patch+json")
            assert code == 200, answer

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def conflicts(plane: ControlPlane) -> int:
    """Status writes of the operator that came too late."""
    return len([entry for entry in mine(plane) if "subresource" in entry["objectRef"] and code_of(entry) == 409])


def write_a_status_too_late(plane: ControlPlane, namespace: str, job: str) -> None:
    """A status is due, again and again, while the job changes under the operator's hands; the last one holds."""
    with annotated_again_and_again(plane, namespace, job):
        for suspend in itertools.cycle((True, False)):
            plane.apply(manifest(job, {"suspend": suspend}), namespace=namespace)
            if conflicts(plane):
                break
    plane.apply(manifest(job, {"suspend": True}), namespace=namespace)
    eventually(lambda: ready_reason(plane, namespace, job) == "SuspendedByUser", 30)


def exercise(plane: ControlPlane, process: OperatorProcess, namespace: str) -> None:
    """Everything that the operator does to the API."""
    gone = ("get", "fp8rljob", "ended", "-n", namespace, "--ignore-not-found")
    eventually(lambda: not plane.kubectl(*gone), 30)
    claims = {"trainer": {"checkpoint": {"claimName": "checkpoints"}}}
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim_body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints"},
        "spec": claim,
    }
    plane.apply(NO_PODS, claim_body, manifest("claim", claims), namespace=namespace)
    eventually(lambda: ready_reason(plane, namespace, "claim") == names.QUOTA_EXCEEDED, 60)
    plane.kubectl("delete", "resourcequota", "none", "-n", namespace)
    plane.apply(manifest("job"), namespace=namespace)
    eventually(lambda: len([key for key in children(plane, namespace) if "/job-" in key]) == CHILDREN)
    job = plane.get("fp8rljob", "job", namespace)
    plane.apply(*stale_children(job), namespace=namespace)
    eventually(lambda: not [key for key in children(plane, namespace) if key.endswith("/stale")], 30)
    age_a_pod(plane, namespace)
    write_a_status_too_late(plane, namespace, "job")
    succeed_a_namesake(plane, namespace)
    clash(plane, namespace, "clash", workloads=False)
    clash(plane, namespace, "rival", workloads=True)
    plane.kubectl("delete", "fp8rljob", "--all", "-n", namespace)
    eventually(lambda: not children(plane, namespace), 60)
    process.at_rest()


def test_cluster_wide_no_right_is_missing_and_none_is_idle(own_plane, tmp_path: Path):
    plane = own_plane(audit=True)
    for file in ("00-namespace.yaml", "10-account.yaml", "20-cluster-role.yaml"):
        plane.kubectl("apply", "-f", str(DEPLOY / file))
    prepare(plane, "default")
    account = plane.kubeconfig_of(ACCOUNT, "system:serviceaccounts")
    with operators(account, tmp_path) as start:
        process = start(lease_namespace=SYSTEM).wait_leading()
        template = {"storage": "1Gi", "storageClassName": "fast"}
        plane.apply(manifest("class", {"trainer": {"checkpoint": {"volumeClaimTemplate": template}}}))
        eventually(lambda: "fast" in json.dumps(plane.get("fp8rljob", "class").get("status", {})), 30)
        exercise(plane, process, "default")
        process.stop()
    assert refused(plane) == []
    rights = granted("10-account.yaml", "20-cluster-role.yaml") - NOT_SEEN
    assert used(plane) == rights


def test_in_one_namespace_no_right_is_missing_and_none_is_idle(own_plane, tmp_path: Path):
    plane = own_plane(audit=True)
    for file in ("00-namespace.yaml", "10-account.yaml"):
        plane.kubectl("apply", "-f", str(DEPLOY / file))
    plane.kubectl("create", "namespace", "team")
    plane.kubectl("apply", "-n", "team", "-f", str(DEPLOY / "namespaced/role.yaml"))
    prepare(plane, "team")
    account = plane.kubeconfig_of(ACCOUNT, "system:serviceaccounts")
    with operators(account, tmp_path) as start:
        process = start(lease_namespace=SYSTEM, namespaces="team").wait_leading()
        exercise(plane, process, "team")
        process.stop()
    assert refused(plane) == []
    rights = granted("10-account.yaml", "namespaced/role.yaml") - NOT_SEEN
    assert used(plane) == rights


def test_at_rest_the_api_server_sees_no_write_but_the_lease(own_plane, tmp_path: Path):
    plane = own_plane(audit=True)
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start().wait_leading()
        plane.apply(manifest("a"), manifest("b"))
        has_children(plane, "default", 2 * CHILDREN)
        process.at_rest()
        before = len(plane.audited())
        process.at_rest(20)
        writes = [
            (entry["verb"], entry["objectRef"]["resource"])
            for entry in plane.audited()[before:]
            if entry["userAgent"].startswith("fp8rl-operator") and entry["verb"] not in {"get", "list", "watch"}
        ]
    assert {resource for _, resource in writes} <= {"leases"}
    assert len(writes) >= 10


@pytest.mark.parametrize("file", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_the_manifests_are_taken_by_the_api_server_as_they_are(plane: ControlPlane, file: str):
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(DEPLOY / "00-namespace.yaml"))
    plane.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(DEPLOY / file))
