"""FP8 KV scales: 1.0 everywhere, at boot before graph capture, after wake and after every sync (rule 9)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

KINDS = ("k", "v", "q", "prob")


@torch.no_grad()  # compressed-tensors registers them as parameters
def restore_kv_scales(model: nn.Module) -> int:
    """Set each attention layer's k, v, q and prob scales to 1.0: device tensors, float mirrors and CPU copies.

    vLLM's loader leaves what it does not find; dummy weights and layerwise reloads leave others than 1. The job's FP8 KV
    cache is uncalibrated on both sides, so 1.0 is the one right value.

    Returns:
        Number of layers that have such scales.
    """
    layers = 0
    for module in model.modules():
        found = [kind for kind in KINDS if isinstance(getattr(module, f"_{kind}_scale", None), torch.Tensor)]
        for kind in found:
            getattr(module, f"_{kind}_scale").fill_(1.0)
            if hasattr(module, f"_{kind}_scale_float"):
                setattr(module, f"_{kind}_scale_float", 1.0)
            if isinstance(copy := getattr(module, f"_{kind}_scale_cpu", None), torch.Tensor):
                copy.fill_(1.0)
        layers += bool(found)
    return layers


def restore_after_wake(worker_class: Any) -> None:
    """Have `wake_up` of vLLM's worker class restore the scales of its model: memory that slept comes back with any values.

    vLLM itself restores k and v, and those only where the KV cache is FP8 and wakes with the weights or after them. Waking only
    what is no weight restores nothing here: the scales may still be asleep. Once per class, however often it is called.
    """
    plain = worker_class.wake_up
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        plain(worker, tags)
        if tags is None or "weights" in tags:
            restore_kv_scales(worker.get_model())

    worker_class.wake_up = wake_up
