"""What the model's folder says, read without loading a weight, and what is wrong with it, all at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fp8rl_workers.errors import InvalidModelError
from fp8rl_workers.weights.specs import checkpoint_faults


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        InvalidModelError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidModelError(
            f"model.path: {path} does not exist; name a folder with a Hugging Face model"
        ) from error
    except ValueError as error:
        raise InvalidModelError(f"model.path: {path} is no JSON: {error}; copy the model again") from error
    if not isinstance(config, dict):
        raise InvalidModelError(
            f"model.path: {path} holds a {type(config).__name__}, not an object; copy the model again"
        )
    return config


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Name to shape of every tensor in the folder's safetensors files, from their headers.

    Raises:
        InvalidModelError: there is no such file, or a header is damaged.
    """
    shapes: dict[str, list[int]] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidModelError(f"model.path: {folder} holds no *.safetensors; name a folder with a Hugging Face model")
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= path.stat().st_size else b""
        try:
            entries = json.loads(header)
        except ValueError as error:
            raise InvalidModelError(f"model.path: {path} is damaged: its header is no JSON; copy it again") from error
        shapes |= {name: entry["shape"] for name, entry in entries.items() if name != "__metadata__"}
    return shapes


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of `tokenizer.json`, in hex; all roles compare it.

    Raises:
        InvalidModelError: the file is missing.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidModelError(f"model.path: {path} does not exist; a fast tokenizer (tokenizer.json) is needed")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_digest(folder: Path) -> str:
    """First 12 hex characters of the SHA-256 of `config.json`; each pod sees the model under a path of its own. "" without it."""
    path = folder / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def tokenizer_fault(folder: Path, vocabulary: int) -> str:
    """Why the tokenizer does not fit the model, or ""."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    except ValueError as error:
        return f"tokenizer.json is no JSON: {error}"
    entries = tokenizer.get("model", {}).get("vocab", {})
    ids = [*entries.values()] if isinstance(entries, dict) else [*range(len(entries))]
    highest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))], default=-1)
    if highest >= vocabulary:
        return f"tokenizer.json has token id {highest}, but config.json says vocab_size {vocabulary}: it is another model's"
    return ""


def check_folder(folder: Path) -> dict[str, Any]:
    """The model's config, after the folder has been checked.

    Raises:
        InvalidModelError: every missing or unknown tensor, wrong shape, and a tokenizer that does not fit.
    """
    config = read_config(folder)
    tokenizer_digest(folder)
    faults = checkpoint_faults(config, read_shapes(folder))
    fault = tokenizer_fault(folder, config["vocab_size"])
    faults += [fault] if fault else []
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise InvalidModelError(f"model.path: {folder}: {'; '.join(faults[:5])}{more}")
    return config
