"""One entry on its way: digested as it passes through a registered buffer.

An entry has a header before its bytes: whose they are, how many, and their digest::

    16 bytes     "kvcache.frame/1\n"
     8 bytes     the length n of the entry, little-endian
    16 bytes     xxh3_128 of the key, the length and the n bytes; or the first 16 of their blake3
    24 bytes     zeros
     n bytes     the entry
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache.stores.digests import Digests
from kvcache.stores.mooncake.client import Client

__all__ = ["HEADER", "EntryTransfer", "FramedDigest"]

_FORMAT = b"kvcache.frame/1\n"
_LAYOUT = struct.Struct("<16sQ16s24x")
HEADER = _LAYOUT.size


class FramedDigest:
    """A digest that knows whose it is: the bytes of one key are not those of another."""

    def __init__(self, digests: Digests, key: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._digest = digests.start(key, nbytes)

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def header(self) -> bytes:
        return _LAYOUT.pack(_FORMAT, self._nbytes, self._digest.digest()[:16])


class EntryTransfer:
    """An entry that is known to the pool as ``name``; ``digest`` has seen none of its bytes yet.

    ``room`` is a registered buffer, U8, of more than HEADER bytes.
    """

    def __init__(self, client: Client, name: str, digest: FramedDigest, room: np.ndarray) -> None:
        self._client, self._name, self._digest, self._room = client, name, digest, room
        self._at = HEADER
        """Up to where the entry is written."""
        self._filled = HEADER
        """Up to where the room is; its first bytes are the header's."""

    # Out.

    def send(self, views: Sequence[memoryview]) -> None:
        """Write the views' bytes one after another, and the header with the last of them."""
        for view in views:
            self._stage(view)
        self._room[:HEADER] = np.frombuffer(self._digest.header(), np.uint8)
        self._flush((self._room.ctypes.data, HEADER, 0))

    def _stage(self, view: memoryview) -> None:
        while len(view):
            piece = view[: self._room.size - self._filled]
            place = self._room[self._filled : self._filled + len(piece)]
            np.copyto(place, np.frombuffer(piece, np.uint8))
            self._digest.update(place)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._room.size:
                self._flush()

    def _flush(self, *more: tuple[int, int, int]) -> None:
        """Write what was staged, and more pieces with it."""
        pieces = list(more)
        if self._filled > HEADER:
            pieces.append((self._room.ctypes.data + HEADER, self._filled - HEADER, self._at))
        if pieces:
            self._client.write(self._name, pieces)
        self._at += self._filled - HEADER
        self._filled = HEADER

    # In.

    def receive(self, view: memoryview) -> bool | None:
        """Fill the view. False: header or digest do not hold; None: the entry is not there."""
        target = np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
        header, done = b"", 0
        while not header or done < len(view):
            skip = 0 if header else HEADER
            count = min(self._room.size - skip, len(view) - done)
            at = HEADER + done - skip
            if not self._client.read(self._name, [(self._room.ctypes.data, skip + count, at)]):
                return None
            header = header or bytes(self._room[:HEADER])
            piece = target[done : done + count]
            np.copyto(piece, self._room[skip : skip + count])
            self._digest.update(piece)
            done += count
        return header == self._digest.header()
