"""vLLM's weight transfer engine of each worker rank: owns the loader and the agent (`rank` has the calls on them)."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.inference.agent import Agent
from fp8rl_workers.inference.audit import audit, hf_layers, quantized_modules
from fp8rl_workers.inference.kv_scales import restore_after_wake, restore_kv_scales
from fp8rl_workers.inference.launch import RESOLVED_VARIABLE, holds_bf16, plan_of, read_model
from fp8rl_workers.protocol import ResolvedPrecision
from fp8rl_workers.weights.load import Loader
from fp8rl_workers.weights.load_reload import VllmReload

PR_SET_PDEATHSIG = 1


class Fp8rlTransferEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):  # type: ignore[misc]
    """Receives beside the engine and loads in two phases; vLLM's own update routes are refused."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        die_with_api_server()
        pod = PodEnvironment.read()
        job = EngineConfig.load(pod.config)
        resolved = ResolvedPrecision.model_validate_json(Path(os.environ[RESOLVED_VARIABLE]).read_bytes())
        as_bf16 = holds_bf16(resolved, on_cpu=bool(current_platform.is_cpu()))
        restore_kv_scales(model)
        restore_after_wake(Worker)
        fused = plan_of(job, resolved, read_model(job.model_path)).engine_shards
        self.quantized = hf_layers(quantized_modules(model), fused)
        self.audit = audit(self.quantized, [] if as_bf16 else resolved.quantized_layers)
        parallel = vllm_config.parallel_config
        reload = VllmReload(model, vllm_config, device)
        self.loader = Loader(
            model,
            reload,
            part_reload=reload.of_part,
            whole=parallel.world_size == 1,
            mode=job.weight_sync.mode,
            unlearnable=functools.partial(hidden_copies, model),
        )
        self.agent = Agent(
            self.loader,
            "bf16" if as_bf16 else "codes",
            job_uid=job.uid,
            pod=pod,
            local_rank=parallel.rank,
        )

    def finish_load(self, path: str) -> None:
        """After the parameters changed, before the next step. A plan copies wire tensors only, a reload touches the scales too."""
        if path != "plan":
            restore_kv_scales(self.model)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:  # noqa: ARG002
        _refuse_vllm_route()

    def start_weight_update(self) -> None:
        _refuse_vllm_route()

    def finish_weight_update(self) -> None:
        _refuse_vllm_route()

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:  # noqa: ARG002
        _refuse_vllm_route()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        _refuse_vllm_route()

    def shutdown(self) -> None:
        self.agent.leave()


def _refuse_vllm_route() -> NoReturn:
    raise RuntimeError("this engine's weights come over fp8rl's own routes (/fp8rl/v1), not over vLLM's")


def die_with_api_server() -> None:
    """Have the kernel end this process when the one that forked it ends: a killed server leaves no engine core behind."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def hidden_copies(model: nn.Module) -> dict[str, str]:
    """Parameters whose values a kernel computes with from a copy of its own: writing the parameter would change nothing."""
    sliced = "vLLM's CPU experts compute with slices taken at load time (dimensions that are no multiple of 32)"
    absorbed = "vLLM's MLA computes with matrices that it derives from kv_b_proj at load time"
    found = {name: sliced for name, module in model.named_modules() if hasattr(module, "gate_up_linear")}
    mla = ("W_UV", "W_UK_T")
    return found | {
        name: absorbed for name, module in model.named_modules() if any(hasattr(module, field) for field in mla)
    }
