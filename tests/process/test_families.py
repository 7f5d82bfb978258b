"""Each family against the two libraries that own its names: transformers' checkpoints and vLLM's own model classes."""

from __future__ import annotations

from typing import Any

import family_kit
import pytest
import torch

from fp8rl_workers.inference.audit import audit, hf_layers, quantized_modules
from fp8rl_workers.weights.load_reload import VllmReload
from fp8rl_workers.weights.specs import expected_tensors, plan_precision

pytestmark = pytest.mark.vllm

FAMILIES = sorted(family_kit.SMALL)
ENGINE_ONLY = tuple(f".attn.{which}_{part}" for which in ("q", "k", "v", "prob") for part in ("scale", "zero_point"))
PADDED = ".attn_sink"  # the engine pads the heads with sinks that do nothing


def release_names(name: str) -> str:
    """A DeepSeek V4 name as transformers saves it, in the release's spelling, which vLLM takes."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def engine_tensor(name: str) -> str:
    """The engine's name of a tensor that it neither fuses nor quantizes, from that of its module."""
    name = f"model.{name}" if name.startswith("hc_head_") else name
    return name.replace(".gate.bias", ".gate.e_score_correction_bias")


def filled(
    model: Any, parameters: dict[str, torch.nn.Parameter], sent: dict[str, torch.Tensor], before: int
) -> dict[str, torch.Tensor]:
    """Bytes of each parameter after a load over bytes that are all `before`."""
    for parameter in parameters.values():
        parameter.data.reshape(-1).view(torch.uint8).fill_(before)
    model.load_weights(iter(sent.items()))
    return {name: p.data.reshape(-1).view(torch.uint8).clone() for name, p in parameters.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformers_holds_exactly_the_tensors_of_the_spec(family, tmp_path):
    config = family_kit.SMALL[family]
    saved = family_kit.saved_shapes(config, tmp_path)
    if family == "deepseek_v4":
        saved = {release_names(name): shape for name, shape in saved.items()}
    assert saved == expected_tensors(config)


@pytest.mark.parametrize(
    ("family", "wire"),
    [(f, w) for f in FAMILIES for w in ("blockwise", "mxfp8", "channel") if f != "deepseek_v4" or w == "blockwise"],
)
def test_vllm_quantizes_exactly_the_plans_layers_and_takes_every_byte_of_a_sync(family, wire, tmp_path, monkeypatch):
    family_kit.pretend_gpu_kernels(monkeypatch)
    plan = plan_precision(family_kit.SMALL[family], wire)
    model = family_kit.build(family_kit.engine_config(tmp_path, family_kit.SMALL[family], plan, "dummy"), load=False)
    found = quantized_modules(model)
    assert found == plan.engine_modules
    assert audit(hf_layers(found, plan.engine_shards), plan.quantized) == ""
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith(ENGINE_ONLY)}
    sent = family_kit.wire_tensors(plan)
    first, second = filled(model, parameters, sent, 0xA5), filled(model, parameters, sent, 0x5A)
    untouched = [
        name
        for name in parameters
        if bool(((first[name] == 0xA5) & (second[name] == 0x5A)).any()) and not name.endswith(PADDED)
    ]
    assert untouched == []
    assert sum(p.numel() * p.itemsize for p in parameters.values()) >= sum(
        t.numel() * t.itemsize for t in sent.values()
    )
    for spec in plan.specs:
        if spec.dtype != "bfloat16":
            held = parameters[engine_tensor(plan.model.engine_name(spec.name))]
            assert held.dtype == getattr(torch, spec.dtype), spec.name
            assert torch.equal(held.data[: spec.shape[0]], sent[spec.name]), spec.name


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "glm4_moe"])
def test_synced_equals_loaded_from_disk(family, tmp_path, monkeypatch):
    from safetensors.torch import save_file
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    plan = plan_precision(family_kit.SMALL[family], "bf16")
    sent = family_kit.wire_tensors(plan)
    disk = tmp_path / "disk"
    vllm_config = family_kit.engine_config(disk, family_kit.SMALL[family], plan, "auto")
    save_file(sent, disk / "model.safetensors")
    loaded = family_kit.build(vllm_config, load=True)
    dummy = family_kit.engine_config(tmp_path / "dummy", family_kit.SMALL[family], plan, "dummy")
    synced = family_kit.build(dummy, load=True)
    VllmReload(synced, dummy, torch.device("cpu"))(list(sent.items()))
    expected = dict(loaded.named_parameters())
    assert set(expected) == {name for name, _ in synced.named_parameters()}
    differ = [
        name
        for name, parameter in synced.named_parameters()
        if not torch.equal(parameter.data.view(torch.uint8), expected[name].data.view(torch.uint8))
    ]
    assert differ == []
