"""What the trainer computes with, publishes and keeps."""

import pytest
import torch
from trainer_kit import make_config, make_module, make_samples, make_trainer, model_config

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.trainer.batch import pack
from fp8rl_workers.trainer.model import token_logprobs
from fp8rl_workers.weights.cast import dequantize, quantize
from fp8rl_workers.weights.specs import expected_tensors


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "bf16"])
def test_a_quantized_recipe_computes_like_an_explicitly_dequantized_model(recipe: str) -> None:
    trainer = make_trainer(make_config(precision={"recipe": recipe}))
    explicit = make_module()
    state = {}
    for name, tensor in explicit.state_dict().items():
        weight = tensor.to(torch.bfloat16)
        if name.endswith("_proj.weight") and recipe != "bf16":
            weight = dequantize(quantize(name, weight, recipe), recipe)
        state[name] = weight
    explicit.to(torch.bfloat16)
    explicit.load_state_dict(state)
    (batch,) = pack(make_samples(6), 1000)
    for parameter, expected in zip(trainer.policy.module.parameters(), explicit.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    a, _ = token_logprobs(trainer.policy.module, batch, 1.0)
    explicit.model.rotary_emb = trainer.policy.module.model.rotary_emb
    b, _ = token_logprobs(explicit, batch, 1.0)
    assert torch.equal(a, b)


def test_what_is_published_is_the_bf16_weight_and_not_the_codes_that_the_trainer_computes_with() -> None:
    trainer = make_trainer()
    before = make_module().state_dict()
    published = dict(trainer.weights())
    assert list(published) == list(expected_tensors(model_config(make_module())))
    for name, weight in published.items():
        assert torch.equal(weight, before[name].to(torch.bfloat16))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert name in trainer.policy.quantized
    assert not torch.equal(published[name], dict(trainer.policy.module.named_parameters())[name])


def test_gradients_pass_straight_through_to_the_masters() -> None:
    trainer = make_trainer(make_config(optimizer={"name": "signsgd", "learning_rate": 0.01}))
    name = "model.layers.1.mlp.down_proj.weight"
    before = trainer.policy.masters[name].clone()
    trainer.train(1, make_samples(8))
    change = (trainer.policy.masters[name] - before).abs()
    assert torch.allclose(change[change > 0], torch.tensor(0.01), atol=1e-6)
    assert (change > 0).float().mean() > 0.9


def test_experts_are_published_one_by_one_and_the_router_is_frozen_and_never_quantized() -> None:
    trainer = make_trainer(moe=True)
    published = dict(trainer.weights())
    stack = trainer.policy.masters["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(published["model.layers.0.mlp.experts.3.down_proj.weight"], stack[3].to(torch.bfloat16))
    router = "model.layers.0.mlp.gate.weight"
    assert router not in trainer.policy.quantized
    before = trainer.policy.masters[router].clone()
    trainer.train(1, make_samples(8))
    assert torch.equal(trainer.policy.masters[router], before)


def test_stochastic_rounding_is_keyed_by_the_step_so_that_weights_sent_twice_have_equal_codes() -> None:
    trainer = make_trainer(make_config(precision={"recipe": "blockwise", "rounding": "stochastic"}))
    name = "model.layers.0.self_attn.q_proj.weight"
    parameter = dict(trainer.policy.module.named_parameters())[name]
    first = parameter.detach().clone()
    weight = dict(trainer.weights())[name]
    assert torch.equal(first, dequantize(quantize(name, weight, "blockwise", rounding=trainer.rounding()), "blockwise"))
    trainer.policy.refresh(1)
    assert not torch.equal(parameter, first)
    trainer.policy.refresh(0)
    assert torch.equal(parameter, first)


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    trainer = make_trainer()
    trainer.policy.masters["model.norm.weight"][3] = float("inf")
    with pytest.raises(NonFiniteError, match=r"model.norm.weight: 1 of 128 values are not finite"):
        trainer.policy.refresh(1)
