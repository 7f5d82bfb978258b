"""Forgetting vLLM's prefix cache at a turn of version, without touching the blocks that running requests use."""

from __future__ import annotations

import hashlib
from typing import Any


def forget_prefixes(scheduler: Any, version: int) -> None:
    """No request that starts after this call reuses KV of the version before it.

    vLLM's own reset refuses while requests run. Here the hashes of all blocks are dropped, the blocks stay with their
    requests. A running request goes on with KV of both versions: what it caches from now on gets hashes of its own, so
    that nobody else ever finds it.
    """
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    for request in scheduler.requests.values():
        if request.num_computed_tokens > 0:
            _salt(request, f"fp8rl:{version}:{request.request_id}")


def _salt(request: Any, salt: str) -> None:
    request.cache_salt = f"{request.cache_salt or ''}|{salt}"
    request.block_hashes[:] = [hashlib.sha256(salt.encode() + old).digest() for old in request.block_hashes]
