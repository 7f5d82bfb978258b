"""Gather: the module's parameters as the checkpoint's tensors."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.gather import Source, gather, held, plan_sources, stack_sources
from fp8rl_workers.weights.specs import expected_tensors

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MOE = {"num_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "mlp_only_layers": [0]}


def model(kind, *, dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    config = kind(**(SHAPE | changes))
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def gathered(module, config) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters())
    return dict(gather(parameters, plan_sources({name: p.shape for name, p in parameters.items()}, config)))


def config_of(module) -> dict:
    return json.loads(module.config.to_json_string()) | {"architectures": [type(module).__name__]}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Qwen3Config, {"tie_word_embeddings": True}),
        (Qwen3Config, {"attention_bias": True}),
        (LlamaConfig, {"mlp_bias": True}),
        (Qwen3MoeConfig, MOE),
    ],
)
def test_names_shapes_and_bytes_are_those_of_the_saved_checkpoint(kind, changes, tmp_path):
    from safetensors.torch import load_file

    module = model(kind, **changes)
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    found = gathered(module, config)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert list(found) == list(expected_tensors(config))


def test_nothing_is_copied():
    module = model(Qwen3MoeConfig, **MOE)
    owned = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert all(view.untyped_storage().data_ptr() in owned for view in gathered(module, config_of(module)).values())


def test_a_tied_head_comes_once_under_the_embeddings_name():
    module = model(Qwen3Config, tie_word_embeddings=True)
    names = list(gathered(module, config_of(module)))
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names


def test_experts_are_views_of_their_stack():
    module = model(Qwen3MoeConfig, **MOE)
    sources = plan_sources({n: p.shape for n, p in module.named_parameters()}, config_of(module))
    stack = "model.layers.1.mlp.experts"
    assert sources[f"{stack}.2.gate_proj.weight"] == Source(f"{stack}.gate_up_proj", (2, slice(0, 16)))
    assert sources[f"{stack}.2.up_proj.weight"] == Source(f"{stack}.gate_up_proj", (2, slice(16, 32)))
    assert sources[f"{stack}.0.down_proj.weight"] == Source(f"{stack}.down_proj", (0,))


def test_stacked_experts_come_as_one_strided_view_per_projection_whose_members_are_the_experts():
    module = model(Qwen3MoeConfig, **MOE)
    parameters = dict(module.named_parameters())
    sources = plan_sources({name: p.shape for name, p in parameters.items()}, config_of(module))
    stacks, apart = dict(held(parameters, stack_sources(sources))), dict(held(parameters, sources))
    layer = "model.layers.1.mlp.experts"
    assert {name: tuple(t.shape) for name, t in stacks.items() if "experts" in name} == {
        f"{layer}.*.gate_proj.weight": (3, 16, 32),
        f"{layer}.*.up_proj.weight": (3, 16, 32),
        f"{layer}.*.down_proj.weight": (3, 32, 16),
    }
    members = {name.replace("*", str(e)): t[e] for name, t in stacks.items() if "*" in name for e in range(3)}
    members |= {name: t for name, t in stacks.items() if "*" not in name}
    assert members.keys() == apart.keys()
    assert all(members[name].data_ptr() == apart[name].data_ptr() for name in apart)
    assert all(torch.equal(members[name], apart[name]) for name in apart)


@pytest.mark.parametrize(
    "sources",
    [
        {f"m.experts.{e}.up_proj.weight": Source(f"m.experts.{e}.up_proj.weight") for e in range(2)},
        {"m.experts.0.up_proj.weight": Source("m.experts.gate_up_proj", (0, slice(4, 8)))},
        {f"m.experts.{e}.down_proj.weight": Source("m.experts.down_proj", (1 - e,)) for e in range(2)},
    ],
    ids=["a parameter each", "a lone expert", "experts in another order"],
)
def test_experts_that_are_no_stack_stay_apart(sources):
    assert stack_sources(sources) == sources


def test_fp32_masters_come_as_the_bf16_weight_that_the_trainer_computes_with():
    module = model(Qwen3Config, dtype=torch.float32)
    found = gathered(module, config_of(module))
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], module.get_parameter(name).to(torch.bfloat16))


def test_a_module_that_does_not_fit_its_config_is_refused_with_all_names():
    module = model(Qwen3Config, tie_word_embeddings=True)
    config = config_of(module)
    with pytest.raises(InvalidModelError, match=r"lm_head\.weight has no parameter .1 in all"):
        gathered(module, config | {"tie_word_embeddings": False})
    with pytest.raises(InvalidModelError, match=r"parameter model\.layers\.1\..* is no tensor of this family"):
        gathered(module, config | {"num_hidden_layers": 1})
    with pytest.raises(
        InvalidModelError, match=r"gate_proj\.weight has shape \[48, 32\], but config\.json says \[64, 32\]"
    ):
        gathered(module, config | {"intermediate_size": 64})
