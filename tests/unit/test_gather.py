"""Gather: the module's parameters as the checkpoint's tensors."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.gather import Source, gather, plan_sources
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
