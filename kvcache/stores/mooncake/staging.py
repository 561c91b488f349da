"""Memory that is registered with the transfer engine, so that the network reads and writes it in place."""

from __future__ import annotations

import bisect
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvcache.stores.errors import StoreError, StoreValueError

__all__ = ["Staging", "address"]

Register = Callable[[int, int], int]
"""(address, bytes) -> 0, or the engine's code."""


def address(view: memoryview | np.ndarray) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


class Staging:
    """Buffers of ``nbytes`` bytes, at most ``lanes``, each lent to one call; and memory of the caller's."""

    def __init__(self, register: Register, unregister: Callable[[int], int], nbytes: int, lanes: int) -> None:
        self._register, self._unregister = register, unregister
        self._nbytes = nbytes
        self._free: queue.LifoQueue[np.ndarray | None] = queue.LifoQueue()
        self._made: list[np.ndarray] = []
        self._own: list[tuple[int, int, np.ndarray]] = []  # (begin, end, what keeps it alive), sorted
        self._lock = threading.Lock()
        for _ in range(lanes):
            self._free.put(None)

    @contextlib.contextmanager
    def lent(self) -> Iterator[np.ndarray]:
        """A registered buffer, U8 (nbytes,), for as long as the block lasts; waits where all are out."""
        buffer = self._free.get()
        try:
            if buffer is None:
                buffer = self._make()
            yield buffer
        finally:
            self._free.put(buffer)

    def _make(self) -> np.ndarray:
        buffer = np.full(self._nbytes, 0, np.uint8)  # written to, so that its pages are there
        if code := self._register(buffer.ctypes.data, buffer.nbytes):
            raise StoreError(f"mooncake: a buffer of {self._nbytes} bytes could not be registered ({code})")
        with self._lock:
            self._made.append(buffer)
        return buffer

    def add(self, view: memoryview) -> None:
        """Register memory of the caller's. StoreValueError where some of it is registered already."""
        begin, end = address(view), address(view) + len(view)
        with self._lock:
            if begin == end or any(other[0] < end and begin < other[1] for other in self._own):
                why = "it has no bytes" if begin == end else "some of it is registered already"
                raise StoreValueError(f"register: a buffer of {len(view)} bytes: {why}")
            if code := self._register(begin, len(view)):
                raise StoreError(f"register: the engine refused a buffer of {len(view)} bytes ({code})")
            bisect.insort(self._own, (begin, end, np.frombuffer(view, np.uint8)), key=lambda own: own[0])

    def covers(self, view: memoryview) -> bool:
        if not self._own or not len(view):
            return False
        begin = address(view)
        with self._lock:
            at = bisect.bisect_right(self._own, begin, key=lambda entry: entry[0]) - 1
            return at >= 0 and begin + len(view) <= self._own[at][1]

    def close(self) -> None:
        """Unregister everything; no call may be under way."""
        with self._lock:
            for begin in (*(entry[0] for entry in self._own), *(buffer.ctypes.data for buffer in self._made)):
                self._unregister(begin)
            self._own, self._made = [], []
