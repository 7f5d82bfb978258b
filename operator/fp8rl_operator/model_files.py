"""What only the files of a job tell, for files that lie on this machine: the model's folder and the data set's file.

The trainer applies the same rules before it takes a GPU (reason InvalidModel). Reads JSON only; imports no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8rl_operator.errors import Fault
from fp8rl_operator.model_weights import count_parameters
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.checks.resources import state_faults

PARAMETER_TOLERANCE = 0.05
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def validate_local_files(job: FP8RLJob) -> list[Fault]:
    """Faults of the model's folder and the data set's file, as far as the spec names paths of this machine."""
    folder = model_folder(job)
    return [*(_model_faults(job, *folder) if folder else ()), *_dataset_faults(job)]


def model_folder(job: FP8RLJob) -> tuple[str, Path] | None:
    """(field path, folder) of the model on this machine; None for one that comes from elsewhere."""
    model = job.spec.model
    if model.source is None:
        return ("spec.model.path", Path(model.path)) if model.path else None
    if model.source.host_path is None:
        return None
    return "spec.model.source.hostPath.path", Path(model.source.host_path.path) / (model.path or "")


def _model_faults(job: FP8RLJob, path: str, folder: Path) -> Iterator[Fault]:
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        yield Fault(path, str(folder), f"{why}, and a folder with the model's files is needed", "correct the path")
        return
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Fault(
            path,
            str(folder),
            f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}",
            "copy the tokenizer's files there",
        )
    if not any(folder.glob("*.safetensors")):
        yield Fault(path, str(folder), "has no weights: no *.safetensors", "copy the model's safetensors files there")
    config = _json(folder / "config.json")
    if isinstance(config, str):
        yield Fault(path, str(folder / "config.json"), config, "copy the model's config.json there")
        return
    yield from _config_faults(job, path, config)
    yield from _memory_faults(job, folder, config)
    yield from _tokenizer_faults(path, folder, config)


def _config_faults(job: FP8RLJob, path: str, config: dict[str, Any]) -> Iterator[Fault]:
    if "auto_map" in config and not job.spec.model.trust_remote_code:
        yield Fault(
            "spec.model.trustRemoteCode",
            value=False,
            reason=f"config.json of {path} brings Python code of its own (auto_map)",
            remedy="set trustRemoteCode: true if you trust it",
        )
    context = config.get("max_position_embeddings")
    if not isinstance(context, int):
        return
    length, completion = job.spec.model.max_model_len, job.spec.rollout.max_tokens
    if length is not None and length > context:
        yield Fault(
            "spec.model.maxModelLen",
            length,
            f"is over the model's own context, max_position_embeddings {context}",
            f"set at most {context}, or leave it unset (longest prompt + maxTokens)",
        )
    if completion >= context:
        yield Fault(
            "spec.rollout.maxTokens",
            completion,
            f"leaves {context - completion} tokens of the model's context {context} for a prompt",
            f"set maxTokens below {context}",
        )


def _memory_faults(job: FP8RLJob, folder: Path, config: dict[str, Any]) -> Iterator[Fault]:
    """The trainer's memory against the parameters that the files hold, and model.parameters against them too."""
    counted, told = count_parameters(folder, config), job.spec.model.parameters
    if counted is None:
        return
    if told is None:
        yield from state_faults(job, counted)
    elif abs(told - counted) > PARAMETER_TOLERANCE * counted:
        yield Fault(
            "spec.model.parameters",
            told,
            f"is not what the files in {folder} hold, {counted} parameters: the trainer's memory request would be wrong",
            f"write {counted}",
        )


def _tokenizer_faults(path: str, folder: Path, config: dict[str, Any]) -> Iterator[Fault]:
    """Every token id has a row in the embedding."""
    size = config.get("vocab_size")
    if not isinstance(size, int) or not (folder / "tokenizer.json").is_file():
        return
    tokenizer = _json(folder / "tokenizer.json")
    if isinstance(tokenizer, str):
        yield Fault(path, str(folder / "tokenizer.json"), tokenizer, "copy the model's tokenizer.json there")
        return
    largest = max(_token_ids(tokenizer), default=-1)
    if largest >= size:
        yield Fault(
            path,
            str(folder / "tokenizer.json"),
            f"does not fit the model: its largest token id {largest} has no row in an embedding of vocab_size {size}",
            "use the tokenizer that belongs to the model",
        )


def _token_ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in tokenizer.get("added_tokens", []))


def _dataset_faults(job: FP8RLJob) -> Iterator[Fault]:
    volume = job.spec.rollout.dataset.volume
    if volume is None or volume.claim_name is not None:
        return
    file = Path(volume.host_path or "") / volume.path
    if not file.is_file():
        yield Fault("spec.rollout.dataset.volume.path", str(file), "does not exist on this machine", "correct the path")


def _json(path: Path) -> dict[str, Any] | str:
    """The object in a JSON file, or what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return f"is no JSON: {error}"
    return value if isinstance(value, dict) else "holds no JSON object"
