"""The engine's log-probabilities against transformers' forward of the dequantized weights, per wire."""

from __future__ import annotations

import pytest
import torch
from engine_kit import MODEL_CONFIG, Engine, Trainer, random_weights, resolved_for

from fp8rl_workers.weights.cast import fake_quantize

pytestmark = pytest.mark.vllm

PROMPTS = 24
COMPLETION = 32
P99_LIMIT = 2e-2


def reference(weights, plan, wire, dtype):
    """A transformers model with the weights that the engine's codes stand for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{k: v for k, v in MODEL_CONFIG.items() if k not in ("architectures", "torch_dtype")})
    model = Qwen3ForCausalLM(config).to(dtype)
    quantized = {w.name for w in plan.weights() if w.quantized}
    state = {
        name: fake_quantize(name, weight, wire) if name in quantized else weight for name, weight in weights.items()
    }
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})
    return model.eval()


@torch.no_grad()
def forward_logprobs(model, prompt, completion):
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(completion)), completion].tolist()


def differences(engine, model):
    """|engine - reference| of every sampled token of a fixed prompt set, in order of size."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(PROMPTS):
        prompt = torch.randint(0, MODEL_CONFIG["vocab_size"], (20,), generator=generator).tolist()
        choice = engine.generate(prompt, max_tokens=COMPLETION, seed=7)["choices"][0]
        ours = [item["logprob"] for item in choice["logprobs"]["content"]]
        theirs = forward_logprobs(model, prompt, choice["token_ids"])
        found += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return sorted(found)


@pytest.mark.parametrize("wire", ["blockwise", "channel"])
def test_the_engine_serves_the_policy_that_the_codes_stand_for(wire, tmp_path):
    resolved, plan = resolved_for(wire)
    engine, trainer = Engine(tmp_path, resolved), Trainer(resolved, plan)
    try:
        engine.start().boot()
        trainer.form([engine])
        for version in (1, 2):  # by the reload, then by the learned layout
            weights = random_weights(version)
            trainer.publish(engine, weights, version)
            found = differences(engine, reference(weights, plan, wire, torch.bfloat16))
            p99 = found[int(0.99 * len(found))]
            print(f"{wire} version {version}: p50 {found[len(found) // 2]:.2e} p99 {p99:.2e} max {found[-1]:.2e}")
            assert p99 <= P99_LIMIT
        assert engine.state()["quantized_layers"] == (list(plan.quantized) if wire == "channel" else [])
    finally:
        engine.stop()
        trainer.close()
