"""Memory that is registered with the transfer engine, so that the network reads and writes it in place."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvcache.stores.errors import StoreError

__all__ = ["Staging"]

Register = Callable[[int, int], int]
"""(address, bytes) -> 0, or the engine's code."""


class Staging:
    """Buffers of ``nbytes`` bytes, at most ``lanes``, each lent to one call."""

    def __init__(self, register: Register, unregister: Callable[[int], int], nbytes: int, lanes: int) -> None:
        self._register, self._unregister = register, unregister
        self._nbytes = nbytes
        self._free: queue.LifoQueue[np.ndarray | None] = queue.LifoQueue()
        self._made: list[np.ndarray] = []
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

    def close(self) -> None:
        """Unregister everything; no call may be under way."""
        with self._lock:
            for buffer in self._made:
                self._unregister(buffer.ctypes.data)
            self._made = []
