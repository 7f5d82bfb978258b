"""`verifiers:NAME`: a taskset of the library `verifiers` (0.4, its `v1` API), played by its own harness.

An episode of that library talks to a policy through vLLM's generate route, with token ids that it renders itself. Each
rollout therefore gets a small relay on a loopback port that answers this route by `client.generate`; what it answered is
kept, so every sampled token of the episode's trace gets back its weight version. One episode is one trajectory: the first
trace's last branch (tasksets whose harness rewrites its history have more; `metrics["branches"]` counts them).

Tasks are split and ordered by fp8rl: by digest of the task's content into train and heldout, shuffled by the seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from aiohttp import web
from pydantic import Field

from fp8rl_workers.config import Record
from fp8rl_workers.errors import WorkerError
from fp8rl_workers.orchestrator.environments.base import (
    Client,
    Completion,
    Example,
    Segment,
    Split,
    Trajectory,
    given,
    split_of,
)

PREFIX = "verifiers:"
LOCAL_CHAT = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


class EpisodeError(WorkerError):
    """Raised when an episode of verifiers ended without a trace that can be trained on."""

    reason = "EpisodeFailed"


class VerifiersArgs(Record):
    """Arguments of `verifiers:NAME`."""

    tokenizer: str = Field(description="Folder or hub name that verifiers loads tokenizer and chat template from.")
    max_context: int = Field(ge=2, description="Tokens of the longest episode; fp8rl cannot compute it from a taskset.")
    env: dict[str, Any] = Field(
        default=LOCAL_CHAT, description="verifiers' own environment config; the default chats in a local subprocess."
    )
    num_tasks: int = Field(default=10_000, ge=2, description="At most so many tasks are read from the taskset.")


class VerifiersEnvironment:
    """A taskset of verifiers as an environment."""

    def __init__(self, environment_id: str, args: VerifiersArgs) -> None:
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise ImportError(
                f"environment {environment_id!r} needs the library verifiers: pip install 'fp8rl[verifiers]' ({error})"
            ) from error
        self.id = environment_id
        self.args = args
        taskset = {**args.env.get("taskset", {}), "id": environment_id.removeprefix(PREFIX)}
        self._config = resolve_env_config({**args.env, "taskset": taskset})
        self._load = load_environment
        self._tasks = list(islice(self._load(self._config).taskset, args.num_tasks))
        self._orders: dict[tuple[int, Split], list[int]] = {}

    def example(self, seed: int, index: int, split: Split) -> Example:
        """Task number `index` of the split in an order drawn from the seed; after the last task it begins anew."""
        if (seed, split) not in self._orders:
            self._orders[seed, split] = self._order(seed, split)
        places = self._orders[seed, split]
        place = places[index % len(places)]
        prompt = self._tasks[place].data.prompt
        text = prompt if isinstance(prompt, str) else ""
        return Example(id=f"{split}-{seed}-{index}", prompt=text, info={"task": place})

    def _order(self, seed: int, split: Split) -> list[int]:
        places = [place for place, task in enumerate(self._tasks) if split_of(f"{self.id}/{task.key}") == split]
        if not places:
            raise ValueError(f"environment {self.id}: none of its {len(self._tasks)} tasks belongs to split {split}")
        random.Random(f"{self.id}/{seed}/{split}").shuffle(places)
        return places

    async def rollout(self, client: Client, example: Example) -> Trajectory:
        """One episode.

        Raises:
            EpisodeError: the episode failed for a reason other than the client.
        """
        from verifiers.v1 import ModelContext, TrainClientConfig

        environment = self._load(self._config)
        async with relay(client) as (url, record), environment.serving():
            endpoint = TrainClientConfig(
                base_url=url, api_key_var="FP8RL_NO_KEY", renderer_model_name=self.args.tokenizer
            )
            context = ModelContext(model=self.args.tokenizer, client=endpoint)
            episode = await environment.run_episode(self._tasks[example.info["task"]], context)
        if record.failure is not None:
            raise record.failure
        branches = episode.traces[0].branches if episode.ok else []
        if not branches:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            last_lines = "; ".join(f"{error.type}: {error.message.strip().splitlines()[-1]}" for error in errors)
            raise EpisodeError(f"environment {self.id}: the episode of {example.id} failed: {last_lines}")
        segments = tuple(split_tokens(branches[-1].token_ids, branches[-1].sampled_mask, record.completions))
        return Trajectory(segments, float(episode.traces[0].reward), {"branches": float(len(branches))})

    def context_bound(self, max_tokens: int, prompt_tokens: int | None = None) -> int:
        """`max_context`, which counts completions too."""
        return max(self.args.max_context, max_tokens + (prompt_tokens or 0))


@dataclass
class RelayRecord:
    """What a relay answered, in order, and the first exception of its client."""

    completions: list[Completion] = field(default_factory=list)
    failure: BaseException | None = None


@asynccontextmanager
async def relay(client: Client) -> AsyncIterator[tuple[str, RelayRecord]]:
    """Serve vLLM's generate route on a loopback port from `client`; gives the base URL and the record."""
    record = RelayRecord()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        call = asyncio.ensure_future(
            client.generate(body["token_ids"], max_tokens=body["sampling_params"].get("max_tokens"))
        )
        await asyncio.wait({call})
        failure = call.exception()
        if failure is not None:
            record.failure = record.failure or failure
            return web.json_response({"error": {"message": str(failure)}}, status=400)
        record.completions.append(call.result())
        return web.json_response(generate_response(call.result()))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", record
    finally:
        await runner.cleanup()


def generate_response(completion: Completion) -> dict[str, Any]:
    """Body of vLLM's answer to a generate call."""
    sampled = zip(completion.token_ids, completion.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in sampled]
    choice = {
        "index": 0,
        "token_ids": list(completion.token_ids),
        "logprobs": {"content": content},
        "finish_reason": completion.finish_reason,
    }
    return {"request_id": "fp8rl", "choices": [choice]}


def split_tokens(
    tokens: Sequence[int], sampled: Sequence[bool], completions: Sequence[Completion]
) -> Iterator[Segment]:
    """Segments of a trace's tokens; each sampled run takes logprobs and versions from the completion it begins.

    Raises:
        EpisodeError: a sampled run is the beginning of no completion after those used before it.
    """
    left = list(completions)
    place = 0
    for is_sampled, run in groupby(sampled):
        count = len(list(run))
        ids = tuple(tokens[place : place + count])
        place += count
        if not is_sampled:
            yield given(ids)
            continue
        while left and left[0].token_ids[:count] != ids:
            left.pop(0)
        if not left:
            raise EpisodeError(f"{count} sampled tokens of the trace were never sampled by the policy")
        yield beginning(left.pop(0), count)


def beginning(completion: Completion, count: int) -> Segment:
    """The first `count` tokens of a completion as a sampled segment."""
    versions = [version for version, number in completion.spans for _ in range(number)][:count]
    spans = tuple((version, len(list(run))) for version, run in groupby(versions))
    return Segment(completion.token_ids[:count], sampled=True, logprobs=completion.logprobs[:count], spans=spans)
