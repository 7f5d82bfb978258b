"""The policy: a transformers causal LM in BF16 with fp32 masters.

Three copies of a weight, and who uses which:

    masters      fp32, stepped by the optimizer, saved in checkpoints
    BF16 weight  the master rounded; what is cast for the wire (`Policy.weights`)
    parameters   what the module computes with: the BF16 weight, or, for the linears of a quantized recipe, the dequantized
                 codes of the BF16 weight, so that trainer and engines share one policy

Parameters are written once per step (`Policy.refresh`), not on every forward pass; their gradients are taken as the masters'
(straight-through). Stochastic rounding is keyed by (seed, step): weights that are sent twice have equal codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8rl_workers.config import TrainerConfig
from fp8rl_workers.protocol import EngineWire, ResolvedPrecision
from fp8rl_workers.trainer.batch import MicroBatch
from fp8rl_workers.trainer.precision import plan_for
from fp8rl_workers.weights.cast import Rounding, fake_quantize
from fp8rl_workers.weights.gather import Source, gather, held, plan_sources, stack_sources

if TYPE_CHECKING:
    from collections.abc import Mapping


def load_module(folder: Path, device: torch.device, *, trust_remote_code: bool) -> nn.Module:
    """The model of a folder, fp32, ready to train; rotary buffers keep their own dtype."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    module: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
    )
    return module.to(device).train()


class Policy:
    """A module, its masters and its precision."""

    def __init__(
        self, module: nn.Module, model: Mapping[str, Any], config: TrainerConfig, resolved: ResolvedPrecision
    ) -> None:
        """Take a fp32 module over: its values become masters, its parameters BF16."""
        parameters = dict(module.named_parameters())
        plan = plan_for(config, model, resolved.recipe)
        self.module = module
        self.sources: dict[str, Source] = plan_sources({name: p.shape for name, p in parameters.items()}, model)
        self._stacks = stack_sources(self.sources)
        self.quantized = frozenset(f"{name}.weight" for name in plan.quantized)
        self.masters: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        routers = {spec.name for spec in plan.specs if spec.kind == "router"} if config.freeze_moe_router else set()
        self.frozen = frozenset(self.sources[name].parameter for name in routers)
        self._recipe: EngineWire = resolved.recipe
        self._scale_format = resolved.scale_format
        self._seed = config.seed if config.precision.rounding == "stochastic" else None
        for name, parameter in parameters.items():
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.requires_grad_(name not in self.frozen)

    def rounding(self, step: int) -> Rounding | None:
        """Key of stochastic rounding after `step`, or None for rounding to the nearest."""
        return None if self._seed is None else Rounding(version=step, seed=self._seed)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and BF16 weight of each tensor of the checkpoint, in the order in which they travel."""
        return gather(self.masters, self.sources)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The same as fp32 masters, where they stand; experts that are stacked come as their stack, under the wire's name."""
        return held(self.masters, self._stacks)

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Write the parameters from the masters, after `step`.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        parameters = dict(self.module.named_parameters())
        for name, weight in self.weights():
            form: EngineWire = self._recipe if name in self.quantized else "bf16"
            value = fake_quantize(name, weight, form, scale_format=self._scale_format, rounding=self.rounding(step))
            source = self.sources[name]
            parameters[source.parameter].data[source.index].copy_(value)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients that the last backward pass left, by parameter name, fp32; they are taken off the parameters."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.float()
                parameter.grad = None
        return found


def token_logprobs(module: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each loss token at `temperature`, with gradient, and entropy of its distribution, without.

    Only the positions before loss tokens go through the head. Logits are BF16 like the engine's, the rest is fp32.

    Returns:
        logprobs fp32 [T] and entropies fp32 [T] in nats.
    """
    device = next(module.parameters()).device
    decoder: Callable[..., Any] = module.base_model  # type: ignore[assignment]
    hidden = decoder(input_ids=batch.tokens.to(device), use_cache=False).last_hidden_state
    picked = hidden.flatten(0, 1)[batch.index.to(device)]
    head: nn.Module = module.get_output_embeddings()  # type: ignore[operator]
    logits = head(picked).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = -(logprobs.detach().exp() * logprobs.detach()).sum(dim=-1)
    return logprobs.gather(-1, batch.targets.to(device)[:, None]).squeeze(-1), entropies
