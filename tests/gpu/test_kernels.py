"""The kernels on a GPU: bit for bit the reference's, and Transformer Engine's where it has such a cast.

With Transformer Engine, excepted and checked apart: groups of zeros and groups of 0 < amax <= 448 * 2^-127 of MXFP8 (TE writes
scale byte 0, ours is 127 and 1), blocks of zeros and blocks under the amax floor of fp32 scales. fp32 scales of TE are
1 / (448 / amax), rounded twice, ours amax / 448, rounded once: 1 ulp apart at most; codes are equal unless the quotient is within
that ulp of a tie, where they are neighbours.
"""

import pytest
import torch
from kernel_cases import SMALL, SMALL_MASKED, cast_cases, copy_cases, digest_cases, item, values

from fp8rl_workers.errors import NonFiniteError
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.cast_rounding import Rounding
from fp8rl_workers.weights.kernels import cast_plan
from fp8rl_workers.weights.kernels.plain import TorchCastPlan, TorchDigestPlan
from fp8rl_workers.weights.kernels.triton_plans import (
    MASKED,
    TILES,
    TritonCastPlan,
    TritonCopyPlan,
    TritonDigestPlan,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["pow2", "fp32"])
@pytest.mark.parametrize("rounding", [None, Rounding(3, seed=7)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("tiles", [(SMALL, SMALL_MASKED), (TILES, MASKED)], ids=["small", "tuned"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_cast_equals_the_reference_bit_for_bit(form, rounding, tiles, device):
    cases = cast_cases("cuda")
    fast = [item(*case) for case in cases]
    slow = [item(names, source.to(device), wire) for names, source, wire in cases]
    one, two = TritonCastPlan(fast, form, *tiles), TorchCastPlan(slow, form)
    one.run(rounding)
    two.run(rounding)
    assert one.finish() == two.finish()
    for a, b in zip(fast, slow, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8)), a.names


def test_digests_of_pieces_and_copies_equal_plain_torch():
    pieces = digest_cases("cuda")
    one, two = TritonDigestPlan(pieces), TorchDigestPlan(pieces)
    one.run()
    two.run()
    assert one.finish() == two.finish()
    pairs = copy_cases("cuda")
    TritonCopyPlan(pairs).run()
    assert all(torch.equal(source, target) for source, target in pairs)


def test_a_plan_runs_again_and_follows_its_sources():
    source = values(256, 256, device="cuda")
    one = item(("w",), source, "blockwise")
    plan = cast_plan([one], "pow2")
    plan.run()
    before = plan.finish()
    source.mul_(-1)
    plan.run()
    assert plan.finish() != before
    assert torch.equal(
        one.outputs[0].cpu().view(torch.uint8), quantize("w", source.cpu(), "blockwise")[""].view(torch.uint8)
    )
    assert plan.matches([one])
    assert not plan.matches([item(("w",), source, "blockwise")])


def test_tensors_that_are_not_finite_are_all_named():
    bad = [torch.ones(256, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    bad[0][200, 100] = float("nan")
    bad[2][0, 1] = float("inf")
    plan = cast_plan([item((name,), x, "blockwise") for name, x in zip("abc", bad, strict=True)], "pow2")
    plan.run()
    with pytest.raises(
        NonFiniteError, match=r"^a: 1 of 32768 .* at \[200, 100\] is nan.*; c: 1 of 32768 .*\[0, 1\] is inf"
    ):
        plan.finish()


@pytest.fixture
def engine():
    pytest.importorskip("transformer_engine.pytorch")
    return pytest.importorskip("transformer_engine_torch")


@pytest.mark.parametrize("wire", ["blockwise", "mxfp8"])
def test_backend_te_gives_the_same_bits_and_digests(engine, wire):
    sources = [values(256, 512, device="cuda"), torch.randn(2, 128, 256, dtype=torch.bfloat16, device="cuda")]
    names = [("a",), ("b", "c")]
    one, two = ([item(n, x, wire) for n, x in zip(names, sources, strict=True)] for _ in range(2))
    by_engine, by_triton = cast_plan(one, "pow2", "te"), cast_plan(two, "pow2", "triton")
    by_engine.run()
    by_triton.run()
    assert by_engine.finish() == by_triton.finish()


def blocks_of_engine(engine, weight, *, pow2):
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    found = Float8BlockQuantizer(
        engine.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=pow2, block_scaling_dim=2
    )(weight)
    tall, wide = weight.shape[0] // 128, weight.shape[1] // 128
    return found._rowwise_data, found._rowwise_scale_inv[:tall, :wide]


def test_power_of_two_blocks_are_those_of_transformer_engine(engine):
    weight = torch.randn(512, 1024, device="cuda").mul_(torch.exp2(torch.randint(-20, 8, (512, 1), device="cuda")))
    weight = weight.to(torch.bfloat16)
    one = item(("w",), weight, "blockwise")
    cast_plan([one], "pow2").run()
    codes, scales = blocks_of_engine(engine, weight, pow2=True)
    assert torch.equal(one.outputs[0].view(torch.uint8), codes)
    assert torch.equal(one.outputs[1], scales)


def test_fp32_scales_are_within_one_ulp_of_transformer_engine_and_codes_equal(engine):
    weight = torch.randn(512, 1024, dtype=torch.bfloat16, device="cuda")
    one = item(("w",), weight, "blockwise")
    cast_plan([one], "fp32").run()
    codes, scales = blocks_of_engine(engine, weight, pow2=False)
    apart = (one.outputs[1].view(torch.int32) - scales.contiguous().view(torch.int32)).abs()
    assert int(apart.max()) <= 1
    differ = one.outputs[0].view(torch.uint8) != codes
    quotient = weight.double() / scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    near = codes.view(torch.float8_e4m3fn).double(), one.outputs[0].double()
    tie = (near[0] + near[1]) / 2
    assert bool(((quotient - tie).abs() <= 2.0**-22 * tie.abs())[differ].all())
    assert float(differ.float().mean()) < 0.001


def test_mxfp8_is_transformer_engine_s_but_for_scale_byte_zero(engine):
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("Transformer Engine 2.12 writes no MXFP8 below compute capability 10.0")
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    weight = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
    weight[0, :32] = 0
    weight[1, :32] = 2.0**-120
    weight[2, 32:64] = 2.0**-40
    one = item(("w",), weight, "mxfp8")
    cast_plan([one], "pow2").run()
    found = MXFP8Quantizer(engine.DType.kFloat8E4M3, rowwise=True, columnwise=False)(weight)
    scales = found._rowwise_scale_inv.view(torch.uint8)[:256, :16]
    excepted = (scales == 0).nonzero().tolist()
    assert excepted == [[0, 0], [1, 0]]
    assert [int(one.outputs[1][r, c]) for r, c in excepted] == [127, 1]
    same = scales != 0
    assert torch.equal(one.outputs[1][same], scales[same])
    groups = one.outputs[0].view(torch.uint8).view(256, 16, 32), found._rowwise_data.view(256, 16, 32)
    assert torch.equal(groups[0][same], groups[1][same])
