"""Compile caches: compiled apart, promoted whole, used only where they were made."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.inference.caches import MADE_AT, CompileCache, files_in, promote_once_ready


def cache_of(folder: Path) -> CompileCache:
    return CompileCache.of({"FP8RL_CACHE_ROOT": str(folder / "cache")}, folder / "state", "0.26.0")


def compile_into(cache: CompileCache, name: str, text: str = "code") -> None:
    path = cache.at_work / "vllm" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_folders_have_a_dot_the_user_and_the_release_in_their_names(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    assert cache.promoted == tmp_path / "cache" / f".fp8rl-{os.getuid()}-0.26.0"
    assert cache.at_work == tmp_path / "state" / f".fp8rl-{os.getuid()}-0.26.0-at-work"
    assert CompileCache.of({}, tmp_path, "0.26.0").promoted == tmp_path / f".fp8rl-{os.getuid()}-0.26.0"
    assert cache.variables()["TRITON_CACHE_DIR"] == f"{cache.at_work}/triton"
    assert set(cache.variables()) == {
        "VLLM_CACHE_ROOT",
        "FLASHINFER_WORKSPACE_BASE",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    }


def test_what_a_killed_start_left_behind_is_not_read_and_what_was_promoted_is(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    cache.begin()
    compile_into(cache, "partial")
    cache.begin()  # the next start, after a kill
    assert files_in(cache.at_work) == set()
    compile_into(cache, "whole")
    assert cache.promote()
    compile_into(cache, "later")
    cache.begin()
    assert files_in(cache.at_work) == {Path("vllm/whole"), Path(MADE_AT)}


def test_a_promotion_that_adds_nothing_is_none_and_one_that_does_replaces_it_whole(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    cache.begin()
    compile_into(cache, "a")
    assert cache.promote()
    assert not cache.promote()
    compile_into(cache, "b")
    assert cache.promote()
    assert files_in(cache.promoted) == {Path("vllm/a"), Path("vllm/b"), Path(MADE_AT)}
    names = {path.name for path in cache.promoted.parent.iterdir()}
    assert names == {cache.promoted.name, f"{cache.promoted.name}.lock"}


def test_a_cache_that_was_made_at_another_path_is_not_read(tmp_path: Path) -> None:
    made = CompileCache(tmp_path / "one", tmp_path / "cache" / "c")
    made.begin()
    compile_into(made, "a")
    assert made.promote()
    other = CompileCache(tmp_path / "two", made.promoted)
    other.begin()
    assert files_in(other.at_work) == set()
    compile_into(other, "b")
    assert other.promote()
    assert files_in(other.promoted) == {Path("vllm/b"), Path(MADE_AT)}


def test_a_promoted_cache_that_cannot_be_copied_costs_a_cold_start_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_of(tmp_path)
    cache.begin()
    compile_into(cache, "a")
    cache.promote()

    def no_space(*_: object, **__: object) -> None:
        cache.at_work.mkdir()
        (cache.at_work / "half").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", no_space)
    cache.begin()
    assert files_in(cache.at_work) == set()
    assert "compile caches start empty" in caplog.text


def test_starts_beside_promotions_read_whole_caches_only(tmp_path: Path) -> None:
    shared = tmp_path / "cache" / "c"
    writer = CompileCache(tmp_path / "w", shared)
    writer.begin()
    (writer.at_work / "0").write_text("0")
    writer.promote()
    seen: list[set[str]] = []
    stop = threading.Event()

    def start_again_and_again() -> None:
        while not stop.is_set():
            reader = CompileCache(writer.at_work, shared)
            with reader._locked(1):  # LOCK_SH, as begin does
                seen.append({path.name for path in reader.promoted.iterdir()})

    thread = threading.Thread(target=start_again_and_again)
    thread.start()
    for number in range(1, 30):
        (writer.at_work / str(number)).write_text("x")
        assert writer.promote()
    stop.set()
    thread.join()
    sizes = [len(names) for names in seen]
    assert sizes == sorted(sizes)
    assert all(names == {MADE_AT, *map(str, range(len(names) - 1))} for names in seen)


def test_a_root_that_cannot_be_written_is_refused_before_the_boot_and_a_failed_promotion_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"compile caches: .*FP8RL_CACHE_ROOT\) on volumes that it can write"):
        CompileCache.of({"FP8RL_CACHE_ROOT": str(tmp_path / "file")}, tmp_path / "state", "1").begin()
    cache = cache_of(tmp_path)
    cache.begin()
    cache.promoted.parent.joinpath(f"{cache.promoted.name}.lock").unlink()
    cache.promoted.parent.joinpath(f"{cache.promoted.name}.lock").mkdir()
    promote_once_ready({"FP8RL_CACHE_ROOT": str(tmp_path / "cache")}, tmp_path / "state", "0.26.0")
    assert "compile caches were not promoted" in caplog.text
