"""An engine rank for the tests of the wire, as a process: joins an epoch and receives what a mode says."""

import os
import sys
import time

import torch

from fp8rl_workers.errors import SyncError
from fp8rl_workers.protocol import Epoch, MemberReport
from fp8rl_workers.weights.group import Group, join_group


def report(group: Group, n: int, state: str, error: str = "", digest: str = "") -> None:
    group.put_report(
        n,
        MemberReport(
            sync_id=n, epoch=group.epoch.epoch, rank=group.rank, state=state, version=n + 1, digest=digest, error=error
        ),
    )


def receive_all(group: Group) -> None:
    n = 0
    while True:
        try:
            text = group.wait_offer(n, timeout=60)
        except SyncError:
            return
        if text is None:
            return
        count, size = map(int, text.split())
        total = 0
        try:
            with group.transfer(n):
                for _ in range(count):
                    bucket = torch.empty(size, dtype=torch.uint8)
                    group.wire.receive(bucket)
                    total += int(bucket.sum(dtype=torch.int64))
            report(group, n, "prepared", digest=str(total))
        except SyncError as error:
            print(f"WIRE {time.monotonic()} {error}", flush=True)
            report(group, n, "failed", error=str(error))
        n += 1


def read_shared(group: Group, *, keep: bool) -> None:
    """Read each offer's bytes where the sender staged them; `keep`: never say that they may be written again."""
    n = 0
    while True:
        try:
            text = group.wait_offer(n, timeout=60)
            if text is None:
                return
            buckets = group.wire.buffers([int(size) for size in text.split()])
            group.wait_seal(n, 60)
            report(group, n, "prepared", digest=str(sum(int(b.sum(dtype=torch.int64)) for b in buckets)))
            if not keep:
                group.release(n)
        except SyncError:
            return
        n += 1


def main() -> None:
    mode, rank, address, text = sys.argv[1:]
    torch.set_num_threads(1)
    epoch = Epoch.model_validate_json(text)
    try:
        group = join_group(epoch, int(rank), f"uid-{rank}", address, token=os.environ.get("PEER_TOKEN", "token"))
    except SyncError as error:
        print(f"JOIN {error}", flush=True)
        return
    print("JOINED", flush=True)
    if mode == "hang":
        group.wait_offer(0, timeout=60)
        time.sleep(600)
    if mode in {"shared", "keep"}:
        read_shared(group, keep=mode == "keep")
    else:
        receive_all(group)
    group.close()
    os._exit(0)


if __name__ == "__main__":
    main()
