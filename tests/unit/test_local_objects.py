"""The local cluster's pure half: workloads, what a container gets, volumes, addresses, backoff."""

from __future__ import annotations

import itertools
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8rl_operator.local.addresses import AddressBlock
from fp8rl_operator.local.containers import Machine, expand, gpus_wanted, resolve
from fp8rl_operator.local.pods import Backoff
from fp8rl_operator.local.probes import Probe, read_probes
from fp8rl_operator.local.volumes import Folders, Mounts, make_volumes, pod_mounts
from fp8rl_operator.local.workloads import Existing, compute_change, revision


def workload(kind: str = "StatefulSet", replicas: int = 2, word: str = "a", **spec: Any) -> dict[str, Any]:
    """A small workload named w."""
    template = {"metadata": {"labels": {"app": "w"}}, "spec": {"containers": [{"name": "c", "command": [word]}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "w", "namespace": "n"},
        "spec": {"replicas": replicas, "template": template, **spec},
    }


def change(item: dict[str, Any], pods: list[Existing]) -> tuple[list[str], list[str]]:
    """Names created, uids ended."""
    numbers = itertools.count()
    found = compute_change([item], pods, lambda: f"{next(numbers):05}-uid")
    return [pod["metadata"]["name"] for pod in found.create], found.end


def there(item: dict[str, Any], name: str, terminating: bool = False) -> Existing:
    """An existing pod of a workload, its uid is its name."""
    return Existing(name, name, f"{item['kind']}/w", revision(item), terminating)


def test_a_stateful_set_makes_all_its_ordinals_at_once() -> None:
    assert change(workload(), []) == (["w-0", "w-1"], [])


def test_a_stateful_set_waits_until_the_old_pod_of_a_name_is_gone() -> None:
    item = workload()
    assert change(item, [there(item, "w-0", terminating=True), there(item, "w-1")]) == ([], [])
    assert change(item, [there(item, "w-1")]) == (["w-0"], [])


def test_on_delete_leaves_old_revisions_and_rolling_update_ends_them() -> None:
    old = there(workload(word="old"), "w-0")
    assert change(workload(replicas=1, updateStrategy={"type": "OnDelete"}), [old]) == ([], [])
    assert change(workload(replicas=1), [old]) == ([], ["w-0"])


def test_scaling_to_zero_ends_every_pod() -> None:
    item = workload(replicas=0)
    assert change(item, [there(item, "w-0"), there(item, "w-1")]) == ([], ["w-0", "w-1"])


def test_a_deployment_never_has_more_pods_than_replicas() -> None:
    item = workload("Deployment")
    old = Existing("x", "x", "Deployment/w", "other")
    assert change(item, [old, there(item, "y")]) == ([], ["x"])
    gone = Existing("x", "x", "Deployment/w", "other", terminating=True)
    assert change(item, [gone, there(item, "y")]) == ([], [])
    assert change(item, [there(item, "y")]) == ([f"w-{revision(item)}-00000"], [])


def test_pods_of_a_workload_that_is_gone_are_ended() -> None:
    assert compute_change([], [Existing("x", "x", "Deployment/w", "r")], str).end == ["x"]


def test_a_claim_template_becomes_a_volume_of_each_pod() -> None:
    item = workload(replicas=1, volumeClaimTemplates=[{"metadata": {"name": "state"}}])
    (pod,) = compute_change([item], [], lambda: "u").create
    assert pod["spec"]["volumes"] == [{"name": "state", "persistentVolumeClaim": {"claimName": "state-w-0"}}]
    assert pod["metadata"]["uid"] == "u"


POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b"}, "annotations": {"x/y": "7"}},
    "spec": {
        "volumes": [
            {"name": "config", "configMap": {"name": "cm"}},
            {"name": "token", "secret": {"secretName": "s", "items": [{"key": "token", "path": "t"}]}},
            {"name": "state", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "model", "hostPath": {"path": "/srv/models", "type": ""}},
        ],
        "containers": [
            {
                "name": "main",
                "command": ["python", "-m", "x", "--model=$(MODEL)"],
                "args": ["/state/a"],
                "env": [
                    {"name": "MODEL", "value": "/models/base"},
                    {"name": "COPY", "value": "$(MODEL)!$(NONE)$$(MODEL)"},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "SEVEN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['x/y']"}}},
                    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
                    {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "z", "key": "k", "optional": True}}},
                    {"name": "STATE", "value": "/state"},
                    {"name": "TMP", "value": "/tmp/x"},
                ],
                "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/config"},
                    {"name": "token", "mountPath": "/etc/token"},
                    {"name": "state", "mountPath": "/state"},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "model", "mountPath": "/models"},
                ],
                "resources": {"limits": {"nvidia.com/gpu": "2"}},
            }
        ],
    },
}
OBJECTS = {
    ("ConfigMap", "cm"): {
        "kind": "ConfigMap",
        "data": {"c.json": '{"model": "/models/base", "n": 1}', "t.txt": "/models"},
    },
    ("Secret", "s"): {"kind": "Secret", "data": {"token": "dG9r"}},
}


def find(kind: str, name: str) -> dict[str, Any]:
    """An object of the test."""
    return OBJECTS[kind, name]


def test_what_a_container_gets(tmp_path: Path) -> None:
    mounts = pod_mounts(POD, Folders(tmp_path))
    machine = Machine({"PATH": "/bin", "FP8RL_ATTEMPT": "9"}, threads=2)
    process = resolve(POD["spec"]["containers"][0], POD, "127.0.0.9", mounts, find, machine=machine)
    assert process.argv == [sys.executable, "-m", "x", "--model=/srv/models/base", f"{tmp_path}/claims/c/a"]
    assert process.env == {
        "OMP_NUM_THREADS": "2",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "",
        "MODEL": "/srv/models/base",
        "COPY": "/srv/models/base!$(NONE)$(MODEL)",
        "IP": "127.0.0.9",
        "SEVEN": "7",
        "KEY": "tok",
        "STATE": f"{tmp_path}/claims/c",
        "TMP": "/tmp/x",
    }


def test_the_users_own_thread_count_wins_and_gpus_are_the_pods() -> None:
    container = {"name": "c", "command": ["x"]}
    machine = Machine({"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "0,1,2"}, threads=2, gpus=("2",))
    env = resolve(container, POD, "127.0.0.9", Mounts(), find, machine=machine).env
    assert env == {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "2"}
    assert gpus_wanted(POD) == 2


def test_volumes_become_folders_and_files_with_real_paths(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    make_volumes(POD, folders, pod_mounts(POD, folders), find)
    pod = tmp_path / ".local" / "pods" / "u"
    assert (pod / "config" / "c.json").read_text() == '{\n  "model": "/srv/models/base",\n  "n": 1\n}'
    assert (pod / "config" / "t.txt").read_text() == "/models"
    assert (pod / "token" / "t").read_text() == "tok"
    assert stat.S_IMODE((pod / "token" / "t").stat().st_mode) == 0o600
    assert (tmp_path / "claims" / "c").is_dir()


def test_a_shared_volume_lies_where_the_run_says(tmp_path: Path) -> None:
    mounts = pod_mounts(POD, Folders(tmp_path, shared={"state": tmp_path / "here"}))
    assert mounts.real("/state/x") == f"{tmp_path}/here/x"
    assert mounts.real("/statement") == "/statement"


def test_a_volume_that_no_machine_has_is_refused_by_name() -> None:
    pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"volumes": [{"name": "v", "nfs": {}}], "containers": []}}
    with pytest.raises(ValueError, match="volume v of pod p: nfs cannot be had on one machine"):
        pod_mounts(pod, Folders(Path("/x")))


def test_a_host_path_that_must_exist_is_looked_for(tmp_path: Path) -> None:
    source = {"path": str(tmp_path / "no"), "type": "Directory"}
    pod = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"volumes": [{"name": "v", "hostPath": source}], "containers": []},
    }
    with pytest.raises(ValueError, match=r"volume v: hostPath .*/no is no folder"):
        make_volumes(pod, Folders(tmp_path), Mounts(), find)
    source["type"] = "DirectoryOrCreate"
    make_volumes(pod, Folders(tmp_path), Mounts(), find)
    assert (tmp_path / "no").is_dir()


def test_unknown_fields_of_the_downward_api_and_missing_objects_are_errors() -> None:
    unknown = {
        "name": "c",
        "command": ["x"],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}],
    }
    with pytest.raises(ValueError, match=r"fieldRef spec\.x of pod p: not known"):
        resolve(unknown, POD, "a", Mounts(), find, machine=Machine({}, 1))
    with pytest.raises(ValueError, match="container c of pod p names no command"):
        resolve({"name": "c", "args": ["x"]}, POD, "a", Mounts(), find, machine=Machine({}, 1))


@pytest.mark.parametrize(
    ("text", "result"), [("$(A)", "1"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("$A", "$A"), ("x$(A)y$(A)", "x1y1")]
)
def test_references_expand_as_kubernetes_expands_them(text: str, result: str) -> None:
    assert expand(text, {"A": "1"}) == result


def test_restarts_back_off_as_the_kubelet_does() -> None:
    assert [Backoff().delay(n) for n in range(1, 9)] == [0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


def test_two_runs_never_hold_the_same_addresses() -> None:
    one, two = AddressBlock.take("same"), AddressBlock.take("same")
    try:
        assert one.prefix != two.prefix
        assert [one.allocate(), one.allocate()] == [f"{one.prefix}.1", f"{one.prefix}.2"]
        one.release(f"{one.prefix}.1")
        assert one.allocate() == f"{one.prefix}.3"
    finally:
        one.close()
        two.close()
    again = AddressBlock.take("same")
    assert again.prefix == one.prefix
    again.close()


def test_probes_are_read_with_the_defaults_of_kubernetes() -> None:
    container = {
        "name": "c",
        "ports": [{"name": "http", "containerPort": 80}],
        "readinessProbe": {"httpGet": {"path": "/r", "port": "http"}},
        "livenessProbe": {"tcpSocket": {"port": 81}, "periodSeconds": 2},
    }
    assert read_probes(container) == {
        "readiness": Probe("/r", 80, 0.0, 10.0, 1.0, 1, 3),
        "liveness": Probe(None, 81, 0.0, 2.0, 1.0, 1, 3),
    }
    with pytest.raises(ValueError, match="container c has no port named http"):
        read_probes({"name": "c", "readinessProbe": {"httpGet": {"port": "http"}}})
