"""Arithmetic of the Triton kernels, proved in exact numbers for all mantissas that can occur."""

from fractions import Fraction

import numpy as np
import torch

from fp8rl_workers.weights.cast_blockwise import AMAX_FLOOR
from fp8rl_workers.weights.cast_rounding import E4M3_MAX

BF16_MANTISSAS = [Fraction(128 + i, 128) for i in range(128)]


def rounded(value: Fraction) -> Fraction:
    """To the nearest fp32 (ties to even); no under- or overflow."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def newton(x: Fraction, scale: Fraction) -> Fraction:
    """`triton_numbers.quotient` in exact numbers."""
    reciprocal = rounded(1 / scale)
    near = rounded(x * reciprocal)
    return rounded(rounded(x - near * scale) * reciprocal + near)


def test_one_newton_step_gives_the_rounded_quotient_for_every_scale_of_blockwise():
    floor = Fraction(float(np.float32(AMAX_FLOOR) / np.float32(E4M3_MAX)))
    scales = [rounded(amax / 448) for amax in BF16_MANTISSAS] + [floor]
    assert [(x, s) for s in scales for x in BF16_MANTISSAS if newton(x, s) != rounded(x / s)] == []


def test_one_newton_step_gives_the_rounded_quotient_for_every_scale_of_channel():
    wrong = [(x, s) for s in BF16_MANTISSAS for x in BF16_MANTISSAS if newton(x, s) != rounded(x / s)]
    assert wrong == []


def test_rounding_of_these_tests_is_that_of_fp32():
    numbers = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert [float(rounded(Fraction(x))) for x in numbers.tolist()] == numbers.to(torch.float32).to(
        torch.float64
    ).tolist()
