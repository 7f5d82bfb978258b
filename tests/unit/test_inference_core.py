"""The turn of the loop in which all ranks commit, against a stand-in of vLLM's engine core."""

from __future__ import annotations

from concurrent.futures import Future
from queue import Queue
from types import SimpleNamespace

import pytest

from fp8rl_workers.errors import DigestError, StaleError, SyncError
from fp8rl_workers.inference import core as core_module
from fp8rl_workers.inference.core import EngineControl, answer_of, book_of
from fp8rl_workers.inference.spans import NO_VERSION
from fp8rl_workers.protocol import Decision

RANK_STATE = {
    "epoch": 1,
    "epoch_told": 1,
    "prepared_sync_id": None,
    "prepared_version": None,
    "load_path": "plan",
    "load_fallback": {},
    "num_quantized": 2,
    "place": "cpu/boot/net",
    "audit": "",
    "message": "",
}


class Ranks:
    """Two ranks; `refuses` maps a function's name to what rank 1 answers."""

    def __init__(self):
        self.calls = []
        self.refuses = {}
        self.answers = {}
        self.crashes = ""

    def collective_rpc(self, function, args=()):
        name = function.__name__
        self.calls.append(name)
        if name == self.crashes:
            raise RuntimeError("out of memory")
        answer = self.answers.get(name, {})
        return [answer, answer | self.refuses.get(name, {})]


class Scheduler:
    def __init__(self, events):
        self.requests = {"r": SimpleNamespace(request_id="r", num_computed_tokens=0, sampling_params=None)}
        self.events = events
        pool = SimpleNamespace(cached_block_hash_to_block={}, cached_block_hashes_by_block={}, blocks=[])
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def update_from_output(self, scheduled, output):
        self.events.append(("outputs", output))
        book_of(self).add("r", output)
        return {0: output}

    def reset_prefix_cache(self, reset_running_requests):
        self.events.append(("reset", reset_running_requests))


def make_control(*, recompute=False):
    events = []
    core = SimpleNamespace(
        scheduler=Scheduler(events), model_executor=Ranks(), batch_queue=None, output_queue=Queue(), events=events
    )
    return EngineControl(core, recompute=recompute), core


def decision(version, sync_id=None, epoch=1):
    return Decision(
        job_uid="j", epoch=epoch, sync_id=sync_id or version, version=version, step=version, digest="d", committed=True
    ).model_dump_json()


def test_all_ranks_verify_before_the_first_one_changes():
    control, core = make_control()
    report = control.commit(decision(1))
    assert core.model_executor.calls == ["verify", "apply"]
    assert (report["version"], report["digest"], report["running"]) == (1, "d", {"r": 0})


def test_one_rank_that_cannot_verify_keeps_all_on_the_old_version():
    control, core = make_control()
    control.commit(decision(1))
    core.model_executor.refuses["verify"] = {"error": "a byte", "reason": "DigestMismatch"}
    with pytest.raises(DigestError, match="rank 1: a byte"):
        control.commit(decision(2))
    assert core.model_executor.calls == ["verify", "apply", "verify"]
    assert control.committed.version == 1
    assert book_of(core.scheduler).version == 1


def test_a_rank_that_fails_to_apply_leaves_the_engine_without_a_version():
    control, core = make_control()
    control.commit(decision(1))
    core.model_executor.refuses["apply"] = {"error": "lost", "reason": "WeightSyncFailed"}
    with pytest.raises(SyncError):
        control.commit(decision(2))
    assert control.committed is None


@pytest.mark.parametrize("crash", [False, True])
def test_after_a_commit_that_fails_half_way_tokens_count_for_no_version_until_the_next_commit(crash):
    control, core = make_control()
    control.commit(decision(1))
    book = book_of(core.scheduler)
    book.add("r", 2)
    if crash:
        core.model_executor.crashes = "apply"
    else:
        core.model_executor.refuses["apply"] = {"error": "lost", "reason": "WeightSyncFailed"}
    with pytest.raises((SyncError, RuntimeError)):
        control.commit(decision(2))
    book.add("r", 3)
    assert book.spans("r") == [[1, 2], [NO_VERSION, 3]]
    core.model_executor.crashes = ""
    core.model_executor.refuses.clear()
    assert control.commit(decision(3))["running"] == {"r": 5}
    book.add("r", 1)
    assert book.close("r") == [[1, 2], [NO_VERSION, 3], [3, 1]]


def test_the_quantized_layers_are_those_of_the_first_rank():
    control, core = make_control()
    core.model_executor.answers["layers"] = {"quantized_layers": ["a", "b"]}
    assert control.layers() == {"quantized_layers": ["a", "b"]}


def test_an_engine_whose_commit_failed_half_way_reports_no_version():
    control, core = make_control()
    control.commit(decision(1))
    core.model_executor.answers["state"] = RANK_STATE
    assert control.state()["version"] == 1
    core.model_executor.refuses["apply"] = {"error": "lost", "reason": "WeightSyncFailed"}
    with pytest.raises(SyncError):
        control.commit(decision(2))
    assert "version" not in control.state()


def test_steps_in_flight_are_let_in_first_and_count_for_the_old_version():
    control, core = make_control()
    control.commit(decision(1))
    done = Future()
    done.set_result(2)
    core.batch_queue = [(done, "scheduled", Future())]
    report = control.commit(decision(2))
    assert core.events == [("outputs", 2)]
    assert core.output_queue.get_nowait() == (0, 2)
    assert report["running"] == {"r": 2}
    book_of(core.scheduler).add("r", 1)
    assert book_of(core.scheduler).close("r") == [[1, 2], [2, 1]]


def test_recompute_preempts_running_requests_and_keep_does_not():
    control, core = make_control(recompute=True)
    control.commit(decision(1))
    assert core.events == [("reset", True)]


def test_the_same_commit_again_answers_the_same_and_an_older_one_is_stale():
    control, core = make_control()
    control.commit(decision(3))
    first = control.commit(decision(4))
    assert control.commit(decision(4)) == first
    assert core.model_executor.calls == ["verify", "apply"] * 2
    for late in (decision(3), decision(5, sync_id=4), decision(9, epoch=0)):
        with pytest.raises(StaleError, match="comes late"):
            control.commit(late)


def test_refusals_travel_as_objects_with_reason_and_status(monkeypatch):
    control, _ = make_control()
    monkeypatch.setattr(core_module, "EngineControl", lambda *_args, **_kw: control)
    core = SimpleNamespace(fp8rl_control=control)
    control.commit(decision(3))
    answer = core_module.utility("commit")(core, decision(2))
    assert (answer["reason"], answer["status"]) == ("Stale", 409)
    assert answer_of(SyncError("x")) == {"error": "x", "reason": "WeightSyncFailed", "status": 500}
