"""Settings of the operator: read from variables, all faults at once, and what they forbid."""

from __future__ import annotations

import pytest
from builders import make_job

from fp8rl_operator.settings import InvalidSettings, Settings, refusals

ALL = Settings(host_path_namespaces=("*",), remote_code_namespaces=("*",), service_account_namespaces=("*",))
HOST_PATH = {"volumes": [{"name": "x", "emptyDir": {}}, {"name": "data", "hostPath": {"path": "/data"}}]}


def test_nothing_set_serves_the_whole_cluster_and_allows_nothing_special():
    read = Settings.read({"HOME": "/root"})
    assert (read.namespaces, read.concurrency, read.host_path_namespaces, read.lease_seconds) == ((), 16, (), 15)
    assert read.images.trainer.startswith("fp8rl-trainer:")


def test_variables_are_read():
    read = Settings.read(
        {
            "FP8RL_NAMESPACES": "a, b,a",
            "FP8RL_TRAINER_IMAGE": "r.example/t@sha256:00",
            "FP8RL_HOST_PATH_NAMESPACES": "team-*",
            "FP8RL_CONCURRENCY": "4",
            "FP8RL_METRICS_ADDRESS": "::",
            "FP8RL_LOG_FORMAT": "json",
        }
    )
    assert read.namespaces == ("a", "b")
    assert read.images.trainer == "r.example/t@sha256:00"
    assert (read.host_path_namespaces, read.concurrency, read.metrics_address) == (("team-*",), 4, "::")
    assert read.log_format == "json"


def test_two_processes_have_two_names():
    assert Settings.read({}).lease_identity != Settings.read({}).lease_identity


def test_every_bad_variable_is_said_at_once_with_its_value():
    with pytest.raises(InvalidSettings) as caught:
        Settings.read(
            {
                "FP8RL_CONCURRENCY": "many",
                "FP8RL_NAMESPACES": "a,B_b",
                "FP8RL_METRICS_PORT": "70000",
                "FP8RL_LOG_FORMAT": "xml",
                "FP8RL_CONCURENCY": "3",
                "FP8RL_LEASE_SECONDS": "2",
            }
        )
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "FP8RL_CONCURENCY",
        "FP8RL_CONCURRENCY",
        "FP8RL_LEASE_SECONDS",
        "FP8RL_LOG_FORMAT",
        "FP8RL_METRICS_PORT",
        "FP8RL_NAMESPACES",
    ]
    assert "FP8RL_CONCURRENCY: value 'many': is no whole number from 1 to 256" in caught.value.faults
    assert "FP8RL_NAMESPACES: value 'a,B_b': B_b is no name of a namespace" in caught.value.faults


@pytest.mark.parametrize(
    ("spec", "path", "value"),
    [
        ({"model": {"source": {"builtin": None, "hostPath": {"path": "/m"}}}}, "spec.model.source.hostPath.path", "/m"),
        ({"orchestrator": {"volume": {"hostPath": "/o"}}}, "spec.orchestrator.volume.hostPath", "/o"),
        (
            {"rollout": {"dataset": {"volume": {"hostPath": "/d", "path": "x.jsonl"}}}},
            "spec.rollout.dataset.volume.hostPath",
            "/d",
        ),
        ({"trainer": {"template": {"spec": HOST_PATH}}}, "spec.trainer.template.spec.volumes[1].hostPath", "/data"),
        ({"inference": {"template": {"spec": HOST_PATH}}}, "spec.inference.template.spec.volumes[1].hostPath", "/data"),
    ],
)
def test_a_folder_of_the_node_is_refused_wherever_it_is_mounted(spec: dict, path: str, value: str):
    (fault,) = refusals(make_job(spec), Settings())
    assert (fault.path, fault.value) == (path, value)
    assert str(fault) == (
        f"{path}: value {value}: hostPath volumes are not allowed in namespace team by the operator's settings; remove it,"
        " or let team into FP8RL_HOST_PATH_NAMESPACES of the operator"
    )
    assert refusals(make_job(spec), ALL) == []


def test_remote_code_and_service_accounts_are_refused_outside_the_named_namespaces():
    job = make_job(
        {
            "model": {"trustRemoteCode": True},
            "trainer": {"template": {"spec": {"serviceAccountName": "admin"}}},
            "orchestrator": {"template": {"spec": {"serviceAccount": "old"}}},
        }
    )
    assert [fault.path for fault in refusals(job, Settings())] == [
        "spec.model.trustRemoteCode",
        "spec.trainer.template.spec.serviceAccountName",
        "spec.orchestrator.template.spec.serviceAccount",
    ]
    near = Settings(remote_code_namespaces=("t?am",), service_account_namespaces=("team-*", "other"))
    assert [fault.value for fault in refusals(job, near)] == ["admin", "old"]


def test_a_plain_job_is_refused_nothing():
    assert refusals(make_job(), Settings()) == []
