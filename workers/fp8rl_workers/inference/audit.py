"""Which layers the engine really quantized, by HF name, against what the trainer resolved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

CODE_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int8)


def quantized_modules(model: nn.Module) -> list[str]:
    """The engine's names of the modules whose weights it holds as codes (fused modules under their own name), sorted."""
    return sorted(
        path.removesuffix(".routed_experts")
        for path, module in model.named_modules()
        if any(p.dtype in CODE_DTYPES for name, p in module.named_parameters(recurse=False) if name.endswith("weight"))
    )


def hf_layers(modules: Iterable[str], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """HF names of the engine's modules, sorted: a fused module counts as its shards."""
    return sorted({layer for module in modules for layer in fused.get(module, (module,))})


def audit(found: Iterable[str], expected: Iterable[str]) -> str:
    """Compare the layers that run in FP8 with those that must, both by HF name.

    Returns:
        One sentence that names each layer that is quantized on one side only; empty when they agree.
    """
    here, there = set(found), set(expected)
    faults = [f"{name} is quantized, but should not be" for name in sorted(here - there)]
    faults += [f"{name} should be quantized, but is not" for name in sorted(there - here)]
    return f"{len(faults)} layers differ from the precision plan: {'; '.join(faults)}" if faults else ""
