"""What is refused, each with field, value, arithmetic and way out: the exact lines that a user reads."""

from typing import Any

from builders import make_body

from fp8rl_operator.spec import inspect
from fp8rl_workers.inference.owned_args import OWNED_ENGINE_ARGS, SHORT_NAMES

GPUS = {
    "trainer": {"backend": "megatron", "gpusPerReplica": 8, "offload": "optimizer"},
    "inference": {"replicas": 4, "gpusPerReplica": 1},
}


def faults_of(spec: dict[str, Any] | None = None, level: str = "error", **metadata: Any) -> list[str]:
    return [str(fault) for fault in inspect(make_body(spec, **metadata))[1] if fault.level == level]


def gpu_faults_of(spec: dict[str, Any], level: str = "error") -> list[str]:
    trainer, inference = spec.get("trainer", {}), spec.get("inference", {})
    both = {"trainer": GPUS["trainer"] | trainer, "inference": GPUS["inference"] | inference}
    return faults_of({**spec, **both}, level)


def test_full_offload_with_gradient_clipping_is_refused():
    assert faults_of({"trainer": {"offload": "full", "optimizer": {"gradClip": "1.0"}}}) == [
        (
            "spec.trainer.optimizer.gradClip: value 1.0: offload full updates each parameter as soon as its gradient is on the host,"
            " before the norm of all gradients, which clipping divides by, is known; remove gradClip (unset means none), or set"
            " offload: optimizer"
        )
    ]


def test_full_offload_needs_no_other_field_switched_off():
    assert gpu_faults_of({"trainer": {"offload": "full"}}) == []


def test_every_offload_value_stands_alone_and_clips_nothing_by_default():
    for offload in ("none", "optimizer", "full"):
        job, faults = inspect(make_body({"trainer": {"offload": offload}}))
        assert faults == []
        assert job.spec.trainer.optimizer.grad_clip is None


def test_an_optimizer_that_is_not_built_is_refused_by_name():
    assert faults_of({"trainer": {"offload": "full", "optimizer": {"name": "adam"}}}) == [
        "spec.trainer.optimizer.name: value adam: is not one of adamw, signsgd; did you mean adamw?"
    ]
    assert faults_of({"trainer": {"offload": "full", "optimizer": {"name": "signsgd"}}}) == []


def test_a_parallelism_that_does_not_divide_the_gpus_is_refused_with_the_product():
    layout = {"parallelism": {"tensor": 3, "pipeline": 2, "context": 1}}
    assert gpu_faults_of({"trainer": layout}) == [
        (
            "spec.trainer.parallelism: value 'tensor 3, pipeline 2, context 1': 3 x 2 x 1 = 6 does not divide replicas 1 x"
            " gpusPerReplica 8 = 8 GPUs; choose a product that divides 8, or replicas and gpusPerReplica that are a multiple of 6"
        )
    ]
    assert gpu_faults_of({"trainer": layout | {"replicas": 3}}) == []


def test_an_expert_parallelism_that_does_not_divide_the_gpus_is_refused_with_the_product():
    assert gpu_faults_of({"trainer": {"parallelism": {"tensor": 2, "expert": 8}}}) == [
        (
            "spec.trainer.parallelism.expert: value 8: expert tensor 2 x expert 8 x pipeline 1 = 16 does not divide replicas 1 x"
            " gpusPerReplica 8 = 8 GPUs; choose an expert parallelism whose product divides 8, or set"
            " megatronArgs.expert_tensor_parallel_size"
        )
    ]


def test_the_experts_own_tensor_parallelism_is_taken_from_megatron_args():
    trainer = {"parallelism": {"tensor": 2, "expert": 8}, "megatronArgs": {"expert_tensor_parallel_size": 1}}
    assert gpu_faults_of({"trainer": trainer}) == []


def test_a_name_whose_longest_pod_name_is_over_63_is_refused_with_the_count():
    assert faults_of(name="a" * 36) == []
    assert faults_of(name="a" * 37) == [
        (
            f"metadata.name: value {'a' * 37}: has 37 characters, and its longest pod name {'a' * 37}-inference-xxxxxxxxxx-xxxxx has"
            " 64, over 63; use at most 36 characters"
        )
    ]


def test_a_sampler_whose_pod_name_is_over_63_is_refused_with_the_room_that_is_left():
    spec = {
        "releases": {"everySteps": 5, "volume": {"claimName": "r"}},
        "samplers": [{"name": "b" * 8, "gpusPerReplica": 0}],
    }
    assert faults_of(spec, name="a" * 29) == []
    assert faults_of(spec, name="a" * 30) == [
        (
            f"spec.samplers[0].name: value bbbbbbbb: makes the pod name {'a' * 30}-sampler-bbbbbbbb-xxxxxxxxxx-xxxxx of 64 characters,"
            " over 63; use at most 7 characters beside this job name"
        )
    ]


def test_a_name_that_no_service_can_have_is_refused():
    for name in ("Job", "1job", "my.job", "job-"):
        assert faults_of(name=name) == [
            (
                f"metadata.name: value {name}: names Services, which take lower-case letters, digits and dashes, and start with a"
                " letter; match ^[a-z]([-a-z0-9]*[a-z0-9])?$"
            )
        ]


def test_a_negative_off_policy_limit_is_refused():
    assert faults_of({"rollout": {"maxOffPolicySteps": -1}}) == [
        "spec.rollout.maxOffPolicySteps: value -1: must be at least 0; choose a value at least 0, at most 10000"
    ]


def test_engine_arguments_that_the_job_owns_are_refused_by_name():
    owned = {
        "quantization": "fp8",
        "kv-cache-dtype": "fp8",
        "hf_overrides": {},
        "load-format": "auto",
        "logprobs-mode": "raw_logprobs",
        "--tensor-parallel-size": 2,
        "middleware": "x",
        "weight-transfer-config": {},
    }
    args = owned | {"max-num-seqs": 16, "gpu-memory-utilization": 0.5}
    fields = {
        "quantization": "precision.wire",
        "kv-cache-dtype": "precision.kvCache",
        "hf-overrides": "precision.wire",
        "load-format": "weightSync (the first sync brings the weights)",
        "logprobs-mode": "rollout (processed log-probabilities)",
        "tensor-parallel-size": "inference.parallelism.tensor",
        "middleware": "the control token",
        "weight-transfer-config": "weightSync",
    }
    assert faults_of({"inference": {"engineArgs": args}}) == [
        f"spec.inference.engineArgs.{key}: value {value}: {name} is set by {field}; remove it from engineArgs"
        for (key, value), (name, field) in zip(owned.items(), fields.items(), strict=True)
    ]


def test_the_job_refuses_every_engine_argument_that_the_engine_refuses_in_every_spelling():
    spelled = [name for key in OWNED_ENGINE_ARGS for name in (key, f"--{key}", key.replace("-", "_"), f"{key}.x")]
    args = dict.fromkeys([*spelled, *SHORT_NAMES, "no-enable-expert-parallel"], 1)
    assert len(faults_of({"inference": {"engineArgs": dict(list(args.items())[:128])}})) == min(128, len(args))
    assert len(faults_of({"inference": {"engineArgs": dict(list(args.items())[128:])}})) == max(0, len(args) - 128)


def test_data_parallel_ranks_of_vllm_are_refused_in_favour_of_replicas():
    assert faults_of({"inference": {"engineArgs": {"data_parallel_size": 2}, "parallelism": {"data": 2}}}) == [
        "spec.inference.parallelism.data: value 2: unknown field: data parallelism is replicas; raise spec.inference.replicas",
        (
            "spec.inference.engineArgs.data_parallel_size: value 2: data-parallel-size is set by inference.replicas; remove it"
            " from engineArgs"
        ),
    ]


def test_tensor_parallelism_other_than_the_engines_gpus_is_refused():
    assert gpu_faults_of({"inference": {"gpusPerReplica": 4, "parallelism": {"tensor": 2}}}) == [
        (
            "spec.inference.parallelism.tensor: value 2: gpusPerReplica gives an engine 4 GPUs, and tensor 2 leaves 2 of them idle; set"
            " tensor: 4, or gpusPerReplica: 2 (more engines are more replicas)"
        )
    ]
    assert gpu_faults_of({"inference": {"gpusPerReplica": 1, "parallelism": {"tensor": 2}}}) == [
        (
            "spec.inference.parallelism.tensor: value 2: gpusPerReplica gives an engine 1 GPU, and tensor 2 needs 2; set tensor: 1, or"
            " gpusPerReplica: 2 (more engines are more replicas)"
        )
    ]


def test_expert_parallelism_over_some_ranks_of_an_engine_is_refused():
    assert gpu_faults_of({"inference": {"gpusPerReplica": 4, "parallelism": {"tensor": 4, "expert": 2}}}) == [
        (
            "spec.inference.parallelism.expert: value 2: vLLM spreads experts over all 4 tensor-parallel ranks of an engine or over"
            " none; set expert: 4, or 1"
        )
    ]
    assert gpu_faults_of({"inference": {"gpusPerReplica": 4, "parallelism": {"tensor": 4, "expert": 4}}}) == []


def test_more_minimum_replicas_than_replicas_are_refused():
    assert faults_of({"inference": {"minReplicas": 3}}) == [
        "spec.inference.minReplicas: value 3: is over replicas 2: the job would wait for ever; set at most 2, or more replicas"
    ]


def test_samplers_without_releases_are_refused():
    assert faults_of({"samplers": [{"name": "a", "gpusPerReplica": 0}]}) == [
        (
            "spec.samplers: value a: samplers load whole releases from a volume, and spec.releases publishes none; set spec.releases"
            " {everySteps, volume}, or add replicas to spec.inference instead"
        )
    ]


def test_two_samplers_of_one_name_are_refused():
    spec = {
        "releases": {"everySteps": 5, "volume": {"hostPath": "/r"}},
        "samplers": [{"name": "a", "gpusPerReplica": 0}, {"name": "a", "gpusPerReplica": 0}],
    }
    assert faults_of(spec) == ["spec.samplers: value a: 2 pools have this name; give each pool a name of its own"]


def test_max_tokens_that_leave_no_room_for_a_prompt_are_refused():
    assert faults_of({"model": {"maxModelLen": 8}}) == [
        (
            "spec.rollout.maxTokens: value 8: leaves 0 tokens of spec.model.maxModelLen 8 for a prompt; set maxTokens below 8, raise"
            " maxModelLen, or leave maxModelLen unset (longest prompt + maxTokens)"
        )
    ]


def test_a_batch_of_broken_groups_is_refused_with_the_remainder():
    assert faults_of({"rollout": {"batchSize": 30, "groupSize": 8}}) == [
        "spec.rollout.batchSize: value 30: is no multiple of groupSize 8: 30 = 3 x 8 + 6; use 24 or 32"
    ]


def test_a_group_of_one_has_no_advantage_and_is_refused():
    assert faults_of({"rollout": {"groupSize": 1}}) == [
        "spec.rollout.groupSize: value 1: must be at least 2; choose a value at least 2, at most 4096"
    ]


def test_a_claim_template_for_several_trainers_is_refused():
    checkpoint = {"checkpoint": {"volumeClaimTemplate": {"storage": "10Gi"}}, "replicas": 2}
    assert gpu_faults_of({"trainer": checkpoint}) == [
        (
            "spec.trainer.checkpoint.volumeClaimTemplate: value 10Gi: makes one claim for each of 2 replicas, and the shards of a"
            " checkpoint need one place; set claimName of a ReadWriteMany claim, or replicas: 1"
        )
    ]


def test_two_places_for_checkpoints_are_refused():
    checkpoint = {"checkpoint": {"volumeClaimTemplate": {"storage": "10Gi"}, "claimName": "c"}}
    assert faults_of({"trainer": checkpoint}) == [
        (
            "spec.trainer.checkpoint.volumeClaimTemplate: value 10Gi: claimName c is set too; keep one of claimName,"
            " volumeClaimTemplate"
        )
    ]


def test_a_volume_of_none_or_two_places_is_refused():
    assert faults_of(
        {"orchestrator": {"volume": {}}, "releases": {"everySteps": 1, "volume": {"claimName": "c", "hostPath": "/r"}}}
    ) == [
        "spec.orchestrator.volume: has 0 places and needs exactly one; keep one of claimName, hostPath, volumeClaimTemplate",
        (
            "spec.releases.volume: value 'claimName, hostPath': has 2 places and needs exactly one; keep one of claimName, hostPath,"
            " volumeClaimTemplate"
        ),
    ]


def test_a_model_of_no_or_several_sources_is_refused():
    assert faults_of({"model": {"source": None}}) == [
        (
            "spec.model: names no model: neither path nor source is set; set source.hub.repository, source.pvc, source.hostPath or"
            " source.builtin, or path to a local folder"
        )
    ]
    assert faults_of({"model": {"source": {"hub": {"repository": "a/b"}}}}) == [
        "spec.model.source: value 'hub, builtin': has 2 sources and needs exactly one; keep one of pvc, hostPath, hub, builtin"
    ]


def test_a_model_path_that_its_source_does_not_take_is_refused():
    assert faults_of({"model": {"path": "x"}}) == [
        "spec.model.path: value x: the files of hub and builtin models have a place of their own; remove it"
    ]
    assert faults_of({"model": {"path": "../x", "source": {"builtin": None, "pvc": {"claimName": "models"}}}}) == [
        "spec.model.path: value ../x: is not below the source's root; write a relative path without `..`, or leave it out"
    ]
    assert faults_of({"model": {"path": "./models/qwen", "source": None}}) == []


def test_a_revision_without_a_hub_is_refused():
    assert faults_of({"model": {"revision": "main"}}) == [
        "spec.model.revision: value main: only a hub has revisions; remove it, or set source.hub"
    ]


def test_prompts_of_two_origins_or_in_two_places_are_refused():
    dataset = {"volume": {"path": "a", "claimName": "c", "hostPath": "/d"}, "builtin": {"name": "reverse-text"}}
    assert faults_of({"rollout": {"dataset": dataset}}) == [
        "spec.rollout.dataset: value 'volume, builtin': has 2 origins of prompts; keep one of volume, hub, builtin",
        "spec.rollout.dataset.volume: value 'claimName c, hostPath /d': is in two places; keep one of claimName, hostPath",
    ]


def test_backend_torch_over_several_ranks_is_refused():
    trainer = {"replicas": 2, "gpusPerReplica": 8, "parallelism": {"tensor": 2}, "megatronArgs": {"x": 1}}
    assert faults_of({"trainer": trainer}) == [
        "spec.trainer.replicas: value 2: backend torch is one process on at most one GPU; set it to 1, or backend: megatron",
        "spec.trainer.gpusPerReplica: value 8: backend torch is one process on at most one GPU; set it to 1, or backend: megatron",
        (
            "spec.trainer.parallelism.tensor: value 2: backend torch is one process on at most one GPU; set it to 1, or backend:"
            " megatron"
        ),
        "spec.trainer.megatronArgs: value x: backend torch has no Megatron; remove it, or set backend: megatron",
    ]


def test_backend_megatron_without_a_gpu_is_refused():
    assert faults_of({"trainer": {"backend": "megatron"}}) == [
        "spec.trainer.gpusPerReplica: value 0: backend megatron computes on GPUs; set backend: torch, or gpusPerReplica of 1 or more"
    ]


def test_gpu_transports_and_casts_without_a_gpu_are_refused():
    assert faults_of({"weightSync": {"transport": "nccl", "castBackend": "triton", "port": 8100}}) == [
        (
            "spec.weightSync.transport: value nccl: moves memory of GPUs, and trainer.gpusPerReplica and inference.gpusPerReplica are"
            " 0; set transport: auto, gloo or ipc"
        ),
        (
            "spec.weightSync.castBackend: value triton: runs on a GPU, and trainer.gpusPerReplica is 0; set castBackend: auto, or torch"
            " (the same bits)"
        ),
        "spec.weightSync.port: value 8100: is the port of the trainer's own API; use another, such as 29500",
    ]


def test_a_stop_limit_below_its_warning_is_refused():
    assert faults_of({"limits": {"mismatchKL": {"warn": "0.02", "stop": "0.01"}}}) == [
        (
            "spec.limits.mismatchKL.stop: value 0.01: is below warn 0.02: the job would end before it warns; set stop to 0.02 or more,"
            " or lower warn"
        )
    ]


def test_labels_that_the_operator_selects_by_are_refused_in_templates():
    assert faults_of({"inference": {"template": {"metadata": {"labels": {"fp8rl.dev/role": "x", "team": "a"}}}}}) == [
        (
            "spec.inference.template.metadata.labels.fp8rl.dev/role: value x: the operator finds its own pods by this label; use a"
            " label outside fp8rl.dev/ and app.kubernetes.io/"
        )
    ]
