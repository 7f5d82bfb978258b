"""Starts of an engine that are killed while it compiles or promotes: the next one becomes Ready with a whole cache."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from fp8rl_workers.inference.caches import MADE_AT, CompileCache, files_in

KERNELS = 40
START = f"""
import sys, time
from pathlib import Path
from fp8rl_workers.inference.caches import CompileCache, promote_once_ready
root = Path(sys.argv[1])
environ = {{"FP8RL_CACHE_ROOT": str(root / "cache")}}
cache = CompileCache.of(environ, root / "state", "0.26.0")
cache.begin()
assert not list(cache.at_work.rglob("*.partial")), "read what a killed start had left"
for number in range({KERNELS}):
    path = cache.at_work / "vllm" / f"{{number}}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"x" * 1000)
        time.sleep(0.005)
        partial.rename(path)
        print("compiled", flush=True)
print("ready", flush=True)
promote_once_ready(environ, root / "state", "0.26.0")
print("promoted", flush=True)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", START, str(folder)], stdout=subprocess.PIPE, text=True)


def test_killed_while_it_compiles_or_promotes_the_restart_becomes_ready(tmp_path: Path) -> None:
    promoted = CompileCache.of({"FP8RL_CACHE_ROOT": str(tmp_path / "cache")}, tmp_path / "state", "0.26.0").promoted
    whole = {Path(MADE_AT), *(Path(f"vllm/{number}.so") for number in range(KERNELS))}
    generator = random.Random(0)
    for _ in range(6):
        child = start(tmp_path)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(generator.randrange(1, KERNELS + 2))]
        assert lines[0]
        time.sleep(generator.random() * 0.01)
        child.kill()
        child.communicate()
        assert not promoted.exists() or files_in(promoted) == whole
    last = start(tmp_path)
    out, _ = last.communicate(timeout=60)
    assert last.returncode == 0
    assert out.splitlines()[-2:] == ["ready", "promoted"]
    assert files_in(promoted) == whole
    assert promoted.name == f".fp8rl-{os.getuid()}-0.26.0"
    again, _ = start(tmp_path).communicate(timeout=60)
    assert again.splitlines() == ["ready", "promoted"]  # nothing is compiled twice
