"""The wire: how packed buckets of bytes travel from the trainer's rank 0 to every engine rank of an epoch.

One implementation per transport, both ends in one file (`wire_gloo`, `wire_ipc`, `wire_nccl`). A wire belongs to one epoch and dies with it.
All ranks move the same buckets in the same order, so an offer's list of buckets is the whole protocol. A transfer that fails
(lost peer, time-out, abort) breaks the wire for good: the next transfer needs a new epoch.

Over a *shared* wire nothing is moved: the receivers read the sender's own buckets, which the sender therefore writes only while
no receiver reads them (`group.Group.release`, `wait_released`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fp8rl_workers.errors import InvalidInputError, SyncError

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import Store  # type: ignore[attr-defined]


class WireError(SyncError):
    """Raised when a bucket could not be moved: a peer is lost or late, or the transfer was aborted."""

    reason = "WireBroken"


class Wire(Protocol):
    """One rank's end of an epoch's transport. One thread at a time transfers; `abort` and `close` may come from any."""

    broken: str
    """Why no more transfers are possible; empty while the wire works."""

    shared: bool
    """Whether the receivers' buckets are the sender's own memory."""

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """Buckets of these sizes in bytes: uint8, one dimension, 256-byte aligned.

        Of rank 0: where to stage; the same buckets whenever the sizes are the same. Of the others: where to receive, or over a
        shared wire rank 0's buckets, once it has asked for them.

        Raises:
            WireError: the memory cannot be had, or rank 0's cannot be seen from here.
        """

    def send(self, bucket: Tensor) -> None:
        """Send `bucket` (uint8, one dimension, contiguous) to all other ranks. Rank 0 only; nothing to do over a shared wire.

        Raises:
            WireError: a peer is lost or late, or the transfer was aborted.
        """

    def receive(self, bucket: Tensor) -> None:
        """Fill `bucket` (uint8, one dimension, contiguous, as many bytes as were sent). All ranks but 0.

        After a `WireError` the buffer must not be used again: the transport may write to it until its own time-out.

        Raises:
            WireError: a peer is lost or late, or the transfer was aborted.
        """

    def watch(self, stop: Callable[[], str]) -> None:
        """Let a blocked transfer ask `stop` ten times a second; an answer other than "" aborts it with that reason."""

    def abort(self, reason: str) -> None:
        """Break the wire and free a thread that is blocked in a transfer."""

    def close(self) -> None:
        """Let go of connections and threads. Idempotent; a transfer that is stuck is left to its own time-out."""


def open_wire(
    transport: str, store: Store, rank: int, world_size: int, *, address: str, timeout_seconds: float, device: device
) -> Wire:
    """Connect this rank to all others of an epoch, over `store` (already prefixed with job and epoch).

    Args:
        transport: Name of the transport: `gloo`, `ipc` or `nccl`.
        store: Where the ranks find each other's addresses.
        rank: This rank; 0 sends.
        world_size: Number of ranks.
        address: The pod's own address to bind to.
        timeout_seconds: Deadline of the connect and of each transfer.
        device: Where the weights are; gloo stages on the host all the same.

    Raises:
        InvalidInputError: the transport is not known, or cannot work on this device.
        WireError: not all ranks connected in time.
    """
    if transport == "gloo":
        from fp8rl_workers.weights.wire_gloo import GlooWire

        return GlooWire(store, rank, world_size, address, timeout_seconds)
    if transport == "ipc":
        from fp8rl_workers.weights.wire_ipc import IpcWire

        return IpcWire(store, rank, device, timeout_seconds)
    if transport == "nccl":
        from fp8rl_workers.weights.wire_nccl import NcclWire

        return NcclWire(store, rank, world_size, device, timeout_seconds)
    raise InvalidInputError(f"weightSync.transport: {transport!r} is not built in this release; use gloo, ipc or nccl")
