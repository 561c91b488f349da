"""Memory for serialized snapshots that are read: lent for a while, and used again once it was given back.

Fresh memory costs a page fault for every 4 KiB, as much time as the reading itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["Lender", "Loan"]

KEPT = 3
"""Buffers that wait for use: one serialized snapshot is read while another is put to use."""
LARGEST = 64 << 20
"""Bytes of the largest buffer that is kept."""


def _pageable(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class Lender:
    """Buffers between their uses. Called from any thread."""

    def __init__(self, allocate: Callable[[int], np.ndarray] = _pageable) -> None:
        """``allocate(nbytes)``: new memory, uint8 (nbytes,)."""
        self._allocate = allocate
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of ``nbytes`` or more, which holds anything: the caller's until it is put back."""
        with self._lock:
            for i in reversed(range(len(self._free))):  # the last one lies in the processor's cache, likely
                if self._free[i].size >= nbytes:
                    return self._free.pop(i)
        return self._allocate(nbytes)

    def put_back(self, buffer: np.ndarray) -> None:
        """Nobody looks at what is in it any more."""
        if buffer.size <= LARGEST:
            with self._lock:
                self._free = [*self._free, buffer][-KEPT:]


class Loan:
    """A serialized snapshot over lent memory, good until ``give_back``; ``serialized`` is None for none.

    What is never given back is never lent again: it is freed as any object is.
    """

    __slots__ = ("_buffer", "_lender", "serialized")

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._buffer: np.ndarray | None = None
        self.serialized: SerializedSnapshot | None = None

    def memory(self, nbytes: int) -> np.ndarray:
        """Memory of exactly ``nbytes`` bytes for the serialized snapshot, in place of what the loan had."""
        self.give_back()
        self._buffer = self._lender.take(nbytes)
        return self._buffer[:nbytes]

    def give_back(self) -> None:
        """The serialized snapshot is no longer looked at. A second call does nothing."""
        buffer, self._buffer, self.serialized = self._buffer, None, None
        if buffer is not None:
            self._lender.put_back(buffer)

    def __enter__(self) -> SerializedSnapshot | None:
        return self.serialized

    def __exit__(self, *raised: object) -> None:
        self.give_back()
