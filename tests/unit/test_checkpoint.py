"""Checkpoints: atomic at every write, fenced by attempt, the newest few kept."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import make_config

from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.protocol import StepResult
from fp8rl_workers.trainer import checkpoint
from fp8rl_workers.trainer.checkpoint import CheckpointStore, Meta, identity


def make_meta(step: int, attempt: int = 0) -> Meta:
    return Meta(
        step=step,
        attempt=attempt,
        version=step + 1,
        identity=identity(make_config()),
        orchestrator={"cursor": step},
        result=StepResult(step=step, metrics={"loss": 0.5}),
    )


def save(store: CheckpointStore, step: int) -> None:
    store.save({"weight": torch.full((1000,), float(step))}, make_meta(step, store.attempt))


def load(folder: Path) -> tuple[dict[str, Any], Meta]:
    found = CheckpointStore(folder, attempt=9, keep=2).load(identity(make_config()))
    assert found is not None
    return found


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, 0, 2).load({}) is None
    save(CheckpointStore(tmp_path, 0, 2), 4)
    state, meta = load(tmp_path)
    assert torch.equal(state["weight"], torch.full((1000,), 4.0))
    assert meta == make_meta(4)


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 0, 2)
    for step in (2, 9, 10):
        save(store, step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000009-0", "step-00000010-0"]


def test_the_current_one_is_kept_even_when_older_steps_are_done_again(tmp_path: Path) -> None:
    first = CheckpointStore(tmp_path, 0, 1)
    save(first, 8)
    second = CheckpointStore(tmp_path, 1, 1)
    save(second, 6)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000006-1"]
    assert load(tmp_path)[1].step == 6


def test_a_writer_of_an_old_attempt_is_fenced_off(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, 0, 2)
    save(old, 1)
    CheckpointStore(tmp_path, 1, 2)
    with pytest.raises(StaleError, match="belongs to attempt 1; attempt 0 may not write there"):
        save(old, 2)
    with pytest.raises(StaleError):
        CheckpointStore(tmp_path, 0, 2)
    assert load(tmp_path)[1].step == 1


def test_another_run_s_checkpoint_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, 0, 2), 1)
    with pytest.raises(InvalidInputError, match=r"seed was 0, is 7; put the job back as it was"):
        CheckpointStore(tmp_path, 0, 2).load(identity(make_config(seed=7)))


@pytest.mark.parametrize("name", ["fsync", "replace", "rename"])
def test_a_disk_that_fails_leaves_the_previous_checkpoint_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = CheckpointStore(tmp_path, 0, 2)
    save(store, 1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if name == "fsync" else Path, name, refuse)
        with pytest.raises(OSError, match="No space left"):
            save(store, 2)
    assert load(tmp_path)[1].step == 1
    assert not list(tmp_path.glob(".step-*"))
    save(CheckpointStore(tmp_path, 9, 2), 3)
    assert load(tmp_path)[1].step == 3


def test_a_full_disk_under_torch_save_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, 0, 2)

    def refuse(*_: object) -> None:
        raise RuntimeError("PyTorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(checkpoint.torch, "save", refuse)
    with pytest.raises(OSError, match="file write failed"):
        save(store, 1)


def die_at(folder: Path, call: int) -> None:
    """Save step 2, and die without clean-up at the call-th touch of the disk that makes something last."""
    count = 0

    def counting(real: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os._exit(17)
            return real(*arguments, **keywords)

        return wrapped

    store = CheckpointStore(folder, 0, 2)
    os.fsync = counting(os.fsync)  # type: ignore[assignment]
    Path.rename = counting(Path.rename)  # type: ignore[method-assign]
    Path.replace = counting(Path.replace)  # type: ignore[method-assign]
    torch.save = counting(torch.save)
    save(store, 2)


@pytest.mark.parametrize("call", range(1, 12))
def test_a_writer_killed_at_any_write_leaves_a_whole_checkpoint_current(tmp_path: Path, call: int) -> None:
    save(CheckpointStore(tmp_path, 0, 2), 1)
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(tmp_path, call))
    process.start()
    process.join()
    state, meta = load(tmp_path)
    assert meta.step in ({1} if process.exitcode == 17 and call <= 8 else {1, 2})
    assert torch.equal(state["weight"], torch.full((1000,), float(meta.step)))
    assert not list(tmp_path.glob(".step-*"))


def test_the_killed_writer_does_reach_its_end_when_nothing_kills_it(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(tmp_path, 100))
    process.start()
    process.join()
    assert (process.exitcode, load(tmp_path)[1].step) == (0, 2)
