"""Bytes moved and digested in one pass: each block is hashed while the processor's cache holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from kvcache.stores.digests import Digest

__all__ = ["read_digested", "read_parts_digested", "write_all", "write_digested"]

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
