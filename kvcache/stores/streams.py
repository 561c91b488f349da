"""Bytes moved and digested in one pass: each block is hashed while the processor's cache holds it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kvcache.stores.errors import StoreUnavailable

__all__ = ["DIGEST", "digest_of", "load_xxhash", "read_digested", "write_digested"]

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
    batch: list[memoryview] = []
    size = 0
    for piece in _pieces(parts):
        digest.update(piece)
        batch.append(piece)
        size += len(piece)
        if size >= BLOCK or len(batch) == PIECES:
            _write_all(fd, batch)
            batch, size = [], 0
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


def digest_of(view: memoryview) -> str:
    return str(load_xxhash().xxh3_128(view).hexdigest())


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), BLOCK):
            yield part[start : start + BLOCK]


def _write_all(fd: int, batch: list[memoryview]) -> None:
    while batch:
        count = os.writev(fd, batch)
        while batch and count >= len(batch[0]):
            count -= len(batch.pop(0))
        if batch and count:
            batch[0] = batch[0][count:]
