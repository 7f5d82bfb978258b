"""Children on a real API server: what is made, what is left alone, what is put right, and that nothing more is written."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml
from control_plane_kit import ROOT, ControlPlane
from kube_kit import Operator, body, operator

from fp8rl_operator import names
from fp8rl_operator.kube.compare import signed
from fp8rl_operator.kube.kinds import CHILDREN
from fp8rl_operator.manifests import Images, build_objects
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.reconcile import reconcile

SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))
OVERRIDES: dict[str, Any] = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
    "imagePullSecrets": [{"name": "pull"}],
    "terminationGracePeriodSeconds": 5,
    "topologySpreadConstraints": [
        {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "volumes": [
        {"name": "scratch2", "emptyDir": {"sizeLimit": "1024Mi"}},
        {"name": "claim", "ephemeral": {"volumeClaimTemplate": {"spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}}}},
        {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ],
    "initContainers": [{"name": "first", "image": "i", "command": ["true"], "restartPolicy": "Always"}],
    "containers": [
        {
            "name": "main",
            "image": "other:1",
            "env": [
                {"name": "EMPTY", "value": ""},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1000m"}}},
                {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": False}}},
            ],
            "resources": {"requests": {"cpu": "0.5", "memory": "2048Mi"}, "limits": {"cpu": "1000m", "memory": "2Gi"}},
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", "1"]}}},
            "volumeMounts": [{"mountPath": "/scratch2", "name": "scratch2", "readOnly": False}],
        },
        {"name": "side", "image": "side", "ports": [{"containerPort": 53, "protocol": "UDP"}], "args": []},
    ],
}  # fmt: skip
TEMPLATE = {"metadata": {"labels": {"team": "a"}, "annotations": {"note": ""}}, "spec": OVERRIDES}
EVERYTHING: dict[str, Any] = {
    "trainer": {
        "template": TEMPLATE,
        "checkpoint": {"everySteps": 1, "volumeClaimTemplate": {"storage": "1024Mi", "accessModes": ["ReadWriteOnce"]}},
    },
    "inference": {"template": TEMPLATE},
    "orchestrator": {
        "template": TEMPLATE,
        "resources": {"requests": {"cpu": "0.5"}, "limits": {"memory": "1024Mi"}},
        "volume": {"volumeClaimTemplate": {"storage": "0.5Gi", "accessModes": ["ReadWriteOnce"]}},
    },
    "topology": {"nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}], "gpuProduct": ["NVIDIA-H200"]},
    "priorityClassName": "system-node-critical",
    "queueName": "q",
}


def children(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """Everything with our label, `Kind/name` to resourceVersion."""
    kinds = ",".join(kind.plural for kind in CHILDREN)
    found = plane.get(kinds, "", namespace)["items"]
    ours = [item for item in found if item["metadata"].get("labels", {}).get(names.LABEL_MANAGED_BY)]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in ours}


async def settled(running: Operator, namespace: str, name: str = "job") -> None:
    """Pass until nothing is written any more."""
    for _ in range(5):
        await running.sync(namespace)
        if not (await running.run(name)).outcome.changed:
            return
    pytest.fail(f"still writing: {running.writes}")


CASES = {"small": body("n"), "everything": body("n", EVERYTHING)} | {
    path.stem: yaml.safe_load(path.read_text()) for path in SAMPLES
}


@pytest.mark.parametrize("case", CASES)
async def test_a_second_pass_and_one_after_a_restart_write_nothing(plane, namespace, case) -> None:
    plane.apply({**CASES[case], "metadata": {"name": "job"}}, namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        first = await running.run()
        assert first.outcome.failed == ()
        assert first.outcome.clashes == ()
        assert {code for verb, _, code in running.calls if verb == "apply"} == {201}
        assert [kind for verb, kind, _ in running.calls if verb in {"get", "delete"}] == []
        before = children(plane, namespace)
        assert set(before) == set(first.outcome.changed)

        await running.sync(namespace)
        second = await running.run()
        assert (second.outcome.changed, running.child_writes) == ((), [])

        running.restart()
        await running.sync(namespace)
        third = await running.run()
        assert (third.outcome.changed, running.child_writes) == ((), [])
        assert third.seen.token == first.seen.token or first.seen.token is None


async def test_an_apply_that_changes_nothing_keeps_the_resource_version(plane, namespace) -> None:
    plane.apply(body(namespace, EVERYTHING), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        objects = build_objects(running.job(), Plan(0, 0, 0, 0.0, running=True), "token")
        services = [signed(item) for item in objects if item["kind"] == "Service"]
        versions = [[(await running.api.apply(item))["metadata"]["resourceVersion"] for item in services] for _ in "ab"]
        assert versions[0] == versions[1]


@pytest.mark.parametrize("kind", ["configmap", "service", "statefulset", "secret"])
async def test_a_foreign_object_with_a_childs_name_is_untouched_and_told(plane, namespace, kind) -> None:
    suffix = "control" if kind == "secret" else "trainer"
    foreign = {
        "configmap": {"apiVersion": "v1", "kind": "ConfigMap", "data": {"mine": "1"}},
        "secret": {"apiVersion": "v1", "kind": "Secret", "data": {"token": base64.b64encode(b"mine").decode()}},
        "service": {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 1}]}},
        "statefulset": {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "spec": {
                "selector": {"matchLabels": {"a": "b"}},
                "template": {
                    "metadata": {"labels": {"a": "b"}},
                    "spec": {"containers": [{"name": "c", "image": "i"}]},
                },
            },
        },
    }[kind]
    plane.apply({**foreign, "metadata": {"name": f"job-{suffix}"}}, namespace=namespace)
    before = plane.get(kind, f"job-{suffix}", namespace)
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        done = await running.run()
        assert done.outcome.clashes == (f"{before['kind']}/job-{suffix}",)
        after = plane.get(kind, f"job-{suffix}", namespace)
        after["metadata"].pop("resourceVersion")
        before["metadata"].pop("resourceVersion")
        assert {key: value for key, value in after.items() if key != "status"} == {
            key: value for key, value in before.items() if key != "status"
        }
        ready = next(item for item in done.status["conditions"] if item["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "NameClash")
        assert f"job-{suffix}" in ready["message"]
        workloads = {name for name in children(plane, namespace) if name.startswith(("StatefulSet", "Deployment"))}
        assert workloads == (
            {"Deployment/job-inference", "StatefulSet/job-orchestrator"} if kind == "statefulset" else set()
        )

        plane.kubectl("delete", kind, f"job-{suffix}", "-n", namespace)
        await settled(running, namespace)
        assert f"{before['kind']}/job-{suffix}" in children(plane, namespace)


@pytest.mark.parametrize(
    ("kind", "name", "patch"),
    [
        (
            "statefulset",
            "job-trainer",
            '{"spec":{"template":{"spec":{"containers":[{"name":"main","image":"evil"}]}}}}',
        ),
        ("statefulset", "job-trainer", '{"spec":{"replicas":3}}'),
        ("deployment", "job-inference", '{"spec":{"replicas":7}}'),
        ("service", "job-inference", '{"spec":{"selector":{"app":"other"}}}'),
        ("configmap", "job-trainer", '{"data":{"config.json":"{}"}}'),
        ("secret", "job-control", '{"data":{"token":"b3RoZXI="}}'),
        ("configmap", "job-trainer", '{"metadata":{"annotations":{"fp8rl.dev/applied":"0"}}}'),
        ("networkpolicy", "job-workers", '{"spec":{"podSelector":{"matchLabels":{"a":"b"}}}}'),
        ("pdb", "job-trainer", '{"spec":{"maxUnavailable":1}}'),
        ("serviceaccount", "job-workers", '{"automountServiceAccountToken":true}'),
        ("configmap", "job-trainer", '{"metadata":{"labels":{"fp8rl.dev/job-uid":null}}}'),
        ("configmap", "job-trainer", '{"metadata":{"labels":{"app.kubernetes.io/managed-by":"me"}}}'),
    ],
)
async def test_a_child_edited_by_hand_is_put_right_in_one_pass(plane, namespace, kind, name, patch) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        before = plane.get(kind, name, namespace)
        plane.kubectl("patch", kind, name, "-n", namespace, "--type=strategic", "-p", patch)
        await running.sync(namespace)
        await running.run()
        after = plane.get(kind, name, namespace)
        assert after.get("spec") == before.get("spec")
        assert after.get("data") == before.get("data")
        assert after["metadata"]["labels"] == before["metadata"]["labels"]
        assert after["metadata"].get("annotations") == before["metadata"].get("annotations")
        assert {verb for verb, _ in running.child_writes} == {"apply"}


async def test_a_deleted_control_secret_comes_back_with_the_token_that_the_processes_have(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        before = plane.get("secret", "job-control", namespace)
        plane.kubectl("delete", "secret", "job-control", "-n", namespace)
        await running.sync(namespace)
        await running.run()
        after = plane.get("secret", "job-control", namespace)
        assert (after["data"], after["metadata"]["uid"] == before["metadata"]["uid"]) == (before["data"], False)


@pytest.mark.parametrize("label", [names.LABEL_MANAGED_BY, names.LABEL_JOB_UID])
async def test_a_child_whose_label_is_taken_away_is_put_right_after_the_watch_told_its_end(
    plane, namespace, label
) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        before = plane.get("configmap", "job-trainer", namespace)
        plane.kubectl("label", "configmap", "job-trainer", "-n", namespace, f"{label}-")
        version = plane.get("configmap", "job-trainer", namespace)["metadata"]["resourceVersion"]
        # what a watch by label says: DELETED, the object as it was, the version of the edit
        running.store.drop_child({**before, "metadata": {**before["metadata"], "resourceVersion": version}})
        done = await running.run()
        assert (done.outcome.failed, done.outcome.clashes) == ((), ())
        after = plane.get("configmap", "job-trainer", namespace)["metadata"]
        assert (after["uid"], after["labels"]) == (before["metadata"]["uid"], before["metadata"]["labels"])
        assert (await running.run()).outcome.changed == ()


async def test_optional_children_that_are_not_wanted_any_more_go_and_nothing_else_does(plane, namespace) -> None:
    plane.apply(body(namespace), body(namespace, name="other"), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        await settled(running, namespace, "other")
        mine = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "mine",
                "labels": {names.LABEL_JOB_UID: running.job().uid, names.LABEL_MANAGED_BY: names.FIELD_MANAGER},
            },
        }
        plane.apply(mine, namespace=namespace)
        before = children(plane, namespace)
        plane.apply(
            body(namespace, {"podDisruptionBudget": "disabled", "networkPolicy": "disabled"}), namespace=namespace
        )
        await running.sync(namespace)
        done = await running.run()
        gone = {name for name in before if name.startswith(("NetworkPolicy/job-", "PodDisruptionBudget/job-"))}
        assert len(gone) >= 4
        assert set(done.outcome.changed) == gone
        assert set(before) - set(children(plane, namespace)) == gone


async def test_what_a_spec_no_longer_names_goes_from_the_child(plane, namespace) -> None:
    selector = {
        "topology": {"nodeSelector": {"pool": "a"}},
        "inference": {"template": {"metadata": {"labels": {"a": "b"}}}},
    }
    plane.apply(body(namespace, selector), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        template = plane.get("deployment", "job-inference", namespace)["spec"]["template"]
        assert (template["spec"]["nodeSelector"], template["metadata"]["labels"]["a"]) == ({"pool": "a"}, "b")
        plane.kubectl("replace", "-f", "-", "-n", namespace, stdin=json.dumps(body(namespace)))
        await settled(running, namespace)
        template = plane.get("deployment", "job-inference", namespace)["spec"]["template"]
        assert "nodeSelector" not in template["spec"]
        assert "a" not in template["metadata"]["labels"]


async def test_two_jobs_of_one_name_in_two_namespaces_have_children_of_their_own(plane, namespace) -> None:
    second = f"{namespace}-b"
    plane.kubectl("create", "namespace", second)
    for place in (namespace, second):
        plane.apply(body(place), namespace=place)
    async with operator(plane) as first, operator(plane) as other:
        await settled(first, namespace)
        await settled(other, second)
        assert children(plane, namespace).keys() == children(plane, second).keys()
        tokens = {plane.get("secret", "job-control", place)["data"]["token"] for place in (namespace, second)}
        assert len(tokens) == 2
    plane.kubectl("delete", "namespace", second, "--wait=false")


async def test_a_job_made_again_under_the_same_name_adopts_nothing_of_the_old_one(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        old = running.job().uid
        plane.kubectl("delete", "fp8rljob", "job", "-n", namespace, "--cascade=orphan")
        plane.kubectl("label", "configmap", "job-trainer", "-n", namespace, "kept=1")
        # a leftover that still names its old owner, as until the garbage collector has come to it
        owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "job", "uid": old, "controller": True}
        patch = yaml.safe_dump({"metadata": {"ownerReferences": [owner]}})
        plane.apply(body(namespace), namespace=namespace)
        plane.kubectl("patch", "secret", "job-control", "-n", namespace, "--type=merge", "-p", patch)
        await running.sync(namespace)
        assert running.job().uid != old
        done = await running.run()
        told = {*done.outcome.clashes, *(name for name, _ in done.outcome.failed)}
        assert "ConfigMap/job-trainer" in told
        assert not any(name.startswith(("StatefulSet", "Deployment")) for name in done.outcome.changed)
        assert plane.get("configmap", "job-trainer", namespace)["metadata"]["labels"][names.LABEL_JOB_UID] == old


async def test_a_template_is_frozen_across_another_image_of_the_operator(plane, namespace) -> None:
    plane.apply(body(namespace), namespace=namespace)
    async with operator(plane) as running:
        await settled(running, namespace)
        kinds = [("statefulset", "job-trainer"), ("deployment", "job-inference"), ("statefulset", "job-orchestrator")]
        before = {name: plane.get(kind, name, namespace) for kind, name in kinds}
        running.restart()
        newer = Images(trainer="t:2", inference="i:2", orchestrator="o:2")
        for number in range(3):
            await running.sync(namespace)
            running.calls.clear()
            done = await reconcile(running.cluster, running.job(), running.clock(), newer)
            assert done.outcome.failed == ()
            if number:
                assert running.child_writes == []
        for kind, name in kinds:
            after = plane.get(kind, name, namespace)
            assert after["spec"] == before[name]["spec"]
        assert len(plane.get("replicaset", "", namespace)["items"]) == 1

        plane.kubectl(
            "patch", "fp8rljob", "job", "-n", namespace, "--type=merge", "-p", '{"spec":{"inference":{"replicas":3}}}'
        )
        await running.sync(namespace)
        await reconcile(running.cluster, running.job(), running.clock(), newer)
        deployment = plane.get("deployment", "job-inference", namespace)
        assert deployment["spec"]["replicas"] == 3
        assert deployment["spec"]["template"] == before["job-inference"]["spec"]["template"]

        plane.kubectl(
            "patch", "fp8rljob", "job", "-n", namespace, "--type=merge", "-p", '{"spec":{"rollout":{"batchSize":16}}}'
        )
        await running.sync(namespace)
        await reconcile(running.cluster, running.job(), running.clock(), newer)
        deployment = plane.get("deployment", "job-inference", namespace)
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "i:2"


async def test_an_unknown_field_of_a_template_is_the_specs_fault_and_is_tried_once(plane, namespace) -> None:
    plane.apply(body(namespace, {"trainer": {"template": {"spec": {"nosuch": 1}}}}), namespace=namespace)
    async with operator(plane) as running:
        await running.sync(namespace)
        done = await running.run()
        assert dict(done.outcome.failed).keys() == {"StatefulSet/job-trainer"}
        assert (
            ".spec.template.spec.nosuch: field not declared in schema"
            in dict(done.outcome.failed)["StatefulSet/job-trainer"]
        )
        assert [
            code for verb, kind, code in running.calls if (verb, kind) == ("apply", "StatefulSet") and code >= 400
        ] == [500]
