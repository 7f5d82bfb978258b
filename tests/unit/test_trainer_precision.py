"""What `auto` becomes, and what is refused, on each kind of device."""

from typing import Any

import pytest
from trainer_kit import make_config, make_module, model_config

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.trainer.loading import check_backend
from fp8rl_workers.trainer.precision import Device, resolve_precision

CPU = Device("cpu", None)
L40S = Device("NVIDIA L40S", (8, 9))
H200 = Device("NVIDIA H200", (9, 0))
B200 = Device("NVIDIA B200", (10, 0))
RTX = Device("NVIDIA RTX PRO 6000", (12, 0))


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return model_config(make_module())


@pytest.mark.parametrize(
    ("device", "recipe", "wire"),
    [(CPU, "bf16", "bf16"), (L40S, "bf16", "bf16"), (H200, "blockwise", "blockwise"), (B200, "mxfp8", "mxfp8")],
)
def test_auto_becomes_what_the_device_computes_and_the_wire_follows(
    model: dict[str, Any], device: Device, recipe: str, wire: str
) -> None:
    resolved = resolve_precision(make_config(precision={}), model, device)
    assert (resolved.recipe, resolved.wire, resolved.scale_format) == (recipe, wire, "pow2")


def test_an_explicit_recipe_holds_on_a_cpu_and_the_wire_follows_it(model: dict[str, Any]) -> None:
    resolved = resolve_precision(make_config(precision={"recipe": "mxfp8"}), model, CPU)
    assert (resolved.recipe, resolved.wire) == ("mxfp8", "mxfp8")
    assert "model.layers.0.mlp.down_proj" in resolved.quantized_layers


@pytest.mark.parametrize(
    ("device", "recipe"), [(L40S, "blockwise"), (RTX, "mxfp8"), (RTX, "blockwise"), (L40S, "mxfp8")]
)
def test_transformer_engine_s_refusals_are_ours_for_megatron(
    model: dict[str, Any], device: Device, recipe: str
) -> None:
    config = make_config(precision={"recipe": recipe}, backend="megatron")
    with pytest.raises(InvalidInputError, match=f"{recipe} is refused by Transformer Engine on {device.name}"):
        resolve_precision(config, model, device)


def test_a_wire_other_than_the_recipe_needs_allow_mismatch(model: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"precision\.wire: channel beside recipe bf16.*allowMismatch: true"):
        resolve_precision(make_config(precision={"wire": "channel"}), model, CPU)
    resolved = resolve_precision(make_config(precision={"wire": "channel", "allow_mismatch": True}), model, CPU)
    assert (resolved.recipe, resolved.wire) == ("bf16", "channel")


def test_fp32_scales_are_refused_on_blackwell(model: dict[str, Any]) -> None:
    config = make_config(precision={"scale_format": "fp32"})
    assert resolve_precision(config, model, H200).scale_format == "fp32"
    with pytest.raises(InvalidInputError, match=r"precision\.scaleFormat: fp32 is not built for NVIDIA B200; use pow2"):
        resolve_precision(config, model, B200)


def test_layers_that_stay_bf16_stand_with_their_reason(model: dict[str, Any]) -> None:
    config = make_config(precision={"recipe": "blockwise", "ignored_layers": ["model.layers.0.mlp.down_proj"]})
    resolved = resolve_precision(config, model, CPU)
    assert "ignoredLayers" in resolved.ignored_layers["model.layers.0.mlp.down_proj"]
    assert "model.layers.0.mlp.down_proj" not in resolved.quantized_layers


def test_what_the_torch_backend_does_not_do_is_refused_by_name() -> None:
    check_backend(make_config())
    with pytest.raises(
        InvalidInputError, match=r"trainer\.offload: 'full' needs.*trainer\.parallelism: \{'tensor': 2\}"
    ):
        check_backend(make_config(offload="full", parallelism={"tensor": 2, "pipeline": 1}))


def test_nucleus_sampling_is_refused_because_it_would_bias_every_ratio() -> None:
    check_backend(make_config(top_p=1.0))
    with pytest.raises(InvalidInputError, match=r"^rollout\.topP: 0\.9 leaves .* off by the nucleus' mass; use 1$"):
        check_backend(make_config(top_p=0.9))


def test_a_linear_whose_shard_on_the_engines_breaks_the_kernel_floor_is_sent_in_bf16(model: dict[str, Any]) -> None:
    whole = resolve_precision(make_config(precision={"recipe": "blockwise"}), model, CPU)
    split = resolve_precision(make_config(precision={"recipe": "blockwise"}, engine_tensor_parallel=2), model, CPU)
    query = "model.layers.0.self_attn.q_proj"
    assert query in whole.quantized_layers
    assert query not in split.quantized_layers
    assert "64" in split.ignored_layers[query]
    assert "128" in split.ignored_layers[query]
