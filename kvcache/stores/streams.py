"""Bytes moved and digested in one pass: each block is hashed while it is in the processor's cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np

from kvcache.stores.buffers import WritableBuffer, as_writable
from kvcache.stores.digests import Digest
from kvcache.stores.errors import SnapshotCorruptError, StoreValueError
from kvcache.stores.manifest import Manifest

__all__ = ["BrokenEntryError", "BytesReader", "FileReader", "check_digest", "write_all", "write_digested"]

BLOCK = 1 << 19
"""Bytes; half of a common second-level cache."""
PIECES = 512
"""Buffers of one gathered write; systems allow 1024 and more."""


def write_digested(fd: int, parts: Sequence[memoryview], digest: Digest) -> None:
    """Write the parts one after another at the file's current position, and digest them."""
    for batch in _batches(parts):
        for piece in batch:
            digest.update(piece)
        write_all(fd, batch)


def read_digested(fd: int, views: Sequence[memoryview], digest: Digest) -> bool:
    """Fill the views one after another from the file's current position; False if the file ends too early."""
    for batch in _batches(views):
        if not _read_all(fd, batch):
            return False
        for piece in batch:
            digest.update(piece)
    return True


def _batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The parts' bytes in order, in batches of about BLOCK bytes, made of pieces of at most BLOCK bytes."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        for start in range(0, len(part), BLOCK):
            piece = part if len(part) <= BLOCK else part[start : start + BLOCK]
            batch.append(piece)
            size += len(piece)
            if size >= BLOCK or len(batch) == PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _read_all(fd: int, batch: Sequence[memoryview]) -> bool:
    wanted = sum(map(len, batch))
    while (count := os.readv(fd, batch)) < wanted:
        if not count:
            return False
        wanted -= count
        batch = _behind(batch, count)
    return True


def _behind(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """All but the first ``count`` bytes."""
    rest: list[memoryview] = []
    for piece in pieces:
        rest.append(piece[count:])
        count = max(0, count - len(piece))
    return rest


def write_all(fd: int, batch: list[memoryview]) -> None:
    """Write at most PIECES buffers."""
    while batch:
        count = os.writev(fd, batch)
        while batch and count >= len(batch[0]):
            count -= len(batch.pop(0))
        if batch and count:
            batch[0] = batch[0][count:]


class BrokenEntryError(SnapshotCorruptError):
    """An entry's file does not contain what was put."""


class FileReader:
    """An entry's bytes from its file: see ``kvcache.stores.protocol.Reader``.

    ``entry`` is the open file and its manifest, ``digest`` a fresh digest; ``guard(op)`` translates system
    errors; ``hit()`` is called after the last byte.
    """

    __slots__ = ("_digest", "_fd", "_guard", "_hit", "_manifest", "left")

    def __init__(
        self,
        entry: tuple[int, Manifest],
        digest: Digest,
        guard: Callable[[str], AbstractContextManager[None]],
        hit: Callable[[], None],
    ) -> None:
        self._fd, self._manifest = entry
        self.left = self._manifest.nbytes
        self._digest, self._guard, self._hit = digest, guard, hit

    _close = staticmethod(os.close)
    """Of the class: when the interpreter ends, the module's own names are None already."""

    def __del__(self) -> None:
        self.close()

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        views, wanted = writable_bytes(buffers, self.left)
        with self._guard("fill"):
            whole = read_digested(self._fd, views, self._digest)
        self.left -= wanted
        if not whole:
            raise BrokenEntryError(f"{self._manifest.nbytes} bytes were put, and fewer are there")
        if not self.left:
            check_digest(self._manifest, self._digest)
            self._hit()

    def close(self) -> None:
        fd, self._fd, self.left = getattr(self, "_fd", -1), -1, 0
        if fd >= 0:
            self._close(fd)


class BytesReader:
    """Constant bytes in memory: see ``kvcache.stores.protocol.Reader``.

    ``load`` is called for them before the first are returned.
    """

    __slots__ = ("_data", "_load", "left")

    def __init__(self, nbytes: int, load: Callable[[], np.ndarray]) -> None:
        self.left, self._load = nbytes, load
        self._data: np.ndarray | None = None

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        views, wanted = writable_bytes(buffers, self.left)
        if self._data is None:
            self._data = self._load()
        start = self._data.nbytes - self.left
        for view in views:
            if len(view):  # copied by NumPy, which releases the GIL
                np.copyto(np.frombuffer(view, np.uint8), self._data[start : start + len(view)])
            start += len(view)
        self.left -= wanted

    def close(self) -> None:
        self._data, self.left = np.empty(0, np.uint8), 0


def check_digest(manifest: Manifest, digest: Digest) -> None:
    if (now := digest.hexdigest()) != manifest.digest:
        raise BrokenEntryError(f"the digest of {manifest.key} is {now}, and was {manifest.digest}")


def writable_bytes(buffers: Sequence[WritableBuffer], left: int) -> tuple[list[memoryview], int]:
    """The buffers as flat views, and their total bytes. Raises StoreValueError for more than ``left``."""
    views = [as_writable(buffer, "fill") for buffer in buffers]
    wanted = sum(map(len, views))
    if wanted > left:
        raise StoreValueError(f"fill: {wanted} bytes; {left} are left")
    return views, wanted
