"""One generate call as vLLM's `/inference/v1/generate` speaks it (read from vLLM 0.26): request body, response, faults. Pure.

Token ids go in and come out; `logprobs: 0` returns the log-probability of the sampled token only, processed (at the
request's temperature) because the engine runs with `--logprobs-mode processed_logprobs`. Which weight version sampled
each token stands in `kv_transfer_params.fp8rl.spans`.

Not finite: vLLM clamps minus infinity to -9999 and its JSON encoder refuses NaN, so a NaN arrives as a refusal whose text
says "not JSON compliant".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_workers.errors import InvalidInputError, NonFiniteError, WorkerError
from fp8rl_workers.orchestrator.environments import Completion

LOGPROB_FLOOR = -9999.0
NAN_REFUSAL = "not JSON compliant"


class EngineLostError(WorkerError):
    """Raised when an engine gave no usable answer to a call: it is gone, restarting, or aborted the request."""

    reason = "EngineLost"
    status = 503


@dataclass(frozen=True)
class SamplingOptions:
    """How a job samples. `stop_token_ids` are the model's end tokens; greedy is temperature 0."""

    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


def request_seed(job_seed: int, prompt: int, sample: int, turn: int) -> int:
    """Seed of one call, 0 <= seed < 2^62: the same for the same place in the run, different for any other."""
    digest = hashlib.blake2b(f"{job_seed}/{prompt}/{sample}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def request_body(
    token_ids: Sequence[int],
    options: SamplingOptions,
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    salt: str = "",
) -> dict[str, Any]:
    """Body of the call. `salt` separates prefix caches of different weight versions."""
    stops = [*options.stop, *stop]
    params: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p if options.temperature > 0 else 1.0,
        "max_tokens": min(max_tokens or options.max_tokens, options.max_tokens),
        "logprobs": 0,
        "detokenize": bool(stops),
        "skip_special_tokens": False,
    }
    if stops:
        params["stop"] = stops
    if options.stop_token_ids:
        params["stop_token_ids"] = list(options.stop_token_ids)
    if seed is not None and options.temperature > 0:
        params["seed"] = seed
    return {"token_ids": list(token_ids), "sampling_params": params, "cache_salt": salt or None, "stream": False}


def parse_completion(body: dict[str, Any]) -> Completion:
    """The completion in a response.

    Raises:
        NonFiniteError: a log-probability is missing, not finite or clamped.
        EngineLostError: the engine aborted the request.
        WorkerError: log-probabilities or version spans do not cover the tokens.
    """
    choice = body["choices"][0]
    finish = choice.get("finish_reason")
    if finish not in {"stop", "length"}:
        raise EngineLostError(f"the engine ended a request with finish_reason {finish!r}")
    tokens = tuple(choice.get("token_ids") or ())
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = tuple(entry.get("logprob") for entry in content)
    if any(value is None or not math.isfinite(value) or value <= LOGPROB_FLOOR for value in logprobs):
        raise NonFiniteError(f"a log-probability of {len(tokens)} tokens is not finite")
    spans = version_spans(body)
    covered = sum(count for _, count in spans)
    if len(logprobs) != len(tokens) or covered != len(tokens):
        raise WorkerError(
            f"the engine answered {len(tokens)} tokens with {len(logprobs)} log-probabilities and version spans over "
            f"{covered}: kv_transfer_params.fp8rl.spans must cover every token; is fp8rl's plugin loaded in the engine?"
        )
    return Completion(tokens, logprobs, spans, finish)


def version_spans(body: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """`[[version, num_tokens], ...]` of a response; empty when the engine says none."""
    extra = (body.get("kv_transfer_params") or {}).get("fp8rl") or {}
    return tuple((int(version), int(count)) for version, count in extra.get("spans") or ())


def refusal(status: int, text: str) -> WorkerError:
    """What a status other than 200 of the generate route means: not finite, bad input, or an engine to leave alone."""
    if NAN_REFUSAL in text:
        return NonFiniteError("a log-probability is NaN: the engine's JSON encoder refused it")
    if 400 <= status < 500 and status not in {401, 404, 408, 409, 429}:
        return InvalidInputError(f"the engine refused a request with {status}: {text[:500]}")
    return EngineLostError(f"the engine answered {status}: {text[:500]}")


def stop_tokens(model_path: Path) -> tuple[int, ...]:
    """The model's end tokens: `eos_token_id` of generation_config.json, else of config.json, else none.

    Raises:
        InvalidInputError: a file is no JSON.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_path / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text()).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"model.path: {path} is no JSON: {error}") from error
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
