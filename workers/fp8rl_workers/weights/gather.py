"""The trainer's side for a plain module: each tensor of the checkpoint out of the parameter that holds it.

The order is that of the model spec, the same in every run and process. Tied weights come once, under the embedding's name.
transformers keeps the experts of a layer stacked (`mlp.experts.gate_up_proj` [E, 2I, H], `mlp.experts.down_proj` [E, H, I]);
they come as each expert's own projections, as in a checkpoint. What comes is BF16, the weight that the trainer computes with:
of BF16 parameters a view, of fp32 masters their rounding, one tensor at a time and never a whole copy. The parameters must
not be stepped while the iterator is in use.
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
        InvalidModelError: all tensors without a parameter or of another shape, and all parameters that are no tensor of the
            family, at once.
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
            continue
        shape = _shape_at(parameters[found[spec.name].parameter], found[spec.name].index)
        if shape != spec.shape:
            faults.append(f"{spec.name} has shape {list(shape)}, but config.json says {list(spec.shape)}")
    used = {source.parameter for source in found.values()}
    faults += [f"parameter {name} is no tensor of this family" for name in parameters if name not in used]
    if faults:
        raise InvalidModelError(f"the module does not fit config.json: {'; '.join(faults[:8])} ({len(faults)} in all)")
    return found


def _shape_at(shape: Sequence[int], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    """Shape of a tensor of `shape` at `index`."""
    kept = [len(range(*at.indices(size))) for at, size in zip(index, shape, strict=False) if isinstance(at, slice)]
    return (*kept, *shape[len(index) :])


def stack_sources(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Sources by wire name: all experts of a projection that stand in one parameter as one stack, `experts.*.up_proj.weight`
    `[E, N, K]`, where the first one stood; experts with a parameter each, and a lone one, stay apart.
    """
    groups: dict[str, list[str]] = {}
    for name in sources:
        match = _EXPERT.fullmatch(name)
        groups.setdefault(f"{match['stack']}.*.{match['which']}_proj.weight" if match else name, []).append(name)
    found: dict[str, Source] = {}
    for wire, names in groups.items():
        apart = {name: sources[name] for name in names}
        first, count = sources[names[0]], len(names)
        rest = first.index[1:]
        if count > 1 and apart == {
            wire.replace("*", str(e)): Source(first.parameter, (e, *rest)) for e in range(count)
        }:
            found[wire] = Source(first.parameter, (slice(0, count), *rest))
        else:
            found |= apart
    return found


def held(parameters: Mapping[str, torch.Tensor], sources: Mapping[str, Source]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of each tensor where it stands, a view of its parameter, in the order of `sources`.

    Args:
        parameters: BF16 parameters, or their fp32 masters.
        sources: where each tensor stands (`plan_sources`), or each wire tensor (`stack_sources`).
    """
    for name, source in sources.items():
        whole = parameters[source.parameter].detach()
        yield name, whole[source.index] if source.index else whole


def gather(parameters: Mapping[str, torch.Tensor], sources: Mapping[str, Source]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as BF16: of BF16 parameters a view, of fp32 masters their rounding."""
    import torch

    for name, weight in held(parameters, sources):
        yield name, weight.to(torch.bfloat16)
