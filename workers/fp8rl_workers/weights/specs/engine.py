"""A precision plan in the words of vLLM: the `quantization_config` that goes into `--hf-overrides`. Pure.

    blockwise   quant_method fp8, `ignored_layers`: exact names, shards and, when all shards are ignored, the fused name
    channel     quant_method compressed-tensors, one group on Linear, strategy channel; `ignore`
    mxfp8       the same with groups of 32 and uint8 scales
    bf16        nothing

compressed-tensors asks for each expert's own projections, so a layer's ignored experts are one anchored `re:` there; the fp8
method asks for the name `experts`. Fused names are written because vLLM looks for them too once a mapping is registered.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from fp8rl_workers.protocol import EngineWire
from fp8rl_workers.weights.specs.plan import PrecisionPlan


def engine_ignore(plan: PrecisionPlan, wire: EngineWire) -> list[str]:
    """Names that the engine must leave in BF16, sorted, in the words of `wire`'s quantization method."""
    routed = {spec.module: spec.fused for spec in plan.specs if spec.kind == "routed_expert"}
    spell = plan.model.engine_name
    names = {spell(name) for name in plan.ignored if name not in routed}
    for alias, shards in plan.fused.items():
        if all(shard in plan.ignored for shard in shards):
            is_experts = shards[0] in routed
            names.add(spell(alias))
            if is_experts and wire != "blockwise":
                names.add(f"re:^{re.escape(spell(alias))}\\..*$")
    return sorted(names)


def engine_quantization(
    plan: PrecisionPlan, wire: EngineWire, scale_format: Literal["fp32", "pow2"]
) -> dict[str, Any] | None:
    """The `quantization_config` for the engine; None for bf16. `scale_format` is that of blockwise scales."""
    if wire == "bf16":
        return None
    ignore = engine_ignore(plan, wire)
    if wire == "blockwise":
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": ignore,
        }
        return config | ({"scale_fmt": "ue8m0"} if scale_format == "pow2" else {})
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    if wire == "mxfp8":
        group = common | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        weights, activations = group | {"dynamic": False}, group | {"dynamic": True}
    else:
        weights = common | {"strategy": "channel", "dynamic": False}
        activations = common | {"strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ignore,
    }
