"""Bytes moved and digested in one pass: each block is hashed while the processor's cache holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvcache.stores.buffers import WritableBuffer, as_writable
from kvcache.stores.digests import Digest
from kvcache.stores.errors import SnapshotCorruptError, StoreValueError
from kvcache.stores.manifest import Manifest

__all__ = ["FileReader", "VerifiedReader", "read_digested", "writable_bytes", "write_all", "write_digested"]

BLOCK = 1 << 19
"""Bytes; half of a common second-level cache."""
PIECES = 512
"""Buffers of one gathered write; systems allow 1024 and more."""


def write_digested(fd: int, parts: Sequence[memoryview], digest: Digest) -> None:
    """Write the parts one after another from where the file stands, and digest what is written."""
    for batch in _batches(parts):
        for piece in batch:
            digest.update(piece)
        write_all(fd, batch)


def read_digested(fd: int, view: memoryview, digest: Digest) -> int:
    """Fill ``view`` from where the file stands; the bytes read, which are fewer at the file's end."""
    done = 0
    while done < len(view):
        block = view[done : done + BLOCK]
        count = os.readv(fd, [block])
        if count == 0:
            break
        digest.update(block[:count])
        done += count
    return done


def read_parts_digested(fd: int, views: Sequence[memoryview], digest: Digest) -> bool:
    """Fill the views one after another from where the file stands; False where it ended before."""
    for batch in _batches(views):
        if not _read_all(fd, batch):
            return False
        for piece in batch:
            digest.update(piece)
    return True


def _batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The parts' bytes in order, some BLOCK of them at a time, in pieces of at most one."""
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


class FileReader:
    """See :class:`kvcache.stores.protocol.Reader`.

    ``digest`` is one that has seen no data yet; ``guard(op)`` makes the system's errors a store's; ``hit()``
    is called for the last byte.
    """

    __slots__ = ("_digest", "_fd", "_guard", "_hit", "_manifest", "left")

    def __init__(
        self,
        fd: int,
        manifest: Manifest,
        digest: Digest,
        guard: Callable[[str], AbstractContextManager[None]],
        hit: Callable[[], None],
    ) -> None:
        self.left = manifest.nbytes
        self._fd, self._manifest, self._digest, self._guard, self._hit = fd, manifest, digest, guard, hit

    def __del__(self) -> None:
        self.close()

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        views, wanted = writable_bytes(buffers, self.left)
        with self._guard("fill"):
            whole = read_parts_digested(self._fd, views, self._digest)
        self.left -= wanted
        if not whole:
            nbytes, key = self._manifest.nbytes, self._manifest.key
            raise SnapshotCorruptError(f"fill: {nbytes} bytes of {key} were put, and fewer are there")
        if not self.left:
            self._check()
            self._hit()

    def close(self) -> None:
        fd, self._fd, self.left = getattr(self, "_fd", -1), -1, 0
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        digest, manifest = self._digest.hexdigest(), self._manifest
        if digest != manifest.digest:
            raise SnapshotCorruptError(
                f"fill: the digest of {manifest.key} is {digest}, and was {manifest.digest}"
            )


class VerifiedReader:
    """See :class:`kvcache.stores.protocol.Reader`. Nothing is handed out before all of it was verified."""

    __slots__ = ("_data", "_source", "left")

    def __init__(self, source: FileReader) -> None:
        self.left, self._source = source.left, source
        self._data: memoryview | None = None

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        views, wanted = writable_bytes(buffers, self.left)
        if self._data is None:
            data = memoryview(bytearray(self.left))
            self._source.fill([data])
            self._source.close()
            self._data = data
        start = len(self._data) - self.left
        for view in views:
            view[:] = self._data[start : start + len(view)]
            start += len(view)
        self.left -= wanted

    def close(self) -> None:
        self._source.close()
        self._data, self.left = memoryview(b""), 0


def writable_bytes(buffers: Sequence[WritableBuffer], left: int) -> tuple[list[memoryview], int]:
    """The buffers as flat views, and how many bytes they are: StoreValueError for more than ``left``."""
    views = [as_writable(buffer, "fill") for buffer in buffers]
    wanted = sum(map(len, views))
    if wanted > left:
        raise StoreValueError(f"fill: {wanted} bytes; {left} are left")
    return views, wanted
