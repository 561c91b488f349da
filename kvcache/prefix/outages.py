"""Stores that cannot be reached, which are not asked for a while, and stores that are full: told once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.stores.errors import StoreFullError, StoreReadOnlyError, StoreUnavailableError

__all__ = ["READING", "WRITING", "Outages"]

log = logging.getLogger("kvcache")

READING, WRITING = "read", "written"
FIRST, LONGEST = 0.5, 30.0
"""Seconds that a store is left alone after a first failure, and at most."""


@dataclass(slots=True)
class _Outage:
    """Nothing is tried before ``until``, then one call; if it fails, the ``wait`` doubles, up to ``LONGEST``.

    A failure of calls that were under way already when the first one failed counts for nothing.
    """

    since: float
    until: float
    wait: float = FIRST
    trying: bool = False
    spared: int = 0

    def tries(self, now: float) -> bool:
        """Whether a call is the one that tries again; others wait until it has answered, or ``LONGEST``."""
        if now < self.until:
            return False
        self.until, self.trying = now + LONGEST, True
        return True

    def failed(self, now: float) -> None:
        if self.trying:
            self.wait, self.trying = min(2 * self.wait, LONGEST), False
            self.until = now + self.wait


@dataclass(slots=True)
class _Full:
    since: float
    nbytes: int
    """The smallest serialized snapshot that found no room."""
    refused: int = 0


class Outages:
    """Which stores to ask. Reading and writing fail apart: a folder may be one that is only read.

    While a store is out, one call in each interval asks it; they double from ``FIRST`` to ``LONGEST``
    seconds. Called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._out: dict[tuple[int, str], _Outage] = {}
        self._full: dict[int, _Full] = {}
        self._lock = threading.Lock()

    def asks(self, store: object, way: str) -> bool:
        if not self._out:
            return True
        with self._lock:
            outage = self._out.get((id(store), way))
            if outage is None or outage.tries(self._clock()):
                return True
            outage.spared += 1
            return False

    def away(self, store: object, way: str) -> bool:
        """Whether it is left alone at present; asking this is no attempt."""
        with self._lock:
            outage = self._out.get((id(store), way))
            return outage is not None and self._clock() < outage.until

    def ask_again(self) -> None:
        """Ask every store at the next call, however long it was to be left alone."""
        with self._lock:
            for outage in self._out.values():
                outage.until = min(outage.until, self._clock())

    def failed(self, store: object, way: str, error: StoreUnavailableError) -> None:
        """It could not be reached. One line of the log for each outage."""
        with self._lock:
            said = any((id(store), other) in self._out for other in (READING, WRITING))
            now = self._clock()
            self._out.setdefault((id(store), way), _Outage(now, now + FIRST)).failed(now)
        if said:
            return
        if isinstance(error, StoreReadOnlyError):
            log.warning("a store is read-only: %s; new content is not kept there", error)
            return
        log.warning(
            "a store cannot be reached: %s; its content is computed again. The next attempt is in %.1f s, "
            "and then again at intervals of up to %.0f s",
            error,
            FIRST,
            LONGEST,
        )

    def full(self, store: object, nbytes: int, error: StoreFullError) -> None:
        """It had no room for a serialized snapshot of ``nbytes``. One line of the log, until it has."""
        with self._lock:
            full = self._full.setdefault(id(store), _Full(self._clock(), nbytes))
            full.nbytes, full.refused = min(nbytes, full.nbytes), full.refused + 1
        if full.refused == 1:
            log.warning("a store is full: %s; content that it does not accept is computed again", error)

    def took(self, store: object, nbytes: int) -> None:
        """It has taken an entry of ``nbytes``. As large as one that it had no room for: it has room again."""
        if not self._full:
            return
        with self._lock:
            full = self._full.get(id(store))
            if full is None or nbytes < full.nbytes:
                return
            del self._full[id(store)]
            now = self._clock()
        log.warning(
            "a store has room again after %.1f s: %r; %d serialized snapshots were not kept there meanwhile",
            now - full.since,
            store,
            full.refused,
        )

    def worked(self, store: object, way: str) -> None:
        if not self._out:
            return
        with self._lock:
            outage = self._out.pop((id(store), way), None)
            now = self._clock()
        if outage is not None:
            log.warning(
                "a store is %s again after %.1f s: %r; %d calls were skipped meanwhile",
                way,
                now - outage.since,
                store,
                outage.spared,
            )
