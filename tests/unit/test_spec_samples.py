"""The samples: each is a valid job, without a warning, and what its name says."""

from pathlib import Path

import pytest
import yaml

from fp8rl_operator.spec import FP8RLJob, parse
from fp8rl_operator.validate import load, validate_file

SAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "samples").glob("*.yaml"))


def sample(name: str) -> FP8RLJob:
    path = next(path for path in SAMPLES if path.stem == name)
    job, faults = load(path)
    assert job is not None, faults
    return job


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_has_no_fault_and_no_warning(path: Path):
    assert validate_file(path) == []
    assert parse(yaml.safe_load(path.read_text())).name == path.stem


def test_reverse_text_runs_on_cpus_with_blockwise_pow2_weights_on_two_engines():
    spec = sample("reverse-text").spec
    assert (spec.trainer.backend, spec.trainer.gpus_per_replica, spec.inference.gpus_per_replica) == ("torch", 0, 0)
    assert spec.model.source is not None
    assert spec.model.source.builtin is not None
    assert spec.model.source.builtin.name == "reverse-text-tiny"
    assert (spec.precision.recipe, spec.precision.wire, spec.precision.scale_format) == (
        "blockwise",
        "blockwise",
        "pow2",
    )
    assert (spec.inference.replicas, spec.rollout.environment.id) == (2, "reverse-text")
    assert spec.rollout.max_off_policy_steps == 2


def test_two_gpus_trains_with_megatron_on_one_h200_and_serves_on_another():
    spec = sample("two-gpus").spec
    assert (spec.trainer.backend, spec.trainer.gpus_per_replica, spec.inference.gpus_per_replica) == ("megatron", 1, 1)
    assert spec.topology.gpu_product == ("NVIDIA-H200",)
    assert (spec.precision.recipe, spec.precision.wire) == ("auto", "auto")
