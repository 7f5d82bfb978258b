"""The calls that the engine core makes on all worker ranks at once (`collective_rpc`): vLLM's worker and JSON in, JSON out.

A refusal is an answer with `error` and `reason`: an exception would go through vLLM's RPC as a crash of the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from fp8rl_workers.errors import WorkerError
from fp8rl_workers.inference.agent import Agent
from fp8rl_workers.places import this_place
from fp8rl_workers.protocol import Decision, Epoch
from fp8rl_workers.weights.group import name_of
from fp8rl_workers.weights.load import Loader

Answer = dict[str, Any]


class RankEngine(Protocol):
    """What hangs on vLLM's worker as `weight_transfer_engine` (`engine.Fp8rlTransferEngine`)."""

    agent: Agent
    loader: Loader
    quantized: list[str]
    audit: str

    def finish_load(self, path: str) -> None:
        """After the parameters changed by a `Loader.path`, before the next step."""


def rank_call(function: Callable[..., Answer | None]) -> Callable[..., Answer]:
    """Answer a `WorkerError` instead of raising it through vLLM's RPC."""

    @functools.wraps(function)
    def call(worker: Any, *args: str) -> Answer:
        try:
            return function(worker.weight_transfer_engine, *args) or {}
        except WorkerError as error:
            return {"error": str(error), "reason": error.reason}

    return call


@rank_call
def state(engine: RankEngine) -> Answer:
    """What this rank holds: fields of `protocol.EngineState`."""
    agent, loader = engine.agent, engine.loader
    prepared = agent.prepared
    return {
        "epoch": agent.joined,
        "epoch_told": agent.epoch.epoch if agent.epoch else None,
        "prepared_sync_id": prepared.sync_id if prepared else None,
        "prepared_version": prepared.version if prepared else None,
        "place": this_place(name_of(loader.device)),
        "load_path": loader.path,
        "load_fallback": loader.fallback,
        "num_quantized": len(engine.quantized),
        "audit": engine.audit,
        "message": agent.error,
    }


@rank_call
def layers(engine: RankEngine) -> Answer:
    """HF names of the layers that this rank holds quantized: thousands in a MoE, so they are no part of the state."""
    return {"quantized_layers": engine.quantized}


@rank_call
def join(engine: RankEngine, epoch: str) -> None:
    """Join an epoch in the agent's thread."""
    engine.agent.join(Epoch.model_validate_json(epoch))


@rank_call
def abort(engine: RankEngine, decision: str) -> None:
    """Forget a sync."""
    engine.agent.abort(Decision.model_validate_json(decision))


@rank_call
def verify(engine: RankEngine, decision: str) -> None:
    """First half of a commit: nothing changes yet."""
    engine.agent.verify(Decision.model_validate_json(decision))


@rank_call
def apply(engine: RankEngine, decision: str) -> None:
    """Second half of a commit: the live parameters change."""
    path = engine.loader.path
    engine.agent.apply(Decision.model_validate_json(decision))
    engine.finish_load(path)


def merge_states(ranks: list[Answer]) -> Answer:
    """One answer of all ranks: an epoch and what is prepared count only if all ranks have them; the first fault is kept."""
    first = dict(ranks[0])
    if any(rank["epoch"] != first["epoch"] for rank in ranks):
        first["epoch"] = None
    if any(rank["place"] != first["place"] for rank in ranks):
        first["place"] = ""
    if any(rank["prepared_sync_id"] != first["prepared_sync_id"] for rank in ranks):
        first["prepared_sync_id"] = first["prepared_version"] = None
    first["error"] = next((fault for rank in ranks for fault in (rank["audit"], rank["message"]) if fault), "")
    first["audit_passed"] = not any(rank["audit"] for rank in ranks)
    first["load_fallback"] = {name: why for rank in ranks for name, why in rank["load_fallback"].items()}
    del first["audit"], first["message"]
    return first
