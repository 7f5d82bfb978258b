"""Formats and cards that are refused, each with field, value, arithmetic and way out: the exact lines that a user reads."""

from typing import Any

from builders import make_body

from fp8rl_operator.spec import inspect

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


def test_fp8_param_with_mxfp8_is_refused():
    assert gpu_faults_of({"precision": {"fp8Param": True, "recipe": "mxfp8"}}) == [
        (
            "spec.precision.fp8Param: value true: mxfp8 keeps two copies of a weight, scaled along rows and along columns, and none"
            " can be the parameter; set fp8Param: false, or recipe: blockwise"
        )
    ]
    assert gpu_faults_of({"precision": {"fp8Param": True, "recipe": "blockwise"}}) == []


def test_fp8_param_without_an_fp8_recipe_or_with_backend_torch_is_refused():
    assert faults_of({"precision": {"fp8Param": True}}) == [
        "spec.precision.fp8Param: value true: recipe bf16 has no FP8 parameters; set fp8Param: false, or recipe: blockwise",
        "spec.precision.fp8Param: value true: backend torch holds BF16 parameters; set fp8Param: false, or backend: megatron",
    ]


def test_a_wire_that_does_not_match_the_recipe_is_refused():
    assert gpu_faults_of({"precision": {"recipe": "mxfp8", "wire": "blockwise"}}) == [
        (
            "spec.precision.wire: value blockwise: recipe is mxfp8: trainer and engines would compute with different codes of the same"
            " weights; set wire: auto, or recipe: blockwise, or allowMismatch: true"
        )
    ]


def test_allow_mismatch_lets_wire_and_recipe_differ():
    assert gpu_faults_of({"precision": {"recipe": "mxfp8", "wire": "blockwise", "allowMismatch": True}}) == []
    assert faults_of({"precision": {"recipe": "blockwise", "wire": "channel", "allowMismatch": True}}) == []


def test_the_channel_wire_matches_no_recipe():
    assert faults_of({"precision": {"recipe": "blockwise", "wire": "channel"}}) == [
        (
            "spec.precision.wire: value channel: recipe is blockwise: trainer and engines would compute with different codes of the"
            " same weights; set wire: auto, or allowMismatch: true"
        )
    ]


def test_recipe_auto_without_a_gpu_is_bf16_and_the_wire_is_held_against_that():
    assert faults_of({"precision": {"wire": "blockwise"}}) == [
        (
            "spec.precision.wire: value blockwise: recipe auto is bf16 with trainer.gpusPerReplica 0: trainer and engines would compute"
            " with different codes of the same weights; set wire: auto, or recipe: blockwise, or allowMismatch: true"
        )
    ]
    assert faults_of({"precision": {"wire": "blockwise", "recipe": "blockwise"}}) == []


def test_recipe_auto_with_gpus_is_left_to_the_trainer():
    assert gpu_faults_of({"precision": {"wire": "mxfp8"}}) == []


def test_four_bit_formats_are_refused_with_the_reason():
    for word in ("nvfp4", "mxfp4", "INT4", "w4a16", "nf4"):
        for field in ("recipe", "wire"):
            (message,) = faults_of({"precision": {field: word}})
            assert message == (
                f"spec.precision.{field}: value {word}: is a 4-bit format: 16 codes (E4M3 has 256) move the policy further from"
                " the trainer's than the mismatch limits allow, and no trainer recipe computes with the same codes; use"
                " blockwise, mxfp8 or channel (8 bits), or bf16"
            )


def test_stochastic_rounding_by_the_engine_is_refused():
    assert faults_of({"precision": {"rounding": "stochastic", "quantizeAt": "engine"}}) == [
        (
            "spec.precision.rounding: value stochastic: quantizeAt is engine, and vLLM rounds to nearest: both sides would hold"
            " different codes; set rounding: nearest, or quantizeAt: trainer"
        )
    ]


def test_fp32_scales_with_mxfp8_are_refused():
    assert faults_of({"precision": {"recipe": "mxfp8", "scaleFormat": "fp32"}}) == [
        (
            "spec.precision.scaleFormat: value fp32: recipe mxfp8 has scales of 8 bits of exponent, powers of two; set scaleFormat:"
            " auto, or recipe: blockwise"
        )
    ]


def test_fp32_scales_on_blackwell_are_refused():
    for product in ("NVIDIA-B200", "NVIDIA-GB200", "NVIDIA-B300"):
        (message,) = gpu_faults_of({"precision": {"scaleFormat": "fp32"}, "topology": {"gpuProduct": [product]}})
        assert f"spec.topology.gpuProduct[0] {product} is Blackwell (10." in message
        assert message.endswith("whose kernels take scales that are powers of two; set scaleFormat: auto, or pow2")
    assert gpu_faults_of({"precision": {"scaleFormat": "fp32"}, "topology": {"gpuProduct": ["NVIDIA-H200"]}}) == []


def test_fp8_training_on_a_card_that_transformer_engine_refuses_is_refused():
    assert gpu_faults_of({"topology": {"gpuProduct": ["NVIDIA-L40S"]}}) == [
        (
            "spec.topology.gpuProduct[0]: value NVIDIA-L40S: has compute capability 8.9, where Transformer Engine refuses FP8 training"
            " (block scaling needs 9.0 or more), and precision.recipe is auto; set precision.recipe: bf16, or train on H100, H200, B200"
            " or GB200 (such a card may serve)"
        )
    ]
    (message,) = gpu_faults_of(
        {
            "precision": {"recipe": "mxfp8"},
            "topology": {"gpuProduct": ["NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"]},
        }
    )
    assert (
        "has compute capability 12.0, where Transformer Engine refuses FP8 training (MXFP8 is not supported from 12.0 on)"
        in message
    )


def test_mxfp8_on_hopper_is_refused_and_blockwise_on_blackwell_is_warned_about():
    assert gpu_faults_of({"precision": {"recipe": "mxfp8"}, "topology": {"gpuProduct": ["NVIDIA-H100-80GB-HBM3"]}}) == [
        (
            "spec.topology.gpuProduct[0]: value NVIDIA-H100-80GB-HBM3: has compute capability 9.0, and recipe mxfp8 needs 10.0 or more;"
            " set precision.recipe: blockwise, or auto"
        )
    ]
    blockwise = {"precision": {"recipe": "blockwise"}, "topology": {"gpuProduct": ["NVIDIA-B200"]}}
    assert gpu_faults_of(blockwise) == []
    assert gpu_faults_of(blockwise, "warning") == [
        (
            "spec.topology.gpuProduct[0]: value NVIDIA-B200: has compute capability 10.0, where Transformer Engine emulates recipe"
            " blockwise; set precision.recipe: auto (mxfp8 here) unless blockwise is wanted"
        )
    ]


def test_fp8_serving_on_a_card_under_8_9_is_refused():
    mixed = {
        "precision": {"recipe": "blockwise"},
        "topology": {"gpuProduct": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB"]},
        "trainer": {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}}},
    }
    assert gpu_faults_of(mixed) == [
        (
            "spec.topology.gpuProduct[1]: value NVIDIA-A100-SXM4-80GB: has compute capability 8.0, and FP8 serving needs 8.9 or more"
            " (spec.inference); set precision.wire: bf16 with recipe: bf16, or use one of L4, L40S, RTX 6000 Ada, RTX PRO 6000, H100,"
            " H200, B200, GB200"
        )
    ]


def test_cards_of_8_9_and_more_serve_fp8_while_another_card_trains():
    for product in (
        "NVIDIA-L4",
        "NVIDIA-L40S",
        "NVIDIA-RTX-6000-Ada-Generation",
        "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA-H200",
        "NVIDIA-B200",
        "NVIDIA-GB200",
        "NVIDIA-L40S-SHARED",
        "Some-Card-Of-2030",
    ):
        pick = {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}}
        serve = {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": product}}}}
        listed = list(dict.fromkeys(["NVIDIA-H200", product]))
        assert gpu_faults_of({"trainer": pick, "inference": serve, "topology": {"gpuProduct": listed}}) == []


def test_a_template_that_picks_a_card_outside_the_list_is_refused():
    pick = {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}}}
    assert gpu_faults_of({"inference": pick, "topology": {"gpuProduct": ["NVIDIA-H200"]}}) == [
        (
            "spec.inference.template.spec.nodeSelector: value NVIDIA-L4: is not in spec.topology.gpuProduct (NVIDIA-H200), so no node"
            " fits both; add it to spec.topology.gpuProduct"
        )
    ]


def test_an_ignore_pattern_that_splits_a_fused_layer_is_refused_with_the_shards_named():
    assert faults_of({"precision": {"ignoredLayers": ["q_proj"]}}) == [
        (
            "spec.precision.ignoredLayers: value q_proj: ignores self_attn.q_proj and not self_attn.k_proj, self_attn.v_proj, which"
            " engines hold as one layer, model.layers.0.self_attn.qkv_proj; add self_attn.k_proj, self_attn.v_proj, or leave"
            " self_attn.q_proj out"
        )
    ]
    assert faults_of({"precision": {"ignoredLayers": ["layers.7.mlp.up_proj"]}}) == [
        (
            "spec.precision.ignoredLayers: value layers.7.mlp.up_proj: ignores mlp.up_proj and not mlp.gate_proj, which engines hold as"
            " one layer, model.layers.7.mlp.gate_up_proj; add mlp.gate_proj, or leave mlp.up_proj out"
        )
    ]


def test_ignore_patterns_that_name_all_shards_or_a_whole_block_are_taken():
    for patterns in (
        ["q_proj", "k_proj", "v_proj"],
        ["re:.*[qkv]_proj"],
        ["self_attn"],
        ["layers.0"],
        ["mlp.gate"],
        ["*"],
    ):
        assert faults_of({"precision": {"ignoredLayers": patterns}}) == []


def test_an_ignore_pattern_that_cannot_be_read_is_refused():
    assert faults_of({"precision": {"ignoredLayers": ["mlp.gate", "re:(", "mlp..gate"]}}) == [
        (
            "spec.precision.ignoredLayers[1]: value 're:(': is no regular expression: missing ), unterminated subpattern at position 0;"
            " write a module's name or a run of its dotted parts, or re:EXPRESSION"
        ),
        (
            "spec.precision.ignoredLayers[2]: value mlp..gate: has an empty part between its dots; write a module's name or a run of its"
            " dotted parts, or re:EXPRESSION"
        ),
    ]
