"""What the API takes and this release does not do: refused by the commands, with the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_body, make_job

from fp8rl_operator.cli import main
from fp8rl_operator.manifests.configs import trainer_config
from fp8rl_operator.not_built import NOT_BUILT, not_built
from fp8rl_operator.spec import inspect, parse
from fp8rl_operator.validate import load
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.trainer.loading import check_backend

ROOT = Path(__file__).resolve().parents[2]
SAMPLER = {
    "releases": {"everySteps": 2, "volume": {"claimName": "r"}},
    "samplers": [{"name": "a", "gpusPerReplica": 0}],
}
MEGATRON = {"trainer": {"backend": "megatron", "gpusPerReplica": 1, "offload": None}}


def readme_job() -> str:
    found = re.search(r"## A job\n+```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readmes_own_job_is_valid_and_the_trainer_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(readme_job())
    assert main(["validate", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid\n"
    check_backend(trainer_config(parse(yaml.safe_load(readme_job()))))


@pytest.mark.parametrize(("backend", "gpus", "offload"), [("torch", 0, "none"), ("megatron", 1, "optimizer")])
def test_an_offload_that_is_not_given_is_what_the_backend_does(backend: str, gpus: int, offload: str) -> None:
    job = make_job({"trainer": {"backend": backend, "gpusPerReplica": gpus, "offload": None}})
    assert job.spec.trainer.offload is None
    assert trainer_config(job).offload == offload


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (MEGATRON, ["spec.trainer.backend"]),
        ({"trainer": {"offload": "optimizer"}}, ["spec.trainer.offload"]),
        ({"trainer": {"compile": True, "recompileLimit": 8}}, ["spec.trainer.compile", "spec.trainer.recompileLimit"]),
        ({"precision": {"quantizeAt": "engine"}}, ["spec.precision.quantizeAt"]),
        ({"weightSync": {"mode": "inPlace"}}, ["spec.weightSync.mode"]),
        (
            {"inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2, "expert": 2}}},
            ["spec.inference.parallelism.expert"],
        ),
        ({"topology": {"numa": "required"}}, ["spec.topology.numa"]),
        ({"rollout": {"topP": "0.9"}}, ["spec.rollout.topP"]),
        ({"rollout": {"loss": {"name": "grpo", "grpoClipHigh": "0.28"}}}, []),
        ({"rollout": {"loss": {"name": "grpo", "klTau": "0.1"}}}, ["spec.rollout.loss.klTau"]),
        ({"rollout": {"loss": {"name": "ipo", "klTau": "0.1"}}}, []),
        ({"rollout": {"dataset": {"builtin": {"name": "arithmetic"}}}}, ["spec.rollout.dataset.builtin"]),
        ({"rollout": {"dataset": {"builtin": {"name": "reverse-text"}}}}, []),
        ({"rollout": {"dataset": {"split": "test"}}}, ["spec.rollout.dataset.split"]),
        ({"rollout": {"dataset": {"shuffle": False}}}, ["spec.rollout.dataset.shuffle"]),
        ({"rollout": {"dataset": {"shuffle": False, "volume": {"path": "a.jsonl"}}}}, []),
        ({"model": {"chatTemplate": "{{ messages }}"}}, ["spec.model.chatTemplate"]),
        ({"gate": {"required": True}}, ["spec.gate.required"]),
        (SAMPLER, ["spec.releases", "spec.samplers"]),
        ({}, []),
    ],
)
def test_what_is_not_built_is_named_by_its_field(spec: dict[str, Any], fields: list[str]) -> None:
    faults = not_built(make_job(spec), "machine")
    assert [fault.path for fault in faults if fault.level == "error"] == fields
    assert all(fault.remedy and fault.reason.startswith("not built in this release") for fault in faults)


def test_numa_required_is_the_kubelets_in_a_cluster_and_is_refused_on_one_machine() -> None:
    required = {"topology": {"numa": "required"}}
    alone = not_built(make_job(required), "machine")
    assert [(fault.level, fault.path) for fault in alone] == [("error", "spec.topology.numa")]
    assert str(alone[0]).startswith(
        "spec.topology.numa: value required: not built in this release for one machine: one machine has no kubelet"
    )
    claim = {"trainer": {"checkpoint": {"claimName": "c"}}}
    assert not not_built(make_job(required | claim), "cluster")
    two = required | claim | {"inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}}}
    assert [(fault.level, fault.path) for fault in not_built(make_job(two), "cluster")] == [
        ("warning", "spec.topology.numa")
    ]


def test_sync_over_gpus_is_gloo_with_any_cast() -> None:
    gpus = {"trainer": {"gpusPerReplica": 1}, "inference": {"gpusPerReplica": 1}}
    job = make_job(gpus | {"weightSync": {"transport": "nccl", "castBackend": "triton"}})
    assert [str(fault) for fault in not_built(job, "machine")] == [
        (
            "spec.weightSync.transport: value nccl: not built in this release, neither for one machine nor for a cluster: "
            "between machines the one transport of this release is gloo, on one machine there is ipc too; set transport: auto, gloo or ipc"
        ),
    ]


def test_shared_memory_is_for_one_machine() -> None:
    job = make_job({"weightSync": {"transport": "ipc"}, "trainer": {"checkpoint": {"claimName": "c"}}})
    assert [fault for fault in not_built(job, "machine") if "transport" in fault.path] == []
    assert [str(fault) for fault in not_built(job, "cluster")] == [
        (
            "spec.weightSync.transport: value ipc: not built in this release for a cluster: trainer and engines are pods with network "
            "namespaces of their own, and shared memory is handed over within one; set transport: auto, or gloo"
        )
    ]


def test_a_refusal_tells_the_line_and_is_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(make_body({"gate": {"required": True}})))
    line = path.read_text().splitlines().index("    required: true") + 1
    for words in (["validate", str(path)], ["run", str(path), "--out", str(tmp_path / "out")]):
        assert main(words) == 1
        assert f"{path}:{line}: spec.gate.required: value true: not built in this release" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_does_nothing_on_one_machine_is_a_warning_of_run_only() -> None:
    job = make_job(
        {"ttlSecondsAfterFinished": 60, "cleanupPolicy": "keepPods", "trainer": {"checkpoint": {"everySteps": 0}}}
    )
    found = not_built(job, "machine")
    assert [(fault.path, fault.level) for fault in found] == [
        ("spec.ttlSecondsAfterFinished", "warning"),
        ("spec.cleanupPolicy", "warning"),
    ]
    assert not_built(job, "cluster") == []


def test_checkpoints_that_go_with_the_pod_are_a_warning_for_a_cluster() -> None:
    assert [(fault.path, fault.level) for fault in not_built(make_job(), "cluster")] == [
        ("spec.trainer.checkpoint", "warning")
    ]
    assert not_built(make_job(), "machine") == []
    for checkpoint in ({"claimName": "c"}, {"volumeClaimTemplate": {"storage": "1Gi"}}, {"everySteps": 0}):
        assert not_built(make_job({"trainer": {"checkpoint": checkpoint}}), "cluster") == []


def test_the_samples_for_cpus_run_and_the_one_for_two_gpus_is_a_valid_job_that_waits_for_its_release() -> None:
    found = {}
    for path in sorted((ROOT / "deploy" / "samples").glob("*.yaml")):
        job, faults = load(path)
        assert job is not None, faults
        found[path.stem] = [fault.path for fault in not_built(job, "machine")]
    assert found == {
        "reverse-text": [],
        "two-gpus": ["spec.trainer.backend", "spec.trainer.offload", "spec.weightSync.transport"],
    }


def test_every_line_names_a_field_and_the_defaults_of_a_torch_job_pass_all_lines() -> None:
    assert len({(line.field, line.world) for line in NOT_BUILT}) == len(NOT_BUILT)
    assert not_built(make_job({"trainer": {"offload": None}}), "machine") == []


@pytest.mark.parametrize(
    "trainer",
    [
        {"backend": "megatron", "gpusPerReplica": 1},
        {"replicas": 2},
        {"offload": "optimizer"},
        {"compile": True},
        {"megatronArgs": {"x": 1}},
        {"parallelism": {"tensor": 2}},
    ],
    ids=lambda trainer: next(iter(trainer)),
)
def test_what_the_trainer_refuses_when_it_starts_is_refused_before(trainer: dict[str, Any]) -> None:
    job, faults = inspect(make_body({"trainer": trainer}))
    assert job is not None
    with pytest.raises(InvalidInputError):
        check_backend(trainer_config(job))
    assert [fault for fault in [*faults, *not_built(job, "machine")] if fault.level == "error"]
