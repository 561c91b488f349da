"""Calls in flight: closing waits for them, so that no file descriptor is closed beneath one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvcache.stores.errors import StoreClosedError

__all__ = ["InFlightCalls"]


class InFlightCalls:
    """Counts calls; after :meth:`close` there are none, and no more begin."""

    def __init__(self) -> None:
        self._under_way = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def running(self, op: str) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{op}: this store is closed")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Wait for the calls under way. True for the first caller, who then lets go of everything."""
        with self._changed:
            first = not self._closed
            self._closed = True
            self._changed.wait_for(lambda: self._under_way == 0)
            return first
