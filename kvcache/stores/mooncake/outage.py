"""Leaving a master alone for a while after it has failed to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcache.stores.errors import StoreUnavailableError

__all__ = ["Outage"]

_FIRST, _LONGEST = 1.0, 30.0
"""Seconds."""


class Outage:
    """After a failure calls are refused at once: for a second, after the next for two, up to half a minute.

    When that time is over one call is let through to try; the others are refused until it has answered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._wait = _FIRST
        self._until = 0.0

    def admit(self, op: str) -> bool:
        """Whether this call is the one that tries again. StoreUnavailableError where it is not time yet."""
        with self._lock:
            if self._reason is None:
                return False
            left = self._until - self._clock()
            if left > 0:
                raise StoreUnavailableError(f"{op}: {self._reason}; next attempt in {left:.1f} s")
            self._until = self._clock() + self._wait
            return True

    def failed(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                self._wait = min(2 * self._wait, _LONGEST)
            self._reason = reason
            self._until = self._clock() + self._wait

    def over(self) -> None:
        if self._reason is not None:
            with self._lock:
                self._reason, self._wait = None, _FIRST
