"""What a reload leaves of vLLM's own objects."""

from types import SimpleNamespace

import torch
from torch import nn

from fp8rl_workers.weights.load_reload import kernels_kept


def test_kernels_of_experts_go_on_with_the_scales_of_the_parameters_after_a_reload():
    layer = nn.Module()
    layer.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    config = SimpleNamespace(scale=layer.scale)
    layer.quant_method = SimpleNamespace(moe_quant_config=config, moe_kernel=SimpleNamespace(config=config), calls=0)
    with kernels_kept(nn.Sequential(layer)):
        temporary = SimpleNamespace(scale=torch.full((2,), 7.0))
        layer.quant_method.moe_quant_config = temporary
        layer.quant_method.moe_kernel = SimpleNamespace(config=temporary)
        layer.quant_method.calls += 1
        layer.scale.copy_(temporary.scale)
    layer.scale.fill_(3.0)
    assert layer.quant_method.moe_kernel.config.scale.tolist() == [3.0, 3.0]
    assert layer.quant_method.moe_quant_config is config
    assert layer.quant_method.calls == 1


def test_a_method_that_had_no_kernel_keeps_the_one_that_the_reload_made():
    layer = nn.Module()
    layer.quant_method = SimpleNamespace(moe_kernel=None)
    with kernels_kept(layer):
        layer.quant_method.moe_kernel = "made"
    assert layer.quant_method.moe_kernel == "made"
