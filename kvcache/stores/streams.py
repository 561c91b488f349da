"""Bytes moved and digested in one pass: each block is hashed while the processor's cache holds it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kvcache.stores.errors import StoreUnavailable

__all__ = ["DIGEST", "DigestedReader", "digest_of", "load_xxhash", "read_digested", "write_digested"]

DIGEST = "xxh3_128"
BLOCK = 1 << 19
"""Bytes; half of a common second-level cache."""
PIECES = 512
"""Buffers of one gathered write; systems allow 1024 and more."""


def load_xxhash() -> Any:
    """The module ``xxhash``. StoreUnavailable, naming the extra, where it is not installed."""
    try:
        return importlib.import_module("xxhash")
    except ImportError as error:
        raise StoreUnavailable(
            f"FileStore: its digests need the package xxhash ({error}); pip install 'ml-kvcache[disk]'"
        ) from error


def write_digested(fd: int, parts: Sequence[memoryview]) -> str:
    """Write the parts one after another from where the file stands; the digest of what was written."""
    digest = load_xxhash().xxh3_128()
    for batch in _batches(parts):
        for piece in batch:
            digest.update(piece)
        _write_all(fd, batch)
    return str(digest.hexdigest())


def read_digested(fd: int, view: memoryview) -> tuple[int, str]:
    """Fill ``view`` from where the file stands; the bytes read, fewer at the file's end, and their digest."""
    digest = load_xxhash().xxh3_128()
    done = 0
    while done < len(view):
        block = view[done : done + BLOCK]
        count = os.readv(fd, [block])
        if count == 0:
            break
        digest.update(block[:count])
        done += count
    return done, str(digest.hexdigest())


class DigestedReader:
    """Reads a file on from where it stands, and digests what it has read so far."""

    __slots__ = ("_digest", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._digest = load_xxhash().xxh3_128()

    def fill(self, views: Sequence[memoryview]) -> bool:
        """Fill the views one after another; False where the file ended before."""
        for batch in _batches(views):
            if not _read_all(self._fd, batch):
                return False
            for piece in batch:
                self._digest.update(piece)
        return True

    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())


def digest_of(view: memoryview) -> str:
    return str(load_xxhash().xxh3_128(view).hexdigest())


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


def _write_all(fd: int, batch: list[memoryview]) -> None:
    while batch:
        count = os.writev(fd, batch)
        while batch and count >= len(batch[0]):
            count -= len(batch.pop(0))
        if batch and count:
            batch[0] = batch[0][count:]
