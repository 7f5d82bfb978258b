"""The engine's log-probabilities against transformers' forward of the dequantized weights, per wire."""

from __future__ import annotations

import math

import pytest
import torch
from engine_kit import MODEL_CONFIG, Engine, Trainer, random_weights, resolved_for

from fp8rl_workers.weights.cast import fake_quantize

pytestmark = pytest.mark.vllm

PROMPTS = 24
COMPLETION = 32
P99_LIMIT = {"blockwise": 2e-2, "channel": 0.2}


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


def percentile(found, share):
    return found[int(share * len(found))]


def policy(seed):
    """Weights whose logits stay small (about 0.6): a BF16 logit of 8 alone is off by up to 3e-2."""
    weights = random_weights(seed)
    weights["lm_head.weight"] /= 3
    return weights


@pytest.mark.parametrize("wire", ["blockwise", "channel"])
def test_the_engine_serves_the_policy_that_the_codes_stand_for(wire, tmp_path):
    """Channel runs vLLM's own FP8 kernel, which quantizes activations per token too; the reference does not."""
    resolved, plan = resolved_for(wire)
    engine, trainer = Engine(tmp_path, resolved), Trainer(resolved, plan)
    try:
        engine.start().boot()
        trainer.form([engine])
        for version in (1, 2):  # by the reload, then by the learned layout
            weights = policy(version)
            trainer.publish(engine, weights, version)
            found = differences(engine, reference(weights, plan, wire, torch.bfloat16))
            unquantized = differences(engine, reference(weights, plan, "bf16", torch.bfloat16))
            k3 = sum(math.exp(d) - d - 1 for d in found) / len(found)
            print(f"{wire} {version}: p50 {percentile(found, 0.5):.2e} p99 {percentile(found, 0.99):.2e} k3 {k3:.2e}")
            assert percentile(found, 0.99) <= P99_LIMIT[wire]
            assert k3 < 1.5e-2
            assert percentile(unquantized, 0.5) > 1.3 * percentile(found, 0.5)
        assert engine.state()["quantized_layers"] == (list(plan.quantized) if wire == "channel" else [])
    finally:
        engine.stop()
        trainer.close()
