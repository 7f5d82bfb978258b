"""Whether the engine holds what it should: bit for bit what vLLM's own load makes of the reference's checkpoint of the trainer's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8rl_workers.inference.audit import CODE_DTYPES
from fp8rl_workers.inference.kv_scales import restore_kv_scales
from fp8rl_workers.weights.cast import dequantize
from fp8rl_workers.weights.load_reload import VllmReload
from weight_sync.engine import Engine
from weight_sync.models import CONFIGS, checkpoint, resolve

POISON = 0x5A
CHUNK_BYTES = 64 << 20


def checksums(model: nn.Module) -> dict[str, int]:
    """A checksum of each parameter's storage that knows the place of every byte."""
    return {name: checksum(flat(parameter.data)) for name, parameter in model.named_parameters()}


def checksum(data: Tensor) -> int:
    """Sum over all bytes, eight at a time, of word times odd number of its place, modulo 2**64; in plain torch, with little memory."""
    total = 0
    for chunk in data.split(CHUNK_BYTES):
        padded = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        places = torch.arange(padded.numel(), device=data.device) * 2 + 1
        total = total * 31 + int((padded * places).sum())
    return total % (1 << 64)


def flat(tensor: Tensor) -> Tensor:
    """A parameter's storage as bytes, whatever its strides are."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison(model: nn.Module) -> None:
    """Overwrite all weights."""
    for parameter in model.parameters():
        flat(parameter.data).fill_(POISON)


def load_reference(engine: Engine, version: int, style: str = "random") -> None:
    """Overwrite everything, then load the reference's checkpoint of a version through vLLM's reload, as from a disk."""
    precision = engine.setup.precision
    _, plan = resolve(CONFIGS[engine.setup.model], precision)
    poison(engine.model)
    inputs = checkpoint(plan, precision, engine.device, version, style)
    if not holds_codes(engine.model):
        inputs = as_bf16(inputs, precision.wire)
    VllmReload(engine.model, engine.transfer.vllm_config, engine.device)(inputs)
    restore_kv_scales(engine.model)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def holds_codes(model: nn.Module) -> bool:
    """Whether some parameter holds codes."""
    return any(parameter.dtype in CODE_DTYPES for parameter in model.parameters())


def as_bf16(inputs: Any, wire: Any) -> Any:
    """Quantized weights as the BF16 values that they stand for, on engines that hold those."""
    parts: dict[str, Tensor] = {}
    weight = ""
    for name, tensor in inputs:
        if weight and not name.startswith(weight):
            yield weight, parts[""] if len(parts) == 1 else dequantize(parts, wire)
            parts = {}
        if not parts:
            weight = name
        parts[name.removeprefix(weight)] = tensor
    yield weight, parts[""] if len(parts) == 1 else dequantize(parts, wire)


def compare(engine: Engine, version: int) -> dict[str, Any]:
    """Parameters and greedy answers as they are, against those after the reference's load."""
    ours, answers = checksums(engine.model), engine.greedy()
    engine.llm.reset_prefix_cache()
    repeated = engine.greedy()
    load_reference(engine, version)
    engine.llm.reset_prefix_cache()
    theirs, again = checksums(engine.model), engine.greedy()
    differ = sorted(name for name in ours if ours[name] != theirs[name])
    return {
        "parameters": len(ours),
        "parameters_equal": not differ,
        "parameters_that_differ": differ[:10],
        "generations_repeat": answers == repeated,
        "generations_equal": answers == again,
        "different_tokens": len({token for tokens, _ in answers for token in tokens}),
    }
