"""Which weight version sampled which token: counted where tokens are counted, in the engine core's own loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Spans = list[list[int]]
NO_VERSION = 0
"""Label of tokens that no published weights sampled; the orchestrator drops what carries it."""


class VersionBook:
    """Output tokens of each live request, and how many it had at each turn of version.

    A turn of version happens between two steps of the loop, with no step in flight, so every token belongs to exactly one
    version. `NO_VERSION` stands for the dummy weights before the first commit, and for weights that a commit left half-way.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        self._counts: dict[str, int] = {}
        self._ended: dict[str, Spans] = {}

    def add(self, request: str, tokens: int) -> None:
        """`request` got `tokens` more output tokens."""
        self._counts[request] = self._counts.get(request, 0) + tokens

    def turn(self, version: int, live: Collection[str]) -> dict[str, int]:
        """From here on tokens belong to `version`; requests that are not `live` (aborted) are forgotten.

        Returns:
            Output tokens that each live request had.
        """
        self._counts = {request: self._counts.get(request, 0) for request in live}
        self._ended = {request: self._ended.get(request, []) for request in live}
        for request, count in self._counts.items():
            tokens = count - sum(n for _, n in self._ended[request])
            if tokens:
                self._ended[request].append([self.version, tokens])
        self.version = version
        return dict(self._counts)

    def spans(self, request: str) -> Spans:
        """`[[version, tokens], ...]` of the request's output so far, oldest first; the sum is its length."""
        ended = [list(span) for span in self._ended.get(request, [])]
        tokens = self._counts.get(request, 0) - sum(n for _, n in ended)
        return [*ended, [self.version, tokens]] if tokens else ended

    def close(self, request: str) -> Spans:
        """The spans of a finished request, which is then forgotten."""
        spans = self.spans(request)
        self._counts.pop(request, None)
        self._ended.pop(request, None)
        return spans


def label_outputs(book: VersionBook, requests: Mapping[str, Any], batches: Mapping[int, Any]) -> None:
    """Count one step's outputs and write the spans on those that end a request.

    A stop string is found by the front end, after the fact: outputs of requests that have some carry spans at every step.

    Args:
        book: The engine core's book.
        requests: vLLM's live requests by id.
        batches: vLLM's `EngineCoreOutputs` by client.
    """
    for batch in batches.values():
        for output in batch.outputs:
            book.add(output.request_id, len(output.new_token_ids))
            if output.finish_reason is not None:
                spans = book.close(output.request_id)
            elif _has_stop_strings(requests.get(output.request_id)):
                spans = book.spans(output.request_id)
            else:
                continue
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), "fp8rl": {"spans": spans}}


def _has_stop_strings(request: Any) -> bool:
    params = getattr(request, "sampling_params", None)
    return bool(getattr(params, "stop", None))
