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


def sample(engine):
    """Prompt, completion and the engine's log-probabilities, for a fixed prompt set."""
    generator = torch.Generator().manual_seed(5)
    choices = []
    for _ in range(PROMPTS):
        prompt = torch.randint(0, MODEL_CONFIG["vocab_size"], (20,), generator=generator).tolist()
        choice = engine.generate(prompt, max_tokens=COMPLETION, seed=7)["choices"][0]
        choices.append((prompt, choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]]))
    return choices


def differences(choices, model):
    """|engine - reference| of every sampled token, in order of size."""
    found = []
    for prompt, completion, ours in choices:
        theirs = forward_logprobs(model, prompt, completion)
        found += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return sorted(found)


def k3(found):
    """Mean of e^r - r - 1 of the differences."""
    return sum(math.exp(d) - d - 1 for d in found) / len(found)


def percentile(found, share):
    return found[int(share * len(found))]


def noise_floor(engine_choices, weights, plan, wire):
    """p99 of what BF16 arithmetic alone does on the same tokens: transformers in BF16 against itself in fp32."""
    rough, exact = (reference(weights, plan, wire, dtype) for dtype in (torch.bfloat16, torch.float32))
    found = []
    for prompt, completion, _ in engine_choices:
        pairs = zip(
            forward_logprobs(rough, prompt, completion), forward_logprobs(exact, prompt, completion), strict=True
        )
        found += [abs(a - b) for a, b in pairs]
    return percentile(sorted(found), 0.99)


@pytest.fixture
def serve(tmp_path):
    """Boots an engine for a wire and a dtype; ends it and its trainer."""
    parts = []

    def start(wire, dtype):
        resolved, plan = resolved_for(wire)
        engine = Engine(tmp_path, resolved, dtype=dtype)
        trainer = Trainer(resolved, plan)
        parts.extend((engine.stop, trainer.close))
        engine.start().boot()
        trainer.form([engine])
        return engine, trainer, plan

    yield start
    for end in parts:
        end()


def publish_twice(trainer, engine):
    """Version 1 goes through the reload, version 2 through the learned layout; yields the weights after each."""
    for version in (1, 2):
        weights = random_weights(version)
        trainer.publish(engine, weights, version)
        yield weights


def test_in_fp32_arithmetic_the_engine_serves_exactly_the_policy_that_the_codes_stand_for(serve):
    engine, trainer, plan = serve("blockwise", "float32")
    for weights in publish_twice(trainer, engine):
        choices = sample(engine)
        found = differences(choices, reference(weights, plan, "blockwise", torch.float32))
        unquantized = differences(choices, reference(weights, plan, "bf16", torch.float32))
        print(f"fp32: p50 {percentile(found, 0.5):.2e} p99 {percentile(found, 0.99):.2e}")
        assert percentile(found, 0.99) <= 1e-3
        assert percentile(unquantized, 0.5) > 10 * percentile(found, 0.99)
    assert engine.layers() == []


def test_in_bf16_arithmetic_the_difference_is_that_of_bf16_arithmetic_itself(serve):
    engine, trainer, plan = serve("blockwise", "bfloat16")
    for weights in publish_twice(trainer, engine):
        choices = sample(engine)
        found = differences(choices, reference(weights, plan, "blockwise", torch.bfloat16))
        floor = noise_floor(choices, weights, plan, "blockwise")
        print(f"bf16: p50 {percentile(found, 0.5):.2e} p99 {percentile(found, 0.99):.2e} noise floor p99 {floor:.2e}")
        assert percentile(found, 0.99) <= 2 * floor
        assert k3(found) < 1.5e-2


def test_the_channel_wire_runs_in_the_engines_own_fp8_kernel(serve):
    """vLLM's kernel quantizes activations per token too; the reference does not."""
    engine, trainer, plan = serve("channel", "bfloat16")
    for weights in publish_twice(trainer, engine):
        found = differences(sample(engine), reference(weights, plan, "channel", torch.bfloat16))
        print(f"channel: p50 {percentile(found, 0.5):.2e} p99 {percentile(found, 0.99):.2e} k3 {k3(found):.2e}")
        assert k3(found) < 1.5e-2
    assert engine.layers() == list(plan.quantized)
