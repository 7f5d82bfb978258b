"""The peer: vLLM's own `ipc` weight transfer into the same FP8 engine, in the same two processes.

The trainer casts with our kernels (its fastest case) and hands the quantized checkpoint to vLLM's `trainer_send_weights`; the update
goes through the conductor's pipe into `LLM`'s own start, update and finish. vLLM's module imports `ray` for a way of
sending that is not used here; where it is not installed an empty module stands in for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fp8rl_workers.protocol import ResolvedPrecision
from fp8rl_workers.weights.kernels import CastItem, cast_plan
from fp8rl_workers.weights.kernels.plans import part_shapes
from fp8rl_workers.weights.offer import SCALE_SUFFIX
from weight_sync.engine import Engine
from weight_sync.models import Weights

AT_ONCE_BYTES = {False: 1 << 62, True: 2 << 30}


def ipc_module() -> Any:
    """vLLM's module of the backend."""
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        sys.modules.setdefault("ray", types.ModuleType("ray"))
    return importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")


class Sender:
    """The trainer's end."""

    def __init__(self, weights: Weights, resolved: ResolvedPrecision, pipe: Connection) -> None:
        self.weights, self.resolved, self.pipe = weights, resolved, pipe
        self.quantized = set(resolved.quantized_layers)
        self.casting = 0.0

    def send(self, *, packed: bool) -> float:
        """Cast and send everything; returns the seconds of the casts. `packed`: vLLM's buffers of 1 GiB, casts as they are needed."""
        module = ipc_module()
        largest = max(tensor.nbytes for tensor in self.weights.held.values())
        size = max(module.DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
        args = module.IPCTrainerSendWeightsArgs(send_mode=self.hand_over, packed=packed, packed_buffer_size_bytes=size)
        module.IPCWeightTransferEngine.trainer_send_weights(self.checkpoint(AT_ONCE_BYTES[packed]), args)
        return self.casting

    def hand_over(self, update: Any) -> None:
        """One update to the engine, and its word that it has taken it."""
        self.pipe.send(("update", vars(update)))
        self.pipe.recv()

    def checkpoint(self, at_once: int) -> Iterator[tuple[str, Tensor]]:
        """The quantized checkpoint by HF name, cast in groups of at most about `at_once` bytes."""
        for names in self.groups(at_once):
            items = [item for name in names if (item := self.item(name)) is not None]
            start = monotonic()
            if items:
                plan = cast_plan(items, self.resolved.scale_format)
                plan.run()
                plan.finish()
            self.casting += monotonic() - start
            outputs = {item.names[0]: item.outputs for item in items}
            for name in names:
                yield from self.parts(name, outputs.get(self.members(name)[0]))

    def groups(self, at_once: int) -> Iterator[list[str]]:
        """Names of weights and stacks that are cast together."""
        group: list[str] = []
        size = 0
        for name, tensor in self.weights.held.items():
            if group and size + tensor.numel() > at_once:
                yield group
                group, size = [], 0
            group.append(name)
            size += tensor.numel()
        yield group

    def members(self, name: str) -> tuple[str, ...]:
        """HF names behind a weight or a stack."""
        if "*" not in name:
            return (name,)
        return tuple(name.replace("*", str(e)) for e in range(self.weights.held[name].shape[0]))

    def item(self, name: str) -> CastItem | None:
        """The cast of a weight or stack into memory of torch's own; None where it travels as BF16."""
        members, source = self.members(name), self.weights.held[name]
        if members[0].removesuffix(".weight") not in self.quantized:
            return None
        shapes = part_shapes(tuple(source.shape), self.resolved.wire)
        outputs = tuple(torch.empty(shape, dtype=dtype, device=source.device) for shape, dtype in shapes)
        return CastItem(members, source, self.resolved.wire, outputs)

    def parts(self, name: str, outputs: tuple[Tensor, ...] | None) -> Iterator[tuple[str, Tensor]]:
        """What the checkpoint holds of a weight or stack."""
        members = self.members(name)
        parts = (self.weights.held[name],) if outputs is None else outputs
        suffixes = ("", SCALE_SUFFIX.get(self.resolved.wire, ""))
        for number, member in enumerate(members):
            for suffix, part in zip(suffixes, parts, strict=False):
                yield member + suffix, part[number] if "*" in name else part


def peer_sync(engine: Engine, trainer: Any, *, packed: bool) -> tuple[float, float]:
    """One update through vLLM's backend; seconds from its start until the weights are loaded, and of the casts in it."""
    module = ipc_module()
    worker, ours = engine.worker, engine.transfer
    with swapped(worker, module.IPCWeightTransferEngine(ours.config, ours.vllm_config, engine.device, engine.model)):
        start = monotonic()
        engine.llm.start_weight_update()
        trainer.tell("peer", packed)
        word, value = trainer.pipe.recv()
        while word == "update":
            engine.llm.update_weights({"update_info": value})
            trainer.pipe.send("taken")
            word, value = trainer.pipe.recv()
        if word is not True:
            raise RuntimeError(value)
        engine.llm.finish_weight_update()
        torch.cuda.synchronize(engine.device)
        end = monotonic()
    return end - start, value


@contextlib.contextmanager
def swapped(worker: Any, transfer: Any) -> Iterator[None]:
    """Within it the worker's weight transfer engine is another one."""
    ours = worker.weight_transfer_engine
    worker.weight_transfer_engine = transfer
    try:
        yield
    finally:
        worker.weight_transfer_engine = ours
