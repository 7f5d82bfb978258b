"""Checkpoints: atomic at every write, fenced by attempt, the newest few kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import make_config, make_meta

from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.trainer import checkpoint
from fp8rl_workers.trainer.checkpoint import CheckpointStore, Meta, identity

KILLER = Path(__file__).parents[1] / "process" / "checkpoint_killer.py"


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


def test_a_resumed_run_may_see_its_model_under_another_path_but_not_another_model(tmp_path: Path) -> None:
    for name, text in (("one", "{}"), ("same", "{}"), ("other", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    one, same, other = (identity(make_config(tmp_path / name)) for name in ("one", "same", "other"))
    assert one == same
    assert [key for key in one if one[key] != other[key]] == ["config.json of model.path"]


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


def test_a_writer_killed_at_any_write_leaves_a_whole_checkpoint_current(tmp_path: Path) -> None:
    """Nine touches of the disk: save, sync, sync, replace, sync, rename, sync, replace (of `current`), sync."""
    save(CheckpointStore(tmp_path / "job", 0, 2), 1)
    command = [sys.executable, str(KILLER), str(tmp_path / "job"), "10"]
    codes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert codes == ["17"] * 9 + ["0"]
    for call in range(1, 11):
        state, meta = load(tmp_path / f"job-{call}")
        assert meta.step == (1 if call <= 8 else 2)
        assert torch.equal(state["weight"], torch.full((1000,), float(meta.step)))
        assert not list((tmp_path / f"job-{call}").glob(".step-*"))
