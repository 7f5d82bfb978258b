"""Objects as few bytes. Pure."""

from __future__ import annotations

import json
import zlib
from typing import Final

from fp8rl_operator.kube.kinds import Object

MAX_DICTIONARY: Final = 32_768  # bytes that zlib looks back
MIN_DICTIONARY: Final = 256
BARE: Final = b"\0"
AGAINST: Final = b"\1"


class Packer:
    """Objects as bytes. Equal objects of one kind give equal bytes, once the kind has its dictionary: its first object of size."""

    def __init__(self) -> None:
        self._dictionaries: dict[str, bytes] = {}

    def pack(self, kind: str, body: Object) -> bytes:
        """Compress against the kind's dictionary."""
        data = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
        if kind not in self._dictionaries and len(data) >= MIN_DICTIONARY:
            self._dictionaries[kind] = data[-MAX_DICTIONARY:]
        known = self._dictionaries.get(kind, b"")
        packer = zlib.compressobj(level=6, wbits=-15, zdict=known)
        return (BARE if known == b"" else AGAINST) + packer.compress(data) + packer.flush()

    def unpack(self, kind: str, data: bytes) -> Object:
        """The object again."""
        known = b"" if data[:1] == BARE else self._dictionaries[kind]
        return dict(json.loads(zlib.decompressobj(wbits=-15, zdict=known).decompress(data[1:])))
