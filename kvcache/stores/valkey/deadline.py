"""How long a call may take, whatever comes over the wire meanwhile."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["SHARE", "Deadline"]

SHARE: Final = 1 << 22
"""Bytes."""


class Deadline:
    """``timeout`` seconds for a call, and as long again for each SHARE bytes that it moves."""

    def __init__(self, timeout: float, nbytes: int = 0) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self.allow(nbytes)

    def allow(self, nbytes: int) -> None:
        """The call will move so many bytes more."""
        self._end += self._timeout * nbytes / SHARE

    def left(self) -> float:
        """Seconds that the next step may take, at most ``timeout``. TimeoutError: none are left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return min(left, self._timeout)
