"""vLLM's own layerwise reload, for the first sync and for what cannot be laid out; all mismatches raised at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.load_layout import Inputs
from fp8rl_workers.weights.load_tags import Reload

KERNEL_FIELDS = ("moe_quant_config", "moe_kernel")
"""What vLLM's methods of experts hold of the parameters, or of what these were at the last reload."""


class VllmReload:
    """Loads a set of weights through vLLM's layerwise reload: parameters keep their storage."""

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, part: str = "") -> None:
        """`part`: path of the only module that is reloaded; its inputs are then all and only this module's."""
        self.model = model
        self.vllm_config = vllm_config
        self.device = device
        self.part = part
        self.module = model.get_submodule(part)

    def of_part(self, prefix: str) -> tuple[nn.Module, Reload] | None:
        """The module that holds the weights whose names begin with `prefix` ("model.layers.7."), and a reload of it alone."""
        wanted = prefix.rstrip(".")
        paths = [path for path, _ in self.model.named_modules() if path == wanted or path.endswith(f".{wanted}")]
        if len(paths) != 1:
            return None
        reload = VllmReload(self.model, self.vllm_config, self.device, paths[0])
        return reload.module, reload

    def __call__(self, inputs: Inputs) -> None:
        """Reload; the engine must not run a step meanwhile.

        Raises:
            InvalidModelError: names, shapes or dtypes that the model does not take, or that it misses: all of them.
            torch.OutOfMemoryError: the device has no room for one layer more; another reload may follow.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with self._context(), kernels_kept(self.module):
            initialize_layerwise_reload(self.module)
            faults: list[str] = []
            offered: set[str] = set()
            try:
                for group in by_layer(inputs):
                    faults += self._load(group)
                    offered.update(name for name, _ in group)
            except torch.OutOfMemoryError:
                abandon(self.module)
                raise
            faults += missing_weights(self.module, offered, packed_of(self.model), self.part)
            if faults:
                abandon(self.module)
            else:
                finalize_layerwise_reload(self.module, self.vllm_config.model_config)
        if faults:
            raise InvalidModelError(f"{len(faults)} weights do not fit the engine's model: " + "; ".join(faults))

    def _load(self, group: list[tuple[str, Tensor]]) -> list[str]:
        """Load one layer's weights; after a failure each by itself, to name them all."""
        try:
            self.model.load_weights(iter(group))  # type: ignore[operator]
        except torch.OutOfMemoryError:
            raise
        except LOAD_FAILURES as error:
            if len(group) == 1:
                name, tensor = group[0]
                return [f"{name} {list(tensor.shape)} {tensor.dtype}: {type(error).__name__}: {error}"]
            return [fault for item in group for fault in self._load([item])]
        return []

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config), self.device:
            yield


@contextlib.contextmanager
def kernels_kept(model: nn.Module) -> Iterator[None]:
    """Within it a reload may make new kernels of experts; afterwards the old ones are back.

    A reload processes weights in memory of its own and copies the result to the parameters. vLLM's kernels of experts keep the scales
    that they were made with, so those of a reload would go on with that memory's values, whatever is later written to the parameters.
    """
    held = [
        (method, {name: vars(method)[name] for name in KERNEL_FIELDS if vars(method).get(name) is not None})
        for module in model.modules()
        if (method := getattr(module, "quant_method", None)) is not None
    ]
    try:
        yield
    finally:
        for method, fields in held:
            vars(method).update(fields)


def abandon(model: nn.Module) -> None:
    """Put the parameters of a started reload back: in their old storage, with values that no longer mean anything."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001
        info.reset()
    layerwise.LOADING_LAYERS.clear()


LOAD_FAILURES = (KeyError, ValueError, AssertionError, RuntimeError, AttributeError, IndexError, TypeError)
"""What vLLM's weight loaders raise on a name, shape or dtype that they do not take."""


def by_layer(inputs: Inputs) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbours that belong to one layer (`model.layers.7.`), or to none, together."""
    group: list[tuple[str, Tensor]] = []
    current = ""
    for name, tensor in inputs:
        layer = layer_of(name)
        if group and layer != current:
            yield group
            group = []
        current = layer
        group.append((name, tensor))
    if group:
        yield group


def layer_of(name: str) -> str:
    """The part of a name up to its layer's number; empty outside layers."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def packed_of(model: nn.Module) -> dict[str, list[str]]:
    """Names of a model's fused modules, each with its shards'."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return packed


def missing_weights(model: nn.Module, offered: set[str], packed: dict[str, list[str]], prefix: str = "") -> list[str]:
    """One sentence for each weight that a started reload still waits for. `prefix`: path of `model` in the whole."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    tied = tied_storages(model)
    faults = []
    for path, layer in model.named_modules(prefix=prefix):
        info = get_layerwise_info(layer)
        if isinstance(layer, Attention) or not info.can_load() or not dict(layer.named_parameters(recurse=False)):
            continue
        if info.load_numel == 0 and storages_held(info) <= tied:
            continue
        if info.load_numel == 0 and (info.load_numel_total or 0) > 0:
            faults += [f"{name}: not offered" for name in shard_names(path, packed, layer)]
        elif info.load_numel < (info.load_numel_total or 0):
            faults += [f"{name}: not offered" for name in shard_names(path, packed, layer) if name not in offered]
    return faults


def storages_held(info: Any) -> set[int]:
    """Addresses of the parameters that a layer had when the reload started."""
    parameters, _ = info.kernel_tensors
    return {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}


def tied_storages(model: nn.Module) -> set[int]:
    """Storages that two layers hold (a tied lm_head): loaded through either one, both have them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    counts: Counter[int] = Counter()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            counts.update(storages_held(info))
    return {storage for storage, count in counts.items() if count > 1}


def shard_names(path: str, packed: dict[str, list[str]], layer: nn.Module) -> list[str]:
    """Checkpoint names of a layer's parameters: a fused layer's by shard (`qkv_proj` is q_proj, k_proj and v_proj)."""
    head, _, tail = path.rpartition(".")
    modules = [f"{head}.{shard}".lstrip(".") for shard in packed.get(tail, [tail])]
    return [f"{module}.{name}" for module in modules for name, _ in layer.named_parameters(recurse=False)]
