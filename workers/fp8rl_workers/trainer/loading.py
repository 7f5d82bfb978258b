"""From the config and the model's folder to a trainer that is ready, in two parts: what engines wait for, then the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8rl_workers.config import PodEnvironment, TrainerConfig
from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.protocol import ResolvedPrecision
from fp8rl_workers.trainer.checkpoint import CheckpointStore, Meta, identity
from fp8rl_workers.trainer.loop import TorchTrainer
from fp8rl_workers.trainer.model import load_module
from fp8rl_workers.trainer.model_files import check_folder, tokenizer_digest
from fp8rl_workers.trainer.precision import Device, plan_for, resolve_precision
from fp8rl_workers.trainer.publish import WireFormat
from fp8rl_workers.weights.offer import stacked


@dataclass(frozen=True)
class Facts:
    """What is known before a weight is loaded."""

    model: dict[str, Any]
    resolved: ResolvedPrecision
    tokenizer_digest: str
    device: torch.device


@dataclass(frozen=True)
class Loaded:
    """The trainer, what it publishes, its checkpoints, and what one of them gave back."""

    trainer: TorchTrainer
    form: WireFormat
    checkpoints: CheckpointStore
    resumed: Meta | None


def check_backend(config: TrainerConfig) -> None:
    """Refuse what the torch backend does not do.

    Raises:
        InvalidInputError: names every such field.
    """
    asked = {
        "trainer.backend": (config.backend, "torch"),
        "trainer.replicas": (config.replicas, 1),
        "trainer.offload": (config.offload, "none"),
        "trainer.compile": (config.compile, False),
        "precision.fp8Param": (config.fp8_param, False),
        "trainer.megatronArgs": (config.megatron_args, {}),
        "trainer.parallelism": ({name: n for name, n in config.parallelism.items() if n != 1}, {}),
    }
    faults = [
        f"{name}: {value!r} needs the megatron backend, torch does {built!r}"
        for name, (value, built) in asked.items()
        if value != built
    ]
    if config.top_p != 1:
        faults.append(
            f"rollout.topP: {config.top_p:g} leaves the engine's log-probabilities relative to the nucleus and the trainer's to "
            f"the whole vocabulary, so every importance ratio would be off by the nucleus' mass; use 1"
        )
    if faults:
        raise InvalidInputError("; ".join(faults))


def this_device() -> Device:
    """The device that this process computes on."""
    if not torch.cuda.is_available():
        return Device("cpu", None)
    return Device(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def resolve(config: TrainerConfig, folder: Path) -> Facts:
    """Check the model's folder and decide the precision; reads no weight.

    Raises:
        InvalidModelError: the folder is incomplete, damaged, or of an unknown family.
        InvalidInputError: the config asks for what this trainer or its device cannot do.
    """
    check_backend(config)
    model = check_folder(folder)
    device = this_device()
    resolved = resolve_precision(config, model, device)
    place = torch.device("cpu" if device.capability is None else "cuda")
    return Facts(model, resolved, tokenizer_digest(folder), place)


def wire_format(config: TrainerConfig, facts: Facts) -> WireFormat:
    """What travels: the engine's format, or BF16 when the engine quantizes."""
    form = "bf16" if facts.resolved.quantize_at == "engine" else facts.resolved.wire
    plan = plan_for(config, facts.model, form)
    sync = config.weight_sync
    return WireFormat(form, facts.resolved.scale_format, stacked(plan.weights()), sync.bucket_bytes, sync.cast_backend)


def open_checkpoints(config: TrainerConfig, pod: PodEnvironment) -> CheckpointStore:
    """The job's checkpoints, for writing.

    Raises:
        InvalidInputError: the volume cannot be written.
        StaleError: a later attempt has begun.
    """
    folder = pod.state_dir / "checkpoints"
    try:
        return CheckpointStore(folder, pod.attempt, config.checkpoint.keep)
    except OSError as error:
        raise InvalidInputError(
            f"trainer.checkpoint: cannot write to {folder}: {error.strerror}; mend the volume"
        ) from error


def load(config: TrainerConfig, pod: PodEnvironment, facts: Facts) -> Loaded:
    """Load the model, and the current checkpoint if there is one.

    Raises:
        InvalidModelError: the files do not make the model that `config.json` describes.
        InvalidInputError: the checkpoint is another run's.
        StaleError: a later attempt has begun.
        NonFiniteError: a weight is NaN or infinite.
    """
    folder = Path(config.model_path)
    checkpoints = open_checkpoints(config, pod)
    found = checkpoints.load(identity(config))
    torch.manual_seed(config.seed)
    try:
        module = load_module(folder, facts.device, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidModelError(f"model.path: transformers cannot load {folder}: {error}") from error
    reference = None
    if config.loss.kl_to_reference > 0:
        reference = load_module(folder, facts.device, trust_remote_code=config.trust_remote_code).to(torch.bfloat16)
        reference.requires_grad_(requires_grad=False)
    trainer = TorchTrainer(module, reference, facts.model, config, facts.resolved)
    if found is not None:
        trainer.load_state(found[0])
    return Loaded(trainer, wire_format(config, facts), checkpoints, found[1] if found else None)
