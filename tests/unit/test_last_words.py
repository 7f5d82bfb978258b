"""The cause of a process's end, from logs as vLLM 0.26 and Python write them."""

from __future__ import annotations

import pytest

from fp8rl_operator.last_words import MAX_LENGTH, cause, wrong_input

NO_DEVICE = """\
(APIServer pid=528) INFO 11-30 18:14:13 [api_utils.py:345] version 0.26.0
(APIServer pid=528) WARNING 11-30 18:14:13 [system_utils.py:299] Found ulimit of 20000 and failed to automatically \
increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too \
many open files`.
(EngineCore pid=682) ERROR 11-30 18:14:51 [core.py:1330] EngineCore failed to start.
(EngineCore pid=682) ERROR 11-30 18:14:51 [core.py:1330] Traceback (most recent call last):
(EngineCore pid=682) ERROR 11-30 18:14:51 [core.py:1330]   File "/site/vllm/v1/engine/core.py", line 1290, in run
(EngineCore pid=682) ERROR 11-30 18:14:51 [core.py:1330]     engine_core = EngineCoreProc(*args, **kwargs)
(EngineCore pid=682) ERROR 11-30 18:14:51 [core.py:1330] AssertionError: DP adjusted local rank 0 is out of bounds for 0 devices.
(EngineCore pid=682) Process EngineCore:
(EngineCore pid=682) Traceback (most recent call last):
(EngineCore pid=682) AssertionError: DP adjusted local rank 0 is out of bounds for 0 devices.
(APIServer pid=528) Traceback (most recent call last):
(APIServer pid=528)   File "/site/vllm/v1/engine/utils.py", line 1272, in wait_for_engine_startup
(APIServer pid=528)     raise RuntimeError(
(APIServer pid=528) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
NO_KERNEL = """\
(EngineCore pid=15685) ERROR 11-30 18:28:30 [core.py:1330]     raise ValueError(f"Unsupported FP8 MoE backend: {fp8_backend.value}")
(EngineCore pid=15685) ERROR 11-30 18:28:30 [core.py:1330] ValueError: Unsupported FP8 MoE backend: NONE
(APIServer pid=15441)     raise RuntimeError(
(APIServer pid=15441) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
DEAD = """\
(APIServer pid=3545) ERROR 11-30 18:13:00 [async_llm.py:704] Traceback (most recent call last):
(APIServer pid=3545) ERROR 11-30 18:13:00 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=3545) asyncio.exceptions.CancelledError
"""
TRAINER = """\
2026-11-30 18:14:51,120 INFO fp8rl_workers.trainer.service step 3: loss 0.1
[rank0]: Traceback (most recent call last):
[rank0]:   File "/site/torch/nn/modules/module.py", line 1776, in _call_impl
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (NO_DEVICE, "AssertionError: DP adjusted local rank 0 is out of bounds for 0 devices."),
        (NO_KERNEL, "ValueError: Unsupported FP8 MoE backend: NONE"),
        (
            DEAD,
            (
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
                " See stack trace (above) for the root cause."
            ),
        ),
        (TRAINER, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("the toy was told to crash\n\n", "the toy was told to crash"),
        ("\x1b[31mValueError: red\x1b[0m\n", "ValueError: red"),
        ("INFO 11-30 18:14:13 [a.py:1] RuntimeError: told by the way\nlast\n", "last"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x7f (most recent call first):\n", None),
        ("killed by SIGKILL, from outside or for want of memory", None),
        ("", ""),
    ],
)
def test_the_cause_is_the_first_exception_without_prefixes_else_the_last_line(log: str, expected: str | None) -> None:
    assert cause(log) == (log.splitlines()[0] if expected is None else expected)


def test_the_cause_is_bounded() -> None:
    assert cause("ValueError: " + "x" * 5000) == "ValueError: " + "x" * (MAX_LENGTH - 13) + "…"


def test_a_refused_input_is_told_with_its_reason() -> None:
    log = "INFO 11-30 [x] boots\nInvalidInput: a: b\nInvalidModel: model.path: /m has no config.json\n"
    assert wrong_input(log) == ("InvalidModel", "model.path: /m has no config.json")
    assert wrong_input("exit") is None
