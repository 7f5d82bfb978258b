"""The Triton kernels in Triton's interpreter against plain torch: the same bytes, the same digests, the same faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    script = Path(__file__).with_name("kernel_interpreter.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_cast_equals_the_reference_bit_for_bit(report):
    assert [what for what, same in report["casts"].items() if not same] == []


def test_digests_of_pieces_and_copies_equal_plain_torch(report):
    assert [what for what, same in report["moves"].items() if not same] == []


def test_tensors_that_are_not_finite_are_all_named(report):
    ending = "; the step that made it has diverged, resume from an earlier checkpoint"
    assert report["faults"] == (
        f"b: 1 of 128 values are not finite, the first at [2, 3] is nan{ending}; "
        f"c: 1 of 7 values are not finite, the first at [5] is -inf{ending}"
    )
