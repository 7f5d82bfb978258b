"""Version labels and the turn of version, against small stand-ins of vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from fp8rl_workers.inference.prefixes import forget_prefixes
from fp8rl_workers.inference.spans import VersionBook, label_outputs


def output(request, tokens, finish_reason=None, params=None):
    return SimpleNamespace(
        request_id=request, new_token_ids=[0] * tokens, finish_reason=finish_reason, kv_transfer_params=params
    )


def test_tokens_before_and_after_a_turn_get_their_versions():
    book = VersionBook()
    book.turn(4, [])
    book.add("a", 3)
    assert book.turn(5, ["a", "waiting"]) == {"a": 3, "waiting": 0}
    book.add("a", 2)
    book.add("waiting", 1)
    assert book.close("a") == [[4, 3], [5, 2]]
    assert book.close("waiting") == [[5, 1]]


def test_two_turns_without_a_token_between_leave_no_empty_span():
    book = VersionBook()
    book.turn(1, [])
    book.add("a", 1)
    book.turn(2, ["a"])
    book.turn(3, ["a"])
    book.add("a", 1)
    assert book.spans("a") == [[1, 1], [3, 1]]


def test_requests_that_are_gone_are_forgotten_at_the_next_turn():
    book = VersionBook()
    book.add("aborted", 7)
    assert book.turn(1, ["alive"]) == {"alive": 0}
    assert book.close("aborted") == []


@given(st.lists(st.one_of(st.just("turn"), st.integers(0, 4)), max_size=30))
def test_spans_always_sum_to_the_tokens_and_versions_only_grow(events):
    book = VersionBook()
    labels, version = [], 0
    for event in events:
        if event == "turn":
            version += 1
            book.turn(version, ["r"])
        else:
            book.add("r", event)
            labels += [version] * event
    assert [v for v, n in book.close("r") for _ in range(n)] == labels


def test_only_outputs_that_end_a_request_carry_spans_beside_what_is_there():
    book = VersionBook()
    book.turn(9, [])
    running, done = output("a", 2), output("b", 1, "stop", {"other": 1})
    label_outputs(book, {}, {0: SimpleNamespace(outputs=[running, done])})
    assert running.kv_transfer_params is None
    assert done.kv_transfer_params == {"other": 1, "fp8rl": {"spans": [[9, 1]]}}


def test_requests_with_stop_strings_carry_spans_at_every_step():
    book = VersionBook()
    book.turn(2, [])
    live = {"a": SimpleNamespace(sampling_params=SimpleNamespace(stop=["\n"]))}
    for expected in (1, 2):
        step = output("a", 1)
        label_outputs(book, live, {0: SimpleNamespace(outputs=[step])})
        assert step.kv_transfer_params == {"fp8rl": {"spans": [[2, expected]]}}


class Block:
    def __init__(self):
        self.block_hash = "hash"

    def reset_hash(self):
        self.block_hash = None


def test_forgetting_drops_all_hashes_and_salts_what_runs_but_not_what_waits():
    pool = SimpleNamespace(
        cached_block_hash_to_block={"h": 1}, cached_block_hashes_by_block={1: {"h"}}, blocks=[Block()]
    )

    def request(name, computed):
        return SimpleNamespace(
            request_id=name, num_computed_tokens=computed, block_hashes=[b"one", b"two"], cache_salt=None
        )

    running, twin, waiting = request("r", 300), request("s", 300), request("w", 0)
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool), requests={r.request_id: r for r in (running, twin, waiting)}
    )
    forget_prefixes(scheduler, 5)
    assert pool.cached_block_hash_to_block == {}
    assert pool.cached_block_hashes_by_block == {}
    assert pool.blocks[0].block_hash is None
    assert waiting.block_hashes == [b"one", b"two"]
    assert waiting.cache_salt is None
    assert running.cache_salt != twin.cache_salt
    assert len({*running.block_hashes, *twin.block_hashes, b"one", b"two"}) == 6
