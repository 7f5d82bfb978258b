"""Loopback addresses of one run: a block 127.x.y.0/24 that no other run on this machine holds.

The lock is an abstract Unix socket: it lives in the network namespace, just as the loopback addresses do, holds for
all users, and is gone with the last process that has it open. Shims inherit it, so a block is free only once the last
container that used it has ended.
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass, field

BLOCKS = 200 * 254


@dataclass
class AddressBlock:
    """`prefix` is `127.x.y`; addresses .1 to .254 are handed out in turn and come back when released."""

    prefix: str
    lock: socket.socket
    taken: set[int] = field(default_factory=set)
    last: int = 0

    @classmethod
    def take(cls, key: str) -> AddressBlock:
        """Take a free block, starting the search at a place that depends on `key`.

        Raises:
            OSError: every block is taken.
        """
        first = zlib.crc32(key.encode())
        for offset in range(BLOCKS):
            number = (first + offset) % BLOCKS
            prefix = f"127.{20 + number // 254}.{1 + number % 254}"
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                lock.bind(f"\0fp8rl/{prefix}")
            except OSError:
                lock.close()
                continue
            return cls(prefix, lock)
        raise OSError(f"all {BLOCKS} loopback blocks 127.20.1 to 127.219.254 are taken by other runs: end one")

    def allocate(self) -> str:
        """Hand out the next free address.

        Raises:
            OSError: all 254 are in use.
        """
        for offset in range(254):
            number = (self.last + offset) % 254 + 1
            if number not in self.taken:
                self.taken.add(number)
                self.last = number
                return f"{self.prefix}.{number}"
        raise OSError(f"all 254 addresses of {self.prefix}.0/24 are in use")

    def release(self, address: str) -> None:
        """Give an address back."""
        self.taken.discard(int(address.rpartition(".")[2]))

    def close(self) -> None:
        """Give the block back (once the last shim has ended)."""
        self.lock.close()
