"""vLLM's weight transfer engine of each worker rank: owns the loader and the agent; and the calls that the core makes on it.

The functions below take vLLM's worker and JSON, and answer JSON objects (`core` sends them to all ranks by
`collective_rpc`); a refusal is an answer with `error` and `reason`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.errors import WorkerError
from fp8rl_workers.inference.agent import Agent
from fp8rl_workers.inference.audit import audit, hf_layers, quantized_modules
from fp8rl_workers.inference.kv_scales import restore_kv_scales
from fp8rl_workers.inference.launch import holds_bf16, plan_of, read_model
from fp8rl_workers.protocol import Decision, Epoch, ResolvedPrecision
from fp8rl_workers.weights.load import Loader
from fp8rl_workers.weights.load_reload import VllmReload

Answer = dict[str, Any]
RESOLVED_VARIABLE = "FP8RL_RESOLVED"
"""Environment variable with the `ResolvedPrecision` that this engine was booted with, as JSON."""


class Fp8rlTransferEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):  # type: ignore[misc]
    """Receives beside the engine and loads in two phases; vLLM's own update routes are refused."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        pod = PodEnvironment.read()
        job = EngineConfig.load(pod.config)
        resolved = ResolvedPrecision.model_validate_json(os.environ[RESOLVED_VARIABLE])
        as_bf16 = holds_bf16(resolved, on_cpu=bool(current_platform.is_cpu()))
        restore_kv_scales(model)
        fused = plan_of(job, resolved, read_model(job.model_path)).fused
        self.quantized = hf_layers(quantized_modules(model), fused)
        self.audit = audit(self.quantized, [] if as_bf16 else resolved.quantized_layers)
        parallel = vllm_config.parallel_config
        self.loader = Loader(
            model,
            VllmReload(model, vllm_config, device),
            whole=parallel.world_size == 1,
            mode=job.weight_sync.mode,
            unlearnable=functools.partial(hidden_copies, model),
        )
        self.agent = Agent(
            self.loader,
            "bf16" if as_bf16 else "codes",
            job_uid=job.uid,
            pod_uid=pod.pod_uid,
            pod_ip=pod.pod_ip,
            local_rank=parallel.rank,
        )

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        _refuse_vllm_route()

    def start_weight_update(self) -> None:
        _refuse_vllm_route()

    def finish_weight_update(self) -> None:
        _refuse_vllm_route()

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        _refuse_vllm_route()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        _refuse_vllm_route()

    def shutdown(self) -> None:
        self.agent.leave()


def _refuse_vllm_route() -> NoReturn:
    raise RuntimeError("this engine's weights come over fp8rl's own routes (/fp8rl/v1), not over vLLM's")


def hidden_copies(model: nn.Module) -> dict[str, str]:
    """Parameters whose values a kernel computes with from a copy of its own: writing the parameter would change nothing."""
    reason = "vLLM's CPU experts compute with slices taken at load time (dimensions that are no multiple of 32)"
    return {name: reason for name, module in model.named_modules() if hasattr(module, "gate_up_linear")}


def rank_call(function: Callable[..., Answer | None]) -> Callable[..., Answer]:
    """Answer a `WorkerError` instead of raising it through vLLM's RPC."""

    @functools.wraps(function)
    def call(worker: Any, *args: str) -> Answer:
        try:
            return function(worker.weight_transfer_engine, *args) or {}
        except WorkerError as error:
            return {"error": str(error), "reason": error.reason}

    return call


@rank_call
def state(engine: Fp8rlTransferEngine) -> Answer:
    """What this rank holds: fields of `protocol.EngineState`."""
    agent, loader = engine.agent, engine.loader
    prepared = agent.prepared
    return {
        "epoch": agent.epoch.epoch if agent.epoch else None,
        "prepared_sync_id": prepared.sync_id if prepared else None,
        "prepared_version": prepared.version if prepared else None,
        "load_path": loader.path,
        "load_fallback": loader.fallback,
        "quantized_layers": engine.quantized,
        "audit": engine.audit,
        "message": agent.error,
    }


@rank_call
def join(engine: Fp8rlTransferEngine, epoch: str) -> None:
    """Join an epoch in the agent's thread."""
    engine.agent.join(Epoch.model_validate_json(epoch))


@rank_call
def abort(engine: Fp8rlTransferEngine, decision: str) -> None:
    """Forget a sync."""
    engine.agent.abort(Decision.model_validate_json(decision))


@rank_call
def verify(engine: Fp8rlTransferEngine, decision: str) -> None:
    """First half of a commit: nothing changes yet."""
    engine.agent.verify(Decision.model_validate_json(decision))


@rank_call
def apply(engine: Fp8rlTransferEngine, decision: str) -> None:
    """Second half of a commit: the live parameters change."""
    engine.agent.apply(Decision.model_validate_json(decision))
    restore_kv_scales(engine.model)
    if current_platform.is_cuda_alike():
        torch.accelerator.synchronize()


def merge_states(ranks: list[Answer]) -> Answer:
    """One answer of all ranks: what is prepared counts only if all ranks have it; the first fault is kept."""
    first = dict(ranks[0])
    if any(rank["prepared_sync_id"] != first["prepared_sync_id"] for rank in ranks):
        first["prepared_sync_id"] = first["prepared_version"] = None
    first["error"] = next((fault for rank in ranks for fault in (rank["audit"], rank["message"]) if fault), "")
    first["audit_passed"] = not any(rank["audit"] for rank in ranks)
    first["load_fallback"] = {name: why for rank in ranks for name, why in rank["load_fallback"].items()}
    del first["audit"], first["message"]
    return first
