"""The trainer's side for a plain module: each tensor of the checkpoint as a view of the parameter that holds it.

The order is that of the model spec, the same in every run and process. Tied weights come once, under the embedding's name.
transformers keeps the experts of a layer stacked (`mlp.experts.gate_up_proj` [E, 2I, H], `mlp.experts.down_proj` [E, H, I]);
they come as each expert's own projections, as in a checkpoint. Only views: nothing is copied, and the module must not be
stepped while they are in use. The module holds the BF16 weights that it computes with; another dtype is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.specs.registry import tensor_specs

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<expert>\d+)\.(?P<which>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Source:
    """The parameter that holds a tensor, and the index of the tensor inside it (empty: all of it)."""

    parameter: str
    index: tuple[int | slice, ...] = ()


def _stacked(name: str, rows: int) -> Source | None:
    """Where an expert's projection of `rows` rows stands in transformers' stacks."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    stack, expert = match["stack"], int(match["expert"])
    if match["which"] == "down":
        return Source(f"{stack}.down_proj", (expert,))
    first = 0 if match["which"] == "gate" else rows
    return Source(f"{stack}.gate_up_proj", (expert, slice(first, first + rows)))


def plan_sources(parameters: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, Source]:
    """HF name to source, in the order in which tensors travel.

    Args:
        parameters: name to shape of the module's parameters, tied ones once.
        config: the model's `config.json`.

    Raises:
        InvalidModelError: all tensors without a parameter, and all parameters that are no tensor of the family, at once.
    """
    found: dict[str, Source] = {}
    faults: list[str] = []
    for spec in tensor_specs(config):
        stacked = _stacked(spec.name, spec.shape[0])
        if spec.name in parameters:
            found[spec.name] = Source(spec.name)
        elif stacked is not None and stacked.parameter in parameters:
            found[spec.name] = stacked
        else:
            faults.append(f"{spec.name} has no parameter")
    used = {source.parameter for source in found.values()}
    faults += [f"parameter {name} is no tensor of this family" for name in parameters if name not in used]
    if faults:
        raise InvalidModelError(f"the module does not fit config.json: {'; '.join(faults[:8])} ({len(faults)} in all)")
    return found


def gather(module: torch.nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """HF name and BF16 view of each tensor, in the order in which they travel.

    Raises:
        InvalidModelError: see `plan_sources`; or a shape that `config.json` does not give; or a dtype other than BF16.
    """
    import torch

    parameters = dict(module.named_parameters())
    sources = plan_sources({name: p.shape for name, p in parameters.items()}, config)
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}
    for name, source in sources.items():
        view = parameters[source.parameter].detach()[source.index]
        if tuple(view.shape) != shapes[name]:
            raise InvalidModelError(f"{name}: shape {list(view.shape)}, but config.json says {list(shapes[name])}")
        if view.dtype != torch.bfloat16:
            raise InvalidModelError(
                f"{name}: the module holds {view.dtype}; what is published is the BF16 weight that it computes with, "
                "so load it in bfloat16 and keep fp32 masters in the optimizer"
            )
        yield name, view
