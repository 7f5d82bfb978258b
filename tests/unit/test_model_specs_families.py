"""Exact names, counts and decisions of the families with a spec file of their own."""

import pytest

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.specs import (
    checkpoint_faults,
    engine_ignore,
    expected_tensors,
    plan_precision,
    tensor_specs,
)

SIZES = {"vocab_size": 1000, "hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
TEXT = SIZES | {
    "intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 128, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 512, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TEXT, "vision_config": VISION,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": TEXT | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 128},
}  # fmt: skip
SHARED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "intermediate_size": 1024}
GLM = SIZES | SHARED | {
    "architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
V3 = SIZES | SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
V4 = SIZES | EXPERTS | {
    "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 3, "n_routed_experts": 4, "head_dim": 128,
    "q_lora_rank": 256, "o_groups": 2, "o_lora_rank": 128, "index_n_heads": 2, "index_head_dim": 128, "hc_mult": 4,
    "compress_ratios": [0, 4, 128], "num_hash_layers": 1,
}  # fmt: skip
LANGUAGE = "model.language_model.layers"


def test_qwen3_5_is_a_tower_and_a_decoder_of_delta_nets_and_gated_attention():
    found = expected_tensors(QWEN3_5)
    assert len(found) == (3 + 2 * 12 + 6) + 2 + 2 * 2 + (9 + 3) + (4 + 2 + 3) + 1
    assert found[f"{LANGUAGE}.0.linear_attn.in_proj_qkv.weight"] == (8192, 512)
    assert found[f"{LANGUAGE}.0.linear_attn.in_proj_z.weight"] == (4096, 512)
    assert found[f"{LANGUAGE}.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert found[f"{LANGUAGE}.1.self_attn.q_proj.weight"] == (1024, 512)
    assert found["model.visual.patch_embed.proj.weight"] == (64, 3, 2, 4, 4)
    assert found["model.visual.merger.linear_fc2.weight"] == (512, 256)
    assert found["lm_head.weight"] == (1000, 512)


def test_a_delta_net_is_quantized_but_its_gates_are_not():
    plan = plan_precision(QWEN3_5, "mxfp8")
    assert [name for name in plan.quantized if "linear_attn" in name] == [
        f"{LANGUAGE}.0.linear_attn.{which}" for which in ("in_proj_qkv", "in_proj_z", "out_proj")
    ]
    assert plan.ignored[f"{LANGUAGE}.0.linear_attn.in_proj_a"] == "the gates of a delta net are never quantized"
    assert "language_model.model.layers.0.linear_attn.in_proj_qkvz" in plan.engine_modules
    assert "language_model.model.layers.0.linear_attn.in_proj_ba" in engine_ignore(plan, "mxfp8")


def test_a_vision_tower_is_ignored_whole_in_the_engines_names():
    plan = plan_precision(QWEN3_5, "blockwise")
    tower = [name for name in plan.ignored if name.startswith("model.visual.")]
    assert len(tower) == 2 * 4 + 2
    assert {plan.ignored[name] for name in tower} == {"a vision tower stays BF16 whole"}
    assert {name for name in engine_ignore(plan, "blockwise") if name.startswith("visual.")} == {
        *(
            f"visual.blocks.{i}.{part}"
            for i in (0, 1)
            for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        ),
        "visual.merger.linear_fc1",
        "visual.merger.linear_fc2",
    }
    assert "language_model.lm_head" in engine_ignore(plan, "blockwise")


def test_a_fused_in_proj_of_12352_rows_is_refused_on_four_ranks_with_its_arithmetic():
    with pytest.raises(InvalidModelError) as refused:
        plan_precision(QWEN3_5, "mxfp8", trainer_tensor_parallel=4)
    assert str(refused.value) == (
        f"trainer.parallelism.tensor: {LANGUAGE}.0.linear_attn.in_proj has 12352 rows (in_proj_qkv, in_proj_z, in_proj_b, "
        "in_proj_a), mxfp8 needs a multiple of 32 on each of 4 ranks: 12352 = 32 * 386, 386 % 4 = 2; choose a divisor of 386, "
        "or leave it in BF16 whole (precision.ignoredLayers: 'in_proj_qkvz')"
    )
    assert plan_precision(QWEN3_5, "mxfp8", trainer_tensor_parallel=2).quantized
    whole = plan_precision(QWEN3_5, "mxfp8", trainer_tensor_parallel=4, ignored_patterns=["in_proj_qkvz"])
    assert f"{LANGUAGE}.0.linear_attn.out_proj" in whole.quantized


def test_qwen3_5_moe_keeps_router_and_shared_expert_gate_in_bf16():
    plan = plan_precision(QWEN3_5_MOE, "blockwise")
    mlp = f"{LANGUAGE}.1.mlp"
    assert plan.ignored[f"{mlp}.gate"] == "a router is never quantized"
    assert plan.ignored[f"{mlp}.shared_expert_gate"] == "a shared expert's gate is never quantized"
    assert {f"{mlp}.shared_expert.up_proj", f"{mlp}.experts.3.down_proj"} < set(plan.quantized)
    assert "language_model.model.layers.1.mlp.experts" in plan.engine_modules
    assert plan.engine_shards["language_model.model.layers.1.mlp.shared_expert.gate_up_proj"] == (
        f"{mlp}.shared_expert.gate_proj",
        f"{mlp}.shared_expert.up_proj",
    )
    regular = "re:^language_model\\.model\\.layers\\.1\\.mlp\\.experts\\..*$"
    assert regular in engine_ignore(plan_precision(QWEN3_5_MOE, "channel", ignored_patterns=["experts"]), "channel")


def test_glm_keeps_its_router_and_correction_bias_in_fp32_and_its_biased_attention_fused():
    plan = plan_precision(GLM, "blockwise")
    fp32 = [spec.name for spec in plan.specs if spec.dtype == "float32"]
    assert fp32 == [f"model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")]
    assert expected_tensors(GLM)["model.layers.1.mlp.shared_experts.up_proj.weight"] == (256, 512)
    assert not [name for name in plan.engine_modules if name.endswith(".q_proj")]
    weights = {weight.name: weight for weight in plan.weights()}
    assert weights["model.layers.1.mlp.gate.weight"].dtype == "float32"
    assert "model.layers.1.self_attn.o_proj.bias" not in weights


def test_deepseek_v3_has_latent_attention_whose_uneven_latents_stay_bf16_together():
    plan = plan_precision(V3, "blockwise")
    assert len(plan.specs) == 3 + 2 * (2 + 7) + 3 + (2 + 12 + 3)
    reason = (
        "blockwise needs multiples of 128, model.layers.0.self_attn.kv_a_proj_with_mqa has 576 rows: 576 = 128 * 4 + 64"
    )
    assert plan.ignored["model.layers.0.self_attn.kv_a_proj_with_mqa"] == reason
    assert plan.ignored["model.layers.0.self_attn.q_a_proj"] == reason
    assert {f"model.layers.0.self_attn.{which}_proj" for which in ("q_b", "kv_b", "o")} < set(plan.quantized)
    assert "model.layers.0.self_attn.fused_qkv_a_proj" in engine_ignore(plan, "blockwise")
    assert "model.layers.0.self_attn.fused_qkv_a_proj" in plan_precision(V3, "mxfp8").engine_modules


def test_deepseek_v4_quantizes_its_grouped_output_projection_and_not_its_compressors():
    plan = plan_precision(V4, "blockwise")
    attention = sorted(name for name in plan.quantized if name.startswith("layers.1.attn"))
    assert attention == [f"layers.1.attn.{which}" for which in ("indexer.wq_b", "wkv", "wo_a", "wo_b", "wq_a", "wq_b")]
    assert expected_tensors(V4)["layers.0.attn.wo_a.weight"] == (256, 256)
    assert plan.ignored["layers.1.attn.compressor.wkv"] == "the engine computes it in BF16"
    assert plan.ignored["layers.1.attn.indexer.weights_proj"] == "the engine computes it in BF16"
    assert {"model.layers.0.attn.wo_a", "model.layers.0.attn.fused_wqa_wkv", "model.layers.0.ffn.experts"} < set(
        plan.engine_modules
    )
    assert plan.engine_shards["model.layers.0.ffn.shared_experts.down_proj"] == ("layers.0.ffn.shared_experts.w2",)
    assert plan.model.engine_overrides == (("expert_dtype", "fp8"),)


def test_deepseek_v4_sends_hyper_connections_in_fp32_and_hash_tables_as_integers():
    dtypes = {spec.name: spec.dtype for spec in tensor_specs(V4)}
    assert dtypes["layers.0.ffn.gate.tid2eid"] == "int32"
    assert dtypes["layers.0.ffn.gate.weight"] == "bfloat16"
    assert {n for n in dtypes if dtypes[n] == "float32" and n.startswith("layers.1.")} == {
        *(f"layers.1.hc_{which}_{part}" for which in ("attn", "ffn") for part in ("fn", "base", "scale")),
        "layers.1.attn.attn_sink",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.indexer.compressor.ape",
        "layers.1.ffn.gate.bias",
    }
    assert not [name for name in dtypes if name.startswith("layers.2.attn.indexer")]


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (QWEN3_5, "mtp.layers.0.mlp.up_proj.weight"),
        (GLM, "model.layers.2.eh_proj.weight"),
        (V3, "model.layers.2.shared_head.norm.weight"),
        (V4, "mtp.0.e_proj.weight"),
    ],
)
def test_layers_for_speculative_decoding_may_be_in_a_checkpoint_and_never_travel(config, extra):
    found = dict(expected_tensors(config))
    assert checkpoint_faults(config, found | {extra: (1,)}) == []
    assert extra not in {weight.name for weight in plan_precision(config, "bf16").weights()}


def test_a_missing_expert_is_reported_with_both_of_its_names():
    found = dict(expected_tensors(GLM))
    del found["model.layers.1.mlp.experts.2.up_proj.weight"]
    both = "model.layers.1.mlp.experts.2.up_proj.weight (or model.layers.1.mlp.experts.routed_experts.2.up_proj.weight)"
    assert checkpoint_faults(GLM, found) == [f"{both}: missing, expected shape [128, 512]"]
