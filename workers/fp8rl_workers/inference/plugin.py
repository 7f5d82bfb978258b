"""vLLM's general plugin: loaded in the API server, the engine core and each worker, possibly twice in one process."""

from __future__ import annotations

import functools
import os
from typing import Any

BACKEND = "fp8rl"
ONE_PROCESS_CORE = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""\"0\" where the launcher lets the core run its only worker inside itself."""
UTILITIES = ("state", "layers", "join", "abort", "commit")


def register() -> None:
    """Add our weight transfer engine, our calls on the engine core, and the version labels."""
    _register_backend()
    _add_core_calls()
    _label_scheduler()
    _keep_cpu_weights()
    _fork_cpu_core()


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001
        WeightTransferEngineFactory.register_engine(BACKEND, "fp8rl_workers.inference.engine", "Fp8rlTransferEngine")


def _add_core_calls() -> None:
    """`core_call` is looked up by name on the engine core, in one turn of its loop."""
    from vllm.v1.engine.core import EngineCore

    from fp8rl_workers.inference.core import utility

    for name in UTILITIES:
        setattr(EngineCore, f"fp8rl_{name}", utility(name))


def _label_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from fp8rl_workers.inference.core import book_of
    from fp8rl_workers.inference.spans import label_outputs

    plain = Scheduler.update_from_output
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def labelled(self: Any, scheduled: Any, output: Any) -> Any:
        batches = plain(self, scheduled, output)
        label_outputs(book_of(self), self.requests, batches)
        return batches

    Scheduler.update_from_output = labelled


def _keep_cpu_weights() -> None:
    """Where oneDNN takes BF16, vLLM packs each linear's weight away and empties the parameter: nothing could be loaded.

    Without it vLLM computes with torch's own linear, which uses the same oneDNN kernels on the parameter as it is.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False  # noqa: SLF001


def _fork_cpu_core() -> None:
    """Boot without importing torch and vLLM three times: fork the core from the API server, inspect the model in place.

    vLLM spawns the core on CPUs because its thread binding is set up by environment variables that OpenMP reads when it is
    loaded; the launcher binds no threads (`nobind`). It inspects a model's class in a subprocess to keep CUDA out of the
    API server; there is none.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not current_platform.is_cpu() or os.environ.get(ONE_PROCESS_CORE) != "0" or hasattr(platform, "fp8rl_forks"):
        return
    plain = platform.check_and_update_config

    def check_and_fork(vllm_config: Any) -> None:
        plain(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check_and_fork)
    platform.fp8rl_forks = True
    registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001
