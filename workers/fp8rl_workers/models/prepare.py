"""`python -m fp8rl_workers.models.prepare`: the init container that puts the base model in its place, or says what is missing.

Environment:
    FP8RL_MODEL_SOURCE  `spec.model` as JSON: `{"source": {"builtin": {"name": "reverse-text-tiny"}}}`, `{"source": {"hub":
                        {"repository": "owner/name"}}, "revision": "main"}`, `{"source": {"pvc": ...}}`, `{"path": ...}`
    FP8RL_MODEL_PATH    the folder that the role reads. builtin and hub: made; otherwise: checked
    FP8RL_CACHE_DIR     optional: builtin and hub models are kept there by content, FP8RL_MODEL_PATH becomes a link into it.
                        Unset: FP8RL_MODEL_PATH itself is made
    FP8RL_MODEL_WEIGHTS optional: `no` leaves the weights of builtin and hub models out; engines get theirs from the trainer
    HF_TOKEN            optional: token of the hub
Exit code 0: the folder is complete. Else one line on stderr says what is wrong and what to do: 65, the input; 1, anything else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_workers.errors import InvalidInputError, InvalidModelError, WorkerError, refuse
from fp8rl_workers.models.folder import link, make_once, missing_files
from fp8rl_workers.models.hub import download, resolve_revision
from fp8rl_workers.models.recipe import RECIPES, Recipe
from fp8rl_workers.process import end_on_sigterm

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the environment asks for."""

    source: dict[str, Any]
    revision: str | None
    path: Path
    cache: Path | None
    weights: bool = True

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Request:
        """Read the variables named in this module's docstring.

        Raises:
            InvalidInputError: a variable is missing or FP8RL_MODEL_SOURCE is no JSON object.
        """
        missing = [name for name in ("FP8RL_MODEL_SOURCE", "FP8RL_MODEL_PATH") if not environ.get(name)]
        if missing:
            raise InvalidInputError(f"{', '.join(missing)}: not set; the operator sets them for this command")
        try:
            model = json.loads(environ["FP8RL_MODEL_SOURCE"])
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"FP8RL_MODEL_SOURCE: no JSON: {error}") from error
        if not isinstance(model, dict):
            raise InvalidInputError(f"FP8RL_MODEL_SOURCE: an object is needed, got {model!r}")
        source = {name: value for name, value in (model.get("source") or {}).items() if value is not None}
        cache = environ.get("FP8RL_CACHE_DIR")
        weights = environ.get("FP8RL_MODEL_WEIGHTS") != "no"
        path = Path(environ["FP8RL_MODEL_PATH"])
        return cls(source, model.get("revision"), path, Path(cache) if cache else None, weights)


def prepare(request: Request, say: Say) -> None:
    """Make or check `request.path`.

    Raises:
        InvalidInputError: the source is unknown, or something else is in the way.
        InvalidModelError: the folder is incomplete.
    """
    if "builtin" in request.source:
        recipe = find_recipe(request.source["builtin"]["name"])
        make = make_builtin if request.weights else make_builtin_config
        place(request, f"{recipe.name}-{recipe.digest()}", lambda folder: make(recipe, folder, say), say)
    elif "hub" in request.source:
        repository = request.source["hub"]["repository"]
        commit = resolve_revision(repository, request.revision)
        name = f"{repository.replace('/', '--')}-{commit}"
        place(request, name, lambda folder: download(repository, commit, folder, weights=request.weights), say)
    check(request)
    say(f"model is complete: {request.path}")


def place(request: Request, identity: str, build: Callable[[Path], None], say: Say) -> None:
    """Build the model `identity` in the cache, if there is one, and link to it; else in `request.path`."""
    identity += "" if request.weights else "-config"
    target = request.path if request.cache is None else request.cache / "models" / identity
    if not make_once(target, identity, build, say):
        say(f"found {target}")
    if request.cache is not None:
        link(request.path, target)


def find_recipe(name: str) -> Recipe:
    """The builtin model's recipe.

    Raises:
        InvalidInputError: there is no such model.
    """
    if name not in RECIPES:
        raise InvalidInputError(
            f"model.source.builtin.name: {name!r} is unknown; known are {', '.join(sorted(RECIPES))}"
        )
    return RECIPES[name]


def make_builtin(recipe: Recipe, folder: Path, say: Say) -> None:
    """Warm the builtin model up; torch is imported here and not before."""
    from fp8rl_workers.models.warmup import write_model

    write_model(recipe, folder, say)


def make_builtin_config(recipe: Recipe, folder: Path, say: Say) -> None:
    """Write the builtin model's files without its weights."""
    from fp8rl_workers.models.warmup import write_config

    write_config(recipe, folder)
    say(f"{recipe.name}: config and tokenizer; the weights come from the trainer")


def check(request: Request) -> None:
    """Raise InvalidModelError with all that the folder lacks."""
    folder = request.path
    made = "builtin" in request.source or "hub" in request.source
    faults = missing_files(folder, weights=request.weights or not made)
    if faults:
        raise InvalidModelError(
            f"model.path: {folder} is no complete model: {'; '.join(faults)}; put the Hugging Face files (config.json,"
            " tokenizer.json, *.safetensors) there or name another folder"
        )


def main() -> int:
    """Run the command; the exit code."""
    end_on_sigterm()
    try:
        prepare(Request.read(os.environ), lambda line: print(line, flush=True))
    except WorkerError as error:
        return refuse(error)
    except OSError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
