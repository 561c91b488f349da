"""Leaving a master alone for a while after it has failed to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcache.stores.back_off import BackOff
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
        self._reason = ""
        self._back_off: BackOff | None = None

    def admit(self, op: str) -> bool:
        """Whether this call is the one that tries again. StoreUnavailableError where it is not time yet."""
        with self._lock:
            if self._back_off is None:
                return False
            now = self._clock()
            if self._back_off.tries(now):
                return True
            left = self._back_off.until - now
            raise StoreUnavailableError(f"{op}: {self._reason}; next attempt in {left:.1f} s")

    def failed(self, reason: str) -> None:
        with self._lock:
            now = self._clock()
            self._back_off = self._back_off or BackOff(_FIRST, _LONGEST, now + _FIRST)
            self._back_off.failed(now)
            self._reason = reason

    def over(self) -> None:
        if self._back_off is not None:
            with self._lock:
                self._back_off = None
