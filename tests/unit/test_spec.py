"""Parsing: defaults, forms of values, all faults at once."""

import subprocess
import sys
from typing import Any

import pytest
from builders import make_body, make_job

from fp8rl_operator.errors import Fault, InvalidSpec, short
from fp8rl_operator.names import MAX_JOB_NAME, child_name, longest_pod_name, pool_component
from fp8rl_operator.spec import FP8RLJob, inspect, parse
from fp8rl_operator.spec.base import Model, format_decimal
from fp8rl_operator.spec.cards import capability
from fp8rl_operator.spec.checks import CHECKS
from fp8rl_operator.spec.fields import fields_of, find, limits, model_of, path_of
from fp8rl_operator.spec.layers import matches
from fp8rl_workers.weights.specs.patterns import compile_pattern


def models(model: type[Model] = FP8RLJob) -> list[type[Model]]:
    below = [model_of(info.annotation) for info in fields_of(model).values()]
    return [model, *(found for item in below if item is not None for found in models(item))]


def test_every_field_has_a_description_that_is_a_sentence():
    for model in models():
        assert model.__doc__
        for name, info in fields_of(model).items():
            assert info.description, f"{model.__name__}.{name}"
            assert info.description.endswith("."), f"{model.__name__}.{name}"


def test_every_required_field_has_an_example_or_is_a_record():
    for model in models():
        for name, info in fields_of(model).items():
            assert not info.is_required() or info.examples or model_of(info.annotation), f"{model.__name__}.{name}"


def test_every_number_of_the_spec_has_a_range_and_every_string_list_and_map_a_bound():
    for model in models():
        if model.__name__ in ("FP8RLJob", "Metadata"):
            continue
        for name, info in fields_of(model).items():
            schema = model.model_json_schema()["properties"][name]
            kinds = [schema, *schema.get("anyOf", [])]
            found = limits(info.annotation, info.metadata)
            if any(kind.get("type") in ("integer", "number") for kind in kinds):
                assert {"ge", "gt"} & set(found), f"{model.__name__}.{name}"
                assert {"le", "lt"} & set(found), f"{model.__name__}.{name}"
            if any(kind.get("type") in ("string", "array", "object") and "enum" not in kind for kind in kinds):
                bounded = "max_length" in found or model_of(info.annotation) or any("const" in kind for kind in kinds)
                assert bounded, f"{model.__name__}.{name}"


def test_decimals_are_taken_as_strings_and_as_numbers():
    for given, held in (("5e-4", 0.0005), (0.0005, 0.0005), ("1", 1.0), (1, 1.0), ("1E-6", 1e-06)):
        assert (
            make_job({"trainer": {"optimizer": {"learningRate": given}}}).spec.trainer.optimizer.learning_rate == held
        )


def test_decimals_are_written_as_strings_that_read_back_the_same():
    job = make_job({"limits": {"mismatchKL": {"warn": "0.015", "stop": "1e-1"}}})
    dumped = job.spec.limits.model_dump(by_alias=True)["mismatchKL"]
    assert dumped == {"warn": "0.015", "stop": "0.1"}
    assert float(format_decimal(1e-07)) == 1e-07


@pytest.mark.parametrize("word", ["", "abc", "1,5", "0x10", "1e", "nan", "inf", "--1", "1" * 33])
def test_a_decimal_that_is_no_number_is_refused(word: str):
    (fault,) = inspect(make_body({"rollout": {"temperature": word}}))[1]
    assert (fault.path, fault.reason) == ("spec.rollout.temperature", "is no decimal number")
    assert fault.remedy == 'write a number such as "0.5" or "5e-4"'


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_decimal_that_is_not_finite_is_refused(number: float):
    (fault,) = inspect(make_body({"rollout": {"temperature": number}}))[1]
    assert fault.reason == "must be a finite number"


def test_values_are_not_converted_from_another_type():
    spec = {
        "suspend": "true",
        "seed": "3",
        "cleanupPolicy": 1,
        "model": {"revision": 7},
        "evaluation": [],
        "rollout": {"stop": "x"},
    }
    assert [str(fault) for fault in inspect(make_body(spec))[1]] == [
        "spec.suspend: value true: must be true or false; take the quotes away",
        "spec.seed: value 3: must be a whole number; take the quotes away",
        'spec.model.revision: value 7: must be a string; write "7"',
        "spec.rollout.stop: value x: must be a list",
        "spec.evaluation: value []: must be a mapping of fields",
        "spec.cleanupPolicy: value 1: is not one of keepNothing, keepPods",
    ]


def test_an_unknown_field_is_refused_with_the_nearest_name():
    spec = {"precison": {}, "trainer": {"learning_rate": 1, "num_gpus": 8}, "rollout": {"max_off_policy_steps": 2}}
    assert [str(fault) for fault in inspect(make_body(spec))[1]] == [
        (
            "spec.trainer.learning_rate: value 1: unknown field; known here: backend, replicas, gpusPerReplica, parallelism, optimizer,"
            " tokensPerMicroBatch, offload, freezeMoeRouter, compile, recompileLimit, megatronArgs, checkpoint, template"
        ),
        (
            "spec.trainer.num_gpus: value 8: unknown field; known here: backend, replicas, gpusPerReplica, parallelism, optimizer,"
            " tokensPerMicroBatch, offload, freezeMoeRouter, compile, recompileLimit, megatronArgs, checkpoint, template"
        ),
        "spec.rollout.max_off_policy_steps: value 2: unknown field; did you mean maxOffPolicySteps?",
        "spec.precison: value {}: unknown field; did you mean precision?",
    ]


def test_a_field_that_belongs_elsewhere_is_pointed_there():
    assert str(inspect(make_body({"trainer": {"gradClip": 1}}))[1][0]) == (
        "spec.trainer.gradClip: value 1: unknown field: belongs to the optimizer; write spec.trainer.optimizer.gradClip"
    )


def test_a_missing_field_is_named_with_its_meaning_and_an_example():
    (fault,) = inspect(make_body({"rollout": {"steps": None}}))[1]
    assert str(fault) == "spec.rollout.steps: is required; add steps, for example 100: Optimizer steps of the whole job"


def test_all_faults_are_found_at_once_also_those_over_several_fields():
    spec = {
        "seed": -1,
        "nope": 1,
        "trainer": {"offload": "full", "optimizer": {"gradClip": "1.0", "learningRate": None}},
        "inference": {"minReplicas": 3},
        "rollout": {"batchSize": 30, "steps": None},
    }
    with pytest.raises(InvalidSpec) as raised:
        parse(make_body(spec, name="A"))
    assert sorted(fault.path for fault in raised.value.faults) == [
        "metadata.name",
        "spec.inference.minReplicas",
        "spec.nope",
        "spec.rollout.batchSize",
        "spec.rollout.steps",
        "spec.seed",
        "spec.trainer.optimizer.gradClip",
        "spec.trainer.optimizer.learningRate",
    ]


def test_a_rule_that_reads_a_faulty_field_is_left_out():
    faults = inspect(make_body({"rollout": {"batchSize": "x", "groupSize": 7}}))[1]
    assert [fault.path for fault in faults] == ["spec.rollout.batchSize"]


def test_a_manifest_without_spec_names_what_is_missing_once():
    assert [str(fault) for fault in inspect({})[1]] == [
        "apiVersion: is required; add apiVersion, for example fp8rl.dev/v1alpha1: Version of the API",
        "kind: is required; add kind, for example FP8RLJob: Kind of the object",
        "metadata: is required; add metadata: Name, namespace, labels",
        "spec: is required; add spec: What the user asks for",
    ]


@pytest.mark.parametrize("body", [None, "job", 3, ["a"]])
def test_a_body_that_is_no_mapping_is_refused(body: Any):
    (fault,) = inspect(body)[1]
    assert (fault.reason, fault.remedy) == ("is no mapping of fields", "start with apiVersion, kind, metadata and spec")


def test_nulls_are_dropped_as_the_api_server_does():
    body = make_body()
    body["spec"] |= {"seed": None, "precision": None, "evaluation": {"everySteps": None}}
    body["spec"]["inference"]["engineArgs"] = {"a": None}
    job = parse(body)
    assert (job.spec.seed, job.spec.precision.recipe, job.spec.evaluation.every_steps) == (0, "auto", 0)
    assert job.spec.inference.engine_args == {"a": None}


def test_status_and_the_rest_of_metadata_pass_through():
    job = make_job(status={"step": 3, "anything": [1]}, managedFields=[{"manager": "kubectl"}], labels={"a": "b"})
    assert job.status == {"step": 3, "anything": [1]}
    assert (job.name, job.namespace, job.metadata.labels) == ("job", "team", {"a": "b"})


def test_warnings_alone_do_not_refuse_a_job():
    spec = {
        "trainer": {"backend": "megatron", "gpusPerReplica": 1},
        "inference": {"gpusPerReplica": 1},
        "precision": {"recipe": "blockwise"},
        "topology": {"gpuProduct": ["NVIDIA-B200"]},
    }
    job, faults = inspect(make_body(spec))
    assert [fault.level for fault in faults] == ["warning"]
    assert parse(make_body(spec)) == job


def test_a_job_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        make_job().spec.seed = 3


def test_every_rule_reads_fields_that_exist():
    for check in CHECKS:
        for path in check.reads:
            location = tuple(part.removesuffix("[]") for part in path.split("."))
            assert find(FP8RLJob, location)[1] is not None, f"{check.name}: {path}"


def test_every_rule_is_said_to_the_api_server_or_says_why_not():
    for check in CHECKS:
        assert check.cel or check.beyond_cel or check.by_schema, check.name


def test_patterns_mean_the_same_modules_as_the_workers_say():
    patterns = [
        "mlp.gate",
        "q_proj",
        "self_attn",
        "layers.1",
        "*",
        "mlp.*",
        "model.layers.?.mlp",
        "re:.*gate",
        "re:model\\..*",
    ]
    modules = [
        "model.layers.1.self_attn.q_proj",
        "model.layers.11.mlp.gate_up_proj",
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.experts.0.gate_proj",
        "lm_head",
    ]
    for pattern in patterns:
        for module in modules:
            assert matches(pattern, module) == compile_pattern(pattern)(module), (pattern, module)


def test_mlp_gate_is_anchored():
    assert matches("mlp.gate", "model.layers.0.mlp.gate")
    assert not matches("mlp.gate", "model.layers.0.mlp.gate_up_proj")


def test_names_of_children_end_at_63_characters():
    job = "a" * MAX_JOB_NAME
    assert MAX_JOB_NAME == 36
    assert len(longest_pod_name(job)) == 63
    assert child_name("job", pool_component("b")) == "job-sampler-b"
    assert longest_pod_name("job", ("bb",)) == "job-sampler-bb-xxxxxxxxxx-xxxxx"


def test_cards_are_known_by_their_label():
    assert capability("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb") == (9, 0)
    assert capability("NVIDIA-GB200") == (10, 0)
    assert capability("NVIDIA-L40S-SHARED") == (8, 9)
    assert capability("NVIDIA-RTX-6000-Ada-Generation") == (8, 9)
    assert capability("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition") == (12, 0)
    assert capability("Tesla-T4") == (7, 5)
    assert capability("NVIDIA-L400") is None


def test_a_fault_reads_as_path_value_reason_remedy():
    assert str(Fault("spec.x", 3, "is odd", "use 4")) == "spec.x: value 3: is odd; use 4"
    assert str(Fault("", None, "is empty", "")) == "is empty"
    assert str(Fault("spec.x", False, "is off", "")) == "spec.x: value false: is off"
    assert short("a" * 300) == "a" * 199 + "…"
    assert path_of(("spec", "samplers", 0, "name")) == "spec.samplers[0].name"


def test_importing_the_spec_loads_no_heavy_library():
    code = (
        "import sys, fp8rl_operator.spec, fp8rl_operator.validate;"
        "print(sorted({'torch', 'vllm', 'kopf', 'kubernetes', 'aiohttp', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
