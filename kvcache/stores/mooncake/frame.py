"""What is put before an entry's bytes: whose they are, how many, and their digest.

::

    16 bytes     "kvcache.frame/1\n"
     8 bytes     the length n of the entry, little-endian
    16 bytes     xxh3_128 of the key, the length and the n bytes; or the first 16 of their blake3
    24 bytes     zeros
     n bytes     the entry
"""

from __future__ import annotations

import struct
from typing import Any

from kvcache.stores.digests import Digests

__all__ = ["HEADER", "Digest", "header"]

_FORMAT = b"kvcache.frame/1\n"
_LAYOUT = struct.Struct("<16sQ16s24x")
HEADER = _LAYOUT.size


class Digest:
    """A digest that knows whose it is: the bytes of one key are not those of another."""

    def __init__(self, digests: Digests, key: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._digest = digests.start(key, nbytes)

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def header(self) -> bytes:
        """The header of an entry of what was digested: HEADER bytes."""
        return header(self._nbytes, self._digest.digest()[:16])


def header(nbytes: int, digest: bytes) -> bytes:
    return _LAYOUT.pack(_FORMAT, nbytes, digest)
