"""Casts: what each format does with every kind of input, bit for bit where a formula or another library says so."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl_workers.errors import InvalidModelError, NonFiniteError
from fp8rl_workers.weights.cast import Rounding, Shard, dequantize, fake_quantize, quantize

FORMATS = ("blockwise", "mxfp8", "channel")


def weight(rows: int, columns: int, *, seed: int = 0, std: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)


def codes(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return parts[""].view(torch.uint8)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k].view(torch.uint8), right[k].view(torch.uint8)) for k in left
    )


@pytest.mark.parametrize(
    ("wire", "suffix", "shape", "dtype"),
    [
        ("blockwise", "_scale_inv", (3, 2), torch.float32),
        ("mxfp8", "_scale", (300, 5), torch.uint8),
        ("channel", "_scale", (300, 1), torch.bfloat16),
    ],
)
def test_parts_have_the_names_shapes_and_dtypes_of_the_format(wire, suffix, shape, dtype):
    parts = quantize("w", weight(300, 160), wire)
    assert set(parts) == {"", suffix}
    assert parts[""].dtype == torch.float8_e4m3fn
    assert parts[""].shape == (300, 160)
    assert (parts[suffix].shape, parts[suffix].dtype) == (shape, dtype)
    assert all(part.is_contiguous() for part in parts.values())


def test_bf16_is_the_identity_for_any_shape():
    x = weight(4, 6)[0]
    parts = quantize("norm", x, "bf16")
    assert list(parts) == [""]
    assert torch.equal(dequantize(parts, "bf16"), x)


def test_blockwise_scale_is_amax_over_448_in_fp32():
    x = torch.zeros(128, 256, dtype=torch.bfloat16)
    x[3, 5], x[100, 200] = -7.0, 3.0
    scale = quantize("w", x, "blockwise", scale_format="fp32")["_scale_inv"]
    assert torch.equal(scale, torch.tensor([[7.0, 3.0]]) / torch.tensor(448.0))


@pytest.mark.parametrize(("amax", "scale"), [(448.0, 1.0), (450.0, 2.0), (224.0, 0.5), (1.0, 2.0**-8)])
def test_pow2_scale_is_rounded_up_to_a_power_of_two(amax, scale):
    x = torch.full((1, 1), amax, dtype=torch.bfloat16)
    assert quantize("w", x, "blockwise", scale_format="pow2")["_scale_inv"].item() == scale


def test_zero_blocks_have_zero_codes_and_the_floor_scale():
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    fp32 = quantize("w", x, "blockwise", scale_format="fp32")
    assert fp32["_scale_inv"].item() == (torch.tensor(1e-10) / torch.tensor(448.0)).item()
    assert quantize("w", x, "blockwise", scale_format="pow2")["_scale_inv"].item() == 2.0**-42
    assert not codes(fp32).any()


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0.0, 127), (448.0, 127), (450.0, 128), (224.0, 126), (1.0, 119), (2.0**-133, 1), (3.3895e38, 247)],
)
def test_mxfp8_byte_is_the_exponent_plus_127_and_never_zero(amax, byte):
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 7] = amax
    assert quantize("w", x, "mxfp8")["_scale"].tolist() == [[byte]]


def test_mxfp8_exponent_is_that_of_the_formula_for_every_bf16_mantissa():
    x = torch.zeros(128, 32, dtype=torch.bfloat16)
    x[:, 0] = torch.arange(128, 256).to(torch.bfloat16) * 2.0**-12
    expected = [math.ceil(math.log2(v * 2.0**-12 / 448)) + 127 for v in range(128, 256)]
    assert quantize("w", x, "mxfp8")["_scale"].flatten().tolist() == expected


def test_mxfp8_refuses_columns_that_are_no_multiple_of_32_with_the_arithmetic():
    with pytest.raises(InvalidModelError, match=r"a\.b\.weight: mxfp8 needs K % 32 == 0, but K = 80 = 32 \* 2 \+ 16"):
        quantize("a.b.weight", weight(4, 80), "mxfp8")


def test_channel_equals_compressed_tensors_dynamic_fp8_bit_for_bit():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as reference
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.cat([weight(200, 96, seed=i, std=10.0 ** (i - 3)) for i in range(6)])
    x[7] = 0
    x[8, 3] = -0.0
    x[9] = 1e-39
    args = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
    expected = reference(x, scale[0], zero[0], args, dtype=torch.float8_e4m3fn)
    parts = quantize("w", x, "channel")
    assert parts["_scale"].dtype == scale.dtype == torch.bfloat16
    assert torch.equal(parts["_scale"], scale[0])
    assert torch.equal(codes(parts), expected.view(torch.uint8))


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("rounding", [None, Rounding(version=3)])
def test_a_stack_is_cast_like_its_matrices(wire, rounding):
    stack = torch.stack([weight(130, 64, seed=i) for i in range(3)])
    whole = quantize("experts", stack, wire, rounding=rounding)
    for i in range(3):
        shard = Shard((i, 0, 0), (3, 130, 64))
        one = quantize("experts", stack[i : i + 1], wire, rounding=rounding, shard=shard)
        assert same({k: v[i : i + 1].contiguous() for k, v in whole.items()}, one)
    assert torch.equal(dequantize(whole, wire)[1], dequantize({k: v[1] for k, v in whole.items()}, wire))


@pytest.mark.parametrize("wire", FORMATS)
def test_non_contiguous_input_gives_the_same_bits(wire):
    x = weight(96, 160)
    assert same(quantize("w", x.t().contiguous().t(), wire), quantize("w", x, wire))
    assert same(quantize("w", x.repeat(1, 2)[:, :160], wire), quantize("w", x, wire))


@pytest.mark.parametrize("wire", [*FORMATS, "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused_by_name_with_count_and_first_index(wire, value):
    x = weight(64, 64)
    x[3, 7] = value
    x[9, 1] = math.nan
    with pytest.raises(NonFiniteError, match=rf"layers\.0\.q: 2 of 4096 values .* first at \[3, 7\] is {value}"):
        quantize("layers.0.q", x, wire)


def test_an_fp32_master_is_refused():
    with pytest.raises(TypeError, match="w: the source of a cast is the BF16 weight"):
        quantize("w", weight(32, 32).to(torch.float32), "blockwise")


@pytest.mark.parametrize("wire", FORMATS)
def test_a_vector_cannot_be_quantized(wire):
    with pytest.raises(InvalidModelError, match=rf"norm: wire {wire} needs a matrix"):
        quantize("norm", weight(1, 32)[0], wire)


@settings(max_examples=60, deadline=None)
@given(
    wire=st.sampled_from(FORMATS),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    rows=st.integers(1, 260),
    groups=st.integers(1, 9),
    odd=st.integers(0, 31),
    exponent=st.integers(-20, 5),
    seed=st.integers(0, 1000),
)
@example(wire="channel", scale_format="fp32", rows=25, groups=5, odd=26, exponent=0, seed=44)  # rounds twice near 0
def test_round_trip_is_within_half_a_step_of_the_scale(wire, scale_format, rows, groups, odd, exponent, seed):
    columns = 32 * groups + (0 if wire == "mxfp8" else odd)
    x = weight(rows, columns, seed=seed, std=2.0**exponent)
    parts = quantize("w", x, wire, scale_format=scale_format)
    back = dequantize(parts, wire).to(torch.float32)
    original = x.to(torch.float32)
    scale = scale_of_each_element(parts, wire, rows, columns)
    # e4m3: half a step is 2^-4 relative, 2^-10 * scale below 2^-6. BF16 roundings, of channel's scale and quotient and of the
    # product, add 2^-7 relative; below 2^-6 the quotient's and the product's are 2^-9 of 2^-6 each: 2^-14 * scale.
    bound = torch.maximum(original.abs() * (2.0**-4 + 2.0**-7), scale * (2.0**-10 + 2.0**-14))
    assert ((back - original).abs() <= bound).all()


def scale_of_each_element(parts, wire, rows, columns):
    if wire == "blockwise":
        scale = parts["_scale_inv"].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    elif wire == "mxfp8":
        scale = (2.0 ** (parts["_scale"].to(torch.float32) - 127)).repeat_interleave(32, 1)
    else:
        scale = parts["_scale"].to(torch.float32)
    return scale.expand(rows, columns)


@settings(max_examples=60, deadline=None)
@given(
    wire=st.sampled_from(["blockwise", "mxfp8"]),
    rows=st.integers(1, 200),
    groups=st.integers(1, 6),
    exponent=st.integers(-20, 5),
    seed=st.integers(0, 1000),
    version=st.one_of(st.none(), st.integers(1, 9)),
)
def test_values_on_the_grid_stay_nearest_and_stochastic(wire, rows, groups, exponent, seed, version):
    x = weight(rows, 32 * groups, seed=seed, std=2.0**exponent)
    grid = fake_quantize("w", x, wire)
    rounding = None if version is None else Rounding(version)
    assert torch.equal(fake_quantize("w", grid, wire, rounding=rounding), grid)


@pytest.mark.parametrize("wire", ["blockwise", "mxfp8"])
def test_the_same_values_may_get_another_scale_with_codes_to_match(wire):
    x = weight(512, 512, std=0.02)
    first = quantize("w", x, wire)
    again = quantize("w", dequantize(first, wire), wire)
    suffix = next(k for k in first if k)
    moved = (first[suffix] != again[suffix]).float().mean().item()
    assert moved < 0.2
    assert torch.equal(dequantize(first, wire), dequantize(again, wire))


def test_channel_codes_come_back_from_their_own_values():
    first = quantize("w", weight(256, 256), "channel")
    again = quantize("w", dequantize(first, "channel"), "channel")
    assert torch.equal(codes(first), codes(again))
    ratio = again["_scale"].to(torch.float32) / first["_scale"].to(torch.float32)
    assert ((ratio - 1).abs() <= 2.0**-7).all()
