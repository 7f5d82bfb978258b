"""The policy as environments see it: tokenizer, sampling options, and a client for each sample of a group.

The tokenizer is the model's `tokenizer.json`; its digest is compared with the trainer's. The seed of every call comes from
(job seed, prompt position, sample, turn), so a run asks for the same samples again when a call is sent twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.orchestrator.dispatch import Dispatcher, choose
from fp8rl_workers.orchestrator.environments import Completion
from fp8rl_workers.orchestrator.sampling import SamplingOptions, request_body, request_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
AFFINITY_TOKENS = 32  # two KV blocks of vLLM: below that no block of the prompt is shared


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        InvalidModelError: tokenizer.json is missing or unreadable.
    """
    from tokenizers import Tokenizer

    path = model_path / TOKENIZER
    if not path.is_file():
        raise InvalidModelError(f"model.path: {path} does not exist; a fast tokenizer (tokenizer.json) is needed")
    return Tokenizer.from_file(str(path))


def tokenizer_digest(model_path: Path) -> str:
    """SHA-256 of tokenizer.json, in hex."""
    return hashlib.sha256((model_path / TOKENIZER).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Policy:
    """What all clients of a job share."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    options: SamplingOptions
    job_uid: str
    seed: int
    max_model_len: int


@dataclass
class GroupHome:
    """The replica that the samples of one group prefer; chosen at the group's first long enough prompt."""

    size: int
    uid: str | None = None


@dataclass
class SampleClient:
    """The environment's client of one sample (`environments.Client`)."""

    policy: Policy
    position: int
    sample: int
    home: GroupHome
    turn: int = field(default=0, init=False)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Sample a continuation.

        Raises:
            InvalidInputError: the context does not fit maxModelLen, or the engine refused it.
            EngineLostError: no engine answered.
        """
        policy = self.policy
        limit = min(max_tokens or policy.options.max_tokens, policy.options.max_tokens)
        if len(token_ids) + limit > policy.max_model_len:
            raise InvalidInputError(
                f"prompt of {len(token_ids)} tokens + maxTokens {limit} = {len(token_ids) + limit} is over "
                f"model.maxModelLen {policy.max_model_len}: raise model.maxModelLen or lower rollout.maxTokens"
            )
        seed = request_seed(policy.seed, self.position, self.sample, self.turn)
        self.turn += 1

        def body_of(version: int) -> dict[str, object]:
            salt = f"{policy.job_uid}/{version}"
            return request_body(token_ids, policy.options, max_tokens=limit, stop=stop, seed=seed, salt=salt)

        return await policy.dispatcher.generate(body_of, self._home(len(token_ids)), self.home.size)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        return list(self.policy.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens skipped."""
        return str(self.policy.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _home(self, num_tokens: int) -> str | None:
        if num_tokens < AFFINITY_TOKENS:
            return None
        if self.home.uid is None:
            dispatcher = self.policy.dispatcher
            chosen = choose(dispatcher.replicas.values(), dispatcher.max_in_flight)
            self.home.uid = chosen.uid if chosen is not None else None
        return self.home.uid
