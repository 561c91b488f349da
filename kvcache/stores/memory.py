"""A store in host memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable, check_size
from kvcache.stores.closing import Closing
from kvcache.stores.errors import StoreClosedError, StoreFullError
from kvcache.stores.protocol import Reader, Stat, Usage, check_budget, check_key, check_keys
from kvcache.stores.streams import BytesReader

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Entry:
    data: np.ndarray  # U8 (nbytes,), read-only
    last_used: float


class MemoryStore(Closing):
    """Entries in host memory. Beyond ``budget``, a number of bytes or a size such as ``"2GiB"``, the
    least recently used are evicted.

    >>> from kvcache.stores import MemoryStore
    >>> with MemoryStore(budget=1 << 20) as store:
    ...     store.put("greeting", [b"hello ", b"world"])
    ...     buffer = bytearray(store.stat(["greeting"])[0].nbytes)
    ...     store.get_into("greeting", buffer)
    ...     bytes(buffer)
    True
    True
    b'hello world'
    """

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = check_budget(budget)
        self._entries: OrderedDict[str, _Entry] | None = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._pending = 0
        """Bytes being copied, for which room has been made."""
        self._evicted = 0
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)

    def __repr__(self) -> str:
        if self._entries is None:
            return "<MemoryStore, closed>"
        limit = "" if self.budget is None else f" of {self.budget:,}"
        return f"<MemoryStore: {len(self._entries)} entries, {self._nbytes:,}{limit} bytes>"

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        views, nbytes = as_parts(parts)
        with self._lock:
            if key in self._open("put"):
                return False
            if self.budget is not None and nbytes > self.budget:
                raise StoreFullError(f"put: {nbytes} bytes; the budget of this store is {self.budget}")
            self._make_room(nbytes)
            self._pending += nbytes
        try:
            data = _joined(views, nbytes)
            with self._lock:
                entries = self._open("put")
                if key in entries:
                    return False
                entries[key] = _Entry(data, time.time())
                self._nbytes += nbytes
                return True
        finally:
            with self._lock:
                self._pending -= nbytes
                self._written.notify_all()

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        check_keys(keys)
        with self._lock:
            entries = self._open("stat")
            kept = [entries.get(key) for key in keys]
            return [None if entry is None else Stat(entry.data.nbytes, entry.last_used) for entry in kept]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        view = as_writable(buffer, "get_into")
        data = self._hit(key, "get_into")
        if data is None:
            return False
        check_size("get_into", view, key, data.nbytes)
        if data.nbytes:
            np.copyto(np.frombuffer(view, np.uint8), data)  # with the interpreter's lock released
        return True

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes, read-only and without a copy; None if there is no such entry. Counts as a hit.

        The view stays valid after the entry is evicted, and keeps its memory from being freed.
        """
        data = self._hit(key, "view")
        return None if data is None else data.data

    def reader(self, key: str) -> Reader | None:
        """See ``kvcache.stores.protocol.ReadingStore``."""
        data = self._hit(key, "reader")
        return None if data is None else BytesReader(data.nbytes, lambda: data)

    def prefix(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        with self._lock:
            entries = self._open("prefix")
            count = next((i for i, key in enumerate(keys) if key not in entries), len(keys))
            for key in reversed(keys[:count]):
                self._touch(entries, key)
            return count

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            entry = self._open("delete").pop(key, None)
            if entry is not None:
                self._nbytes -= entry.data.nbytes
            return entry is not None

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._open("usage")), self._nbytes, self.budget, self._evicted)

    def close(self) -> None:
        with self._lock:
            self._entries = None

    def _open(self, op: str) -> OrderedDict[str, _Entry]:
        if self._entries is None:
            raise StoreClosedError(f"{op}: this store is closed")
        return self._entries

    def _hit(self, key: str, op: str) -> np.ndarray | None:
        check_key(key)
        with self._lock:
            entries = self._open(op)
            if key not in entries:
                return None
            self._touch(entries, key)
            return entries[key].data

    @staticmethod
    def _touch(entries: OrderedDict[str, _Entry], key: str) -> None:
        entries.move_to_end(key)
        entries[key].last_used = time.time()

    def _make_room(self, nbytes: int) -> None:
        """Evict entries for ``nbytes`` more; if necessary, wait for copies of other threads to end."""
        if self.budget is None:
            return
        self._written.wait_for(lambda: self._pending + nbytes <= (self.budget or 0))
        entries = self._open("put")
        while self._nbytes + self._pending + nbytes > self.budget:
            _, evicted = entries.popitem(last=False)
            self._nbytes -= evicted.data.nbytes
            self._evicted += 1


def _joined(views: Sequence[memoryview], nbytes: int) -> np.ndarray:
    data = np.empty(nbytes, np.uint8)
    start = 0
    for view in views:
        if len(view):
            np.copyto(data[start : start + len(view)], np.frombuffer(view, np.uint8))
        start += len(view)
    data.flags.writeable = False
    return data
