"""Quantized-layer audit and KV scales on plain modules."""

from __future__ import annotations

import torch
from torch import nn

from fp8rl_workers.inference.audit import audit, hf_layers, quantized_modules
from fp8rl_workers.inference.kv_scales import restore_after_wake, restore_kv_scales


def linear(dtype):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    return module


def test_quantized_layers_are_read_from_the_modules_and_named_as_the_checkpoint_does():
    model = nn.Module()
    model.qkv_proj, model.gate, model.o_proj = linear(torch.float8_e4m3fn), linear(torch.bfloat16), linear(torch.uint8)
    found = quantized_modules(model)
    assert found == ["o_proj", "qkv_proj"]
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    assert hf_layers(found, fused) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_a_layer_that_is_quantized_on_one_side_only_is_named():
    assert audit(["a", "b"], ["b", "a"]) == ""
    assert audit(["a", "router"], ["a", "b"]) == (
        "2 layers differ from the precision plan: router is quantized, but should not be; b should be quantized, but is not"
    )


def test_kv_scales_are_one_in_tensors_float_mirrors_and_cpu_copies():
    attention = nn.Module()
    for kind in ("k", "v", "q", "prob"):
        attention.register_buffer(f"_{kind}_scale", torch.tensor(0.3))
        setattr(attention, f"_{kind}_scale_float", 0.3)
    attention._k_scale_cpu, attention._v_scale_cpu = torch.tensor(0.3), torch.tensor(0.3)
    model = nn.Sequential(nn.Linear(2, 2), attention)
    assert restore_kv_scales(model) == 1
    for kind in ("k", "v", "q", "prob"):
        assert float(getattr(attention, f"_{kind}_scale")) == 1.0
        assert getattr(attention, f"_{kind}_scale_float") == 1.0
    assert float(attention._k_scale_cpu) == float(attention._v_scale_cpu) == 1.0


def slept_worker():
    """A class as vLLM's worker, whose sleep leaves zeros."""

    class Worker:
        def __init__(self):
            self.model = nn.Module()
            self.model.register_buffer("_q_scale", torch.zeros(()))
            self.awake = []

        def get_model(self):
            return self.model

        def wake_up(self, tags=None):
            self.awake.append(tags)

    return Worker


def test_a_worker_that_wakes_has_its_scales_again():
    kind = slept_worker()
    restore_after_wake(kind)
    restore_after_wake(kind)
    worker = kind()
    worker.wake_up(["kv_cache"])
    assert worker.model._q_scale.item() == 0.0
    worker.wake_up(["weights"])
    assert worker.model._q_scale.item() == 1.0
    worker.model._q_scale.zero_()
    worker.wake_up()
    assert worker.model._q_scale.item() == 1.0
    assert worker.awake == [["kv_cache"], ["weights"], None]
