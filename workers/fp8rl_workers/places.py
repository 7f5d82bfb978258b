"""Where a process keeps weights, and over which transport two of them can meet. Pure but for `this_place`; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from fp8rl_workers.errors import InvalidInputError

Transport = Literal["gloo", "nccl", "ipc"]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_place(device: str) -> str:
    """`<device>/<boot of the machine>/<network namespace>`; `device`: cpu, or cuda: and the card's UUID.

    Processes that agree in all of it can map each other's memory (`weights.wire_ipc`).
    """
    namespace = str(Path("/proc/self/ns/net").readlink())
    return "/".join([device, BOOT_ID.read_text(encoding="ascii").strip(), namespace])


def choose_transport(asked: str, trainer: str, engines: Mapping[str, str]) -> Transport:
    """The transport of an epoch.

    Args:
        asked: `weightSync.transport`.
        trainer: the trainer's place.
        engines: place by pod.

    Raises:
        InvalidInputError: what was asked for cannot be.
    """
    apart = [pod for pod, place in engines.items() if not trainer or place != trainer]
    if asked == "ipc" and apart:
        raise InvalidInputError(
            f"weightSync.transport: ipc needs trainer and engines on one machine, in one network namespace, with weights on "
            f"the same card or all in host memory; {listed(apart)} differ from the trainer ({trainer or 'which has not said'}); set transport: auto"
        )
    if asked == "ipc" or (asked == "auto" and not apart and trainer.startswith("cuda:")):
        return "ipc"
    return "gloo"


def listed(pods: Iterable[str]) -> str:
    """A few names."""
    names = sorted(pods)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
