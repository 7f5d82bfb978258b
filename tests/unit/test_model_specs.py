"""Model specs: what a checkpoint holds, which linears are quantized, and the decision in the engine's words."""

import pytest

from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.weights.specs import (
    checkpoint_faults,
    engine_ignore,
    engine_quantization,
    expected_tensors,
    family_of,
    plan_precision,
    tensor_specs,
)
from fp8rl_workers.weights.specs.floors import KernelFloor
from fp8rl_workers.weights.specs.patterns import compile_pattern

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 256,
    "mlp_only_layers": [0], "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"]}

ATTENTION = [f"self_attn.{which}_proj" for which in "kqov"]
DENSE_MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


def names(layer: int, parts: list[str]) -> list[str]:
    return [f"model.layers.{layer}.{part}" for part in parts]


@pytest.mark.parametrize(
    ("config", "family"),
    [(DENSE, "qwen3"), (MOE, "qwen3_moe"), (LLAMA, "llama"), ({"model_type": "qwen3_moe"}, "qwen3_moe")],
)
def test_a_family_is_recognised_by_architecture_or_model_type(config, family):
    assert family_of(config).name == family


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidModelError, match=r"\['GPT2LMHeadModel'\].*LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForC"
    ):
        family_of({"architectures": ["GPT2LMHeadModel"], "model_type": "qwen3"})


def test_a_missing_dimension_is_named():
    with pytest.raises(InvalidModelError, match=r"config\.json: hidden_size is None, expected a positive integer"):
        expected_tensors({"architectures": ["Qwen3ForCausalLM"]})


def test_expected_tensors_of_a_dense_model():
    found = expected_tensors(DENSE)
    assert len(found) == 2 + 4 * 11
    assert found["model.embed_tokens.weight"] == (1000, 512)
    assert found["model.layers.3.self_attn.k_proj.weight"] == (512, 512)
    assert found["model.layers.3.self_attn.o_proj.weight"] == (512, 1024)
    assert found["model.layers.3.self_attn.q_norm.weight"] == (128,)
    assert found["model.layers.3.mlp.down_proj.weight"] == (512, 1024)
    assert "lm_head.weight" not in found


def test_expected_tensors_of_a_moe_model_list_each_expert_and_the_untied_head():
    found = expected_tensors(MOE)
    assert found["model.layers.0.mlp.gate_proj.weight"] == (1024, 512)
    assert found["model.layers.1.mlp.gate.weight"] == (4, 512)
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"] == (256, 512)
    assert found["lm_head.weight"] == (1000, 512)


def test_kinds_tell_router_expert_and_dense_feed_forward_apart():
    kinds = {spec.module: spec.kind for spec in tensor_specs(MOE)}
    assert kinds["model.layers.0.mlp.up_proj"] == "dense_ffn"
    assert kinds["model.layers.1.mlp.gate"] == "router"
    assert kinds["model.layers.1.mlp.experts.0.down_proj"] == "routed_expert"
    assert kinds["model.layers.1.self_attn.o_proj"] == "attention"
    assert kinds["model.norm"] == "norm"


def test_a_sound_checkpoint_has_no_faults_and_a_tied_head_may_be_there():
    found = dict(expected_tensors(DENSE))
    assert checkpoint_faults(DENSE, found) == []
    assert checkpoint_faults(DENSE, found | {"lm_head.weight": (1000, 512)}) == []


def test_each_fault_of_a_checkpoint_is_one_sentence():
    found = dict(expected_tensors(DENSE)) | {"model.norm.weight": (511,), "model.extra": (1,)}
    del found["model.embed_tokens.weight"]
    assert checkpoint_faults(DENSE, found) == [
        "model.embed_tokens.weight: missing, expected shape [1000, 512]",
        "model.norm.weight: shape [511], but config.json says [512]",
        "model.extra: not a tensor of qwen3",
    ]


@pytest.mark.parametrize(
    ("pattern", "means", "means_not"),
    [
        ("mlp.gate", ["model.layers.3.mlp.gate"], ["model.layers.3.mlp.gate_up_proj", "model.layers.3.mlp.gate_proj"]),
        ("layers.1", ["model.layers.1.mlp.gate"], ["model.layers.11.mlp.gate"]),
        ("self_attn", ["model.layers.1.self_attn.q_proj"], ["model.layers.1.self_attn2.q_proj"]),
        ("layers.*.mlp", ["model.layers.11.mlp.gate"], ["model.layers.11.self_attn.q_proj"]),
        ("lm_head", ["lm_head"], ["model.lm_head2"]),
        ("re:.*mlp.gate", ["model.layers.3.mlp.gate"], ["model.layers.3.mlp.gate_proj"]),
    ],
)
def test_patterns_are_anchored_at_components(pattern, means, means_not):
    matches = compile_pattern(pattern)
    assert all(matches(name) for name in means)
    assert not any(matches(name) for name in means_not)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("", "empty component"), ("mlp..gate", "empty component"), ("re:(", r"'re:\(' is no regular expression")],
)
def test_a_pattern_that_means_nothing_by_itself_is_refused(pattern, message):
    with pytest.raises(InvalidInputError, match=message):
        compile_pattern(pattern)


def test_all_linears_of_a_dense_model_are_quantized_and_lm_head_is_not():
    plan = plan_precision(DENSE, "blockwise")
    assert list(plan.quantized) == sorted(n for i in range(4) for n in names(i, ATTENTION + DENSE_MLP))
    assert plan.ignored == {"lm_head": "lm_head is never quantized (it is tied to the embedding)"}
    assert plan.engine_modules[:4] == names(
        0, ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]
    )


def test_a_router_is_never_quantized_and_a_pattern_for_it_leaves_gate_up_alone():
    for patterns in ([], ["mlp.gate"]):
        plan = plan_precision(MOE, "blockwise", ignored_patterns=patterns)
        assert plan.ignored["model.layers.1.mlp.gate"] == "a router is never quantized"
        assert "model.layers.0.mlp.gate_proj" in plan.quantized
        assert "model.layers.1.mlp.experts.2.gate_proj" in plan.quantized
        assert "model.layers.0.mlp.gate_up_proj" in plan.engine_modules
        assert "model.layers.1.mlp.experts" in plan.engine_modules


def test_scope_ffn_leaves_attention_in_bf16():
    plan = plan_precision(MOE, "channel", "ffn")
    assert plan.ignored["model.layers.2.self_attn.o_proj"] == "scope ffn: attention stays BF16"
    assert {name.split(".")[3] for name in plan.quantized} == {"mlp"}


def test_bf16_quantizes_nothing_and_configures_nothing():
    plan = plan_precision(DENSE, "bf16")
    assert (plan.quantized, plan.ignored, plan.engine_modules) == ((), {}, [])
    assert engine_quantization(plan, "bf16", "pow2") is None
    assert not any(weight.quantized for weight in plan.weights())


def test_first_and_last_layers_stay_bf16_with_their_number():
    plan = plan_precision(DENSE, "blockwise", first_last_layers_bf16=1)
    assert (
        plan.ignored["model.layers.0.mlp.up_proj"] == "firstLastLayersBF16: layer 0 is one of the first or last 1 of 4"
    )
    assert {name.split(".")[2] for name in plan.quantized} == {"1", "2"}


@pytest.mark.parametrize("pattern", ["q_proj", "layers.1.self_attn.k_proj", "re:.*[kv]_proj", "*v_proj", "mlp.up_proj"])
def test_a_pattern_that_hits_some_shards_of_a_fused_layer_is_refused_with_the_shards(pattern):
    with pytest.raises(
        InvalidInputError, match=r"means model\.layers\.\d.*but not model\.layers\.\d.*one layer .*(qkv|gate_up)_proj"
    ):
        plan_precision(DENSE, "blockwise", ignored_patterns=[pattern])


def test_some_experts_of_a_layer_are_refused_without_listing_hundreds():
    with pytest.raises(
        InvalidInputError, match=r"and 5 more; .* ignore all 12 \('model\.layers\.1\.mlp\.experts'\) or none"
    ):
        plan_precision(MOE, "blockwise", ignored_patterns=["experts.3"])


@pytest.mark.parametrize(
    "patterns", [["qkv_proj"], ["q_proj", "k_proj", "v_proj"], ["re:.*self_attn\\.[qkv]_proj"], ["self_attn.qkv_proj"]]
)
def test_all_shards_by_any_spelling_are_ignored_together_with_the_fused_name(patterns):
    plan = plan_precision(DENSE, "blockwise", ignored_patterns=patterns)
    assert plan.ignored["model.layers.2.self_attn.v_proj"].startswith("ignoredLayers: ")
    assert "model.layers.2.self_attn.o_proj" in plan.quantized
    ignore = engine_ignore(plan, "blockwise")
    assert set(names(2, [f"self_attn.{which}_proj" for which in ("q", "k", "v", "qkv")])) < set(ignore)


def test_a_pattern_that_means_no_layer_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidInputError, match=r"'mlp\.gat' means no layer of this model; did you mean 'mlp\.gate'\?"):
        plan_precision(MOE, "blockwise", ignored_patterns=["mlp.gat"])


def test_blockwise_floor_holds_after_tensor_parallel_sharding_with_its_arithmetic():
    plan = plan_precision(DENSE | {"intermediate_size": 768}, "blockwise", tensor_parallel=4)
    reason = "blockwise needs multiples of 128, model.layers.0.mlp.gate_proj has 192 rows (768 over 4 ranks): 192 = 128 * 1 + 64"
    assert plan.ignored["model.layers.0.mlp.gate_proj"] == reason
    assert plan.ignored["model.layers.0.mlp.up_proj"] == reason
    assert plan.ignored["model.layers.0.mlp.down_proj"] == (
        "blockwise needs multiples of 128, model.layers.0.mlp.down_proj has 192 columns (768 over 4 ranks): 192 = 128 * 1 + 64"
    )
    assert "model.layers.0.self_attn.k_proj" in plan.quantized


def test_a_narrow_key_head_keeps_its_fused_siblings_in_bf16():
    plan = plan_precision(DENSE | {"head_dim": 64, "num_key_value_heads": 1}, "blockwise")
    for which in "qkv":
        assert plan.ignored[f"model.layers.0.self_attn.{which}_proj"].endswith("k_proj has 64 rows: 64 = 128 * 0 + 64")
    assert "model.layers.0.self_attn.o_proj" in plan.quantized


@pytest.mark.parametrize(
    ("changes", "ranks", "module", "reason"),
    [
        ({"hidden_size": 520}, 1, "mlp.up_proj", "mxfp8 needs multiples of 32, {m} has 520 columns: 520 = 32 * 16 + 8"),
        (
            {"intermediate_size": 48}, 1, "mlp.up_proj",
            "mxfp8 needs at least 128 rows, model.layers.0.mlp.gate_up_proj has 96 on one rank",
        ),
        (
            {"intermediate_size": 1040}, 2, "mlp.down_proj",
            "mxfp8 needs multiples of 32, {m} has 520 columns (1040 over 2 ranks): 520 = 32 * 16 + 8",
        ),
    ],
)  # fmt: skip
def test_mxfp8_floor_is_k_modulo_32_and_128_rows(changes, ranks, module, reason):
    plan = plan_precision(LLAMA | changes, "mxfp8", tensor_parallel=ranks)
    found = plan.ignored[f"model.layers.0.{module}"]
    assert found in {reason.format(m=f"model.layers.0.{which}") for which in (module, "mlp.gate_proj")}


def test_a_floor_of_one_projection_keeps_all_experts_of_the_layer_in_bf16():
    plan = plan_precision(MOE, "blockwise", tensor_parallel=4)
    assert plan.ignored["model.layers.2.mlp.experts.3.down_proj"] == (
        "blockwise needs multiples of 128, model.layers.2.mlp.experts.0.gate_proj has 64 rows (256 over 4 ranks): "
        "64 = 128 * 0 + 64"
    )
    whole = plan_precision(MOE, "blockwise", tensor_parallel=4, expert_parallel=4)
    assert "model.layers.2.mlp.experts.3.down_proj" in whole.quantized


def test_key_heads_are_repeated_when_there_are_more_ranks_than_heads():
    assert "model.layers.0.self_attn.k_proj" in plan_precision(DENSE, "blockwise", tensor_parallel=8).quantized


def test_ranks_that_cannot_share_a_dimension_are_refused():
    with pytest.raises(
        InvalidModelError, match=r"parallelism\.tensor: .*q_proj has 8 units of 128, which 3 ranks .*8 % 3 = 2"
    ):
        plan_precision(DENSE, "blockwise", tensor_parallel=3)


def test_the_floor_is_a_parameter():
    assert not plan_precision(DENSE, "blockwise", floor=KernelFloor(min_rows=10**6)).quantized


def test_weights_of_a_plan_are_all_tensors_in_order_with_their_precision():
    plan = plan_precision(DENSE | {"attention_bias": True}, "blockwise")
    weights = {weight.name: weight.quantized for weight in plan.weights()}
    assert list(weights) == [spec.name for spec in plan.specs]
    assert weights["model.layers.0.self_attn.q_proj.weight"]
    assert not weights["model.layers.0.self_attn.q_proj.bias"]
    assert not weights["model.embed_tokens.weight"]


def test_blockwise_in_the_engines_words():
    plan = plan_precision(MOE, "blockwise")
    assert engine_quantization(plan, "blockwise", "fp32") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (1, 2, 3))],
    }
    assert engine_quantization(plan, "blockwise", "pow2")["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize(
    ("wire", "strategy", "activations"), [("channel", "channel", "token"), ("mxfp8", "group", "group")]
)
def test_compressed_tensors_reads_the_engines_words(wire, strategy, activations):
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    plan = plan_precision(MOE, wire, ignored_patterns=["layers.1.mlp.experts"])
    words = engine_quantization(plan, wire, "pow2")
    group = QuantizationConfig.model_validate(words).config_groups["group_0"]
    assert (group.weights.strategy, group.input_activations.strategy) == (strategy, activations)
    assert (group.weights.dynamic, group.input_activations.dynamic) == (False, True)
    assert group.weights.scale_dtype == (torch.uint8 if wire == "mxfp8" else None)
    assert "re:^model\\.layers\\.1\\.mlp\\.experts\\..*$" in words["ignore"]
    assert "model.layers.1.mlp.experts" in words["ignore"]
    assert not any("experts.0" in name for name in words["ignore"])
