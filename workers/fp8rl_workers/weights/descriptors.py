"""Handing a file descriptor to other processes of this machine, over a Unix socket in the abstract namespace.

The socket leaves no file behind, and its name is told only on the store of an epoch; processes of other users are refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading

NAME_BYTES = 16
CREDENTIALS = struct.Struct("3i")
CLOSE_SECONDS = 1.0


class DescriptorServer:
    """Gives a descriptor to whoever connects, until it is closed."""

    def __init__(self, descriptor: int) -> None:
        self.name = f"fp8rl-{secrets.token_hex(NAME_BYTES)}"
        self._descriptor = descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="fp8rl-descriptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more; the descriptor is closed with it. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                break  # it was shut down
            with peer, contextlib.suppress(OSError):
                size = CREDENTIALS.size
                _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
                if user == os.getuid():
                    socket.send_fds(peer, [b"\0"], [self._descriptor])
        self._socket.close()
        os.close(self._descriptor)


def fetch(name: str, timeout: float) -> int:
    """The descriptor that the server of this name gives; the caller closes it.

    Raises:
        OSError: nobody serves under that name in this network namespace, or not within `timeout` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout)
        peer.connect(f"\0{name}")
        _, found, _, _ = socket.recv_fds(peer, 1, 1)
    if not found:
        raise PermissionError("the trainer's process belongs to another user")
    return found[0]
