"""An engine rank for the tests of the trainer, as a process: receives offers, checks the seal, keeps what it got on disk.

Arguments: epoch as JSON, rank, address, folder, mode. Modes: `keep` writes `<folder>/<version>.pt` with the wire's tensors;
`hang` reads the offer and then receives nothing.
"""

import os
import sys
import time
from pathlib import Path

import torch

from fp8rl_workers.errors import SyncError
from fp8rl_workers.protocol import Epoch, MemberReport
from fp8rl_workers.trainer.publish import place
from fp8rl_workers.weights.digest import digest, joined
from fp8rl_workers.weights.group import Group, join_group
from fp8rl_workers.weights.offer import LayoutReader, Offer, parse_offer, parse_seal


def take(group: Group, n: int, offer: Offer, folder: Path) -> MemberReport:
    buckets = [torch.empty(size, dtype=torch.uint8) for size in offer.buckets]
    with group.transfer(n):
        for bucket in buckets:
            group.wire.receive(bucket)
    seal = parse_seal(group.wait_seal(n, 20) or "", offer)
    tensors = {entry.name: place(entry, buckets) for entry in offer.tensors}
    faults = seal.differences(offer, joined([digest(tensor) for tensor in tensors.values()]))
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"{offer.version}.pt")
    return MemberReport(
        sync_id=offer.head.sync_id,
        epoch=offer.head.epoch,
        rank=group.rank,
        state="failed" if faults else "prepared",
        version=offer.version,
        digest=seal.total,
        error="; ".join(faults),
    )


def main() -> None:
    text, rank, address, folder, mode = sys.argv[1:]
    torch.set_num_threads(1)
    epoch = Epoch.model_validate_json(text)
    group = join_group(epoch, int(rank), f"uid-{rank}", address, token="token")
    n = 0
    while True:
        try:
            found = group.wait_offer(n, 60)
        except SyncError:
            os._exit(0)
        if found is None:
            os._exit(0)
        offer = parse_offer(found, epoch.job_uid, epoch.epoch, LayoutReader(group.layout))
        if mode == "hang":
            (Path(folder) / "offered").touch()
            time.sleep(600)
        try:
            report = take(group, n, offer, Path(folder))
        except SyncError as error:
            report = MemberReport(
                sync_id=offer.head.sync_id,
                epoch=offer.head.epoch,
                rank=group.rank,
                state="failed",
                version=offer.version,
                error=str(error),
            )
        group.put_report(n, report)
        n += 1


if __name__ == "__main__":
    main()
