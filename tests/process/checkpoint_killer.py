"""Saves step 2 into copies of a folder, each time killed at another touch of the disk; run as a process of its own.

Arguments: folder with a checkpoint of step 1, number of copies. Copy n is `<folder>-<n>`; a fork saves into it and dies without
clean-up at its n-th fsync, rename, replace or torch.save. Prints the exit codes, 17 for a killed one.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from fp8rl_workers.trainer.checkpoint import CheckpointStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer_kit import make_meta


def die_at(folder: Path, call: int) -> None:
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
    os.fsync = counting(os.fsync)
    Path.rename = counting(Path.rename)
    Path.replace = counting(Path.replace)
    torch.save = counting(torch.save)
    store.save({"weight": torch.full((1000,), 2.0)}, make_meta(2))


def main() -> None:
    folder, copies = Path(sys.argv[1]), int(sys.argv[2])
    codes = []
    for call in range(1, copies + 1):
        copy = folder.with_name(f"{folder.name}-{call}")
        shutil.copytree(folder, copy)
        child = os.fork()
        if child == 0:
            die_at(copy, call)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(*codes)


if __name__ == "__main__":
    main()
