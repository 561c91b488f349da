"""Unreachable stores, which are left alone for a while, and full stores; each is logged once."""

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
"""The seconds that a store is left alone after a first failure, and the most after further ones."""


@dataclass(slots=True)
class _Outage:
    """No call is made before ``until``, and then only one; if it fails, ``wait`` doubles, up to ``LONGEST``.

    Failures of calls that were already in progress when the first one failed are not counted.
    """

    since: float
    until: float
    wait: float = FIRST
    trying: bool = False
    spared: int = 0

    def tries(self, now: float) -> bool:
        """Whether this call is the one that tries again; others are skipped until it has answered, or for
        ``LONGEST``.
        """
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
    """The size of the smallest serialized snapshot that did not fit."""
    refused: int = 0


class Outages:
    """Which stores to call. Reading and writing are tracked separately: a folder may be read-only.

    During an outage, a store is called once per interval; intervals double from ``FIRST`` to ``LONGEST``
    seconds. Thread-safe.
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
        """Whether it is currently left alone; this query is not an attempt."""
        with self._lock:
            outage = self._out.get((id(store), way))
            return outage is not None and self._clock() < outage.until

    def ask_again(self) -> None:
        """Call every store again at the next opportunity, regardless of intervals."""
        with self._lock:
            for outage in self._out.values():
                outage.until = min(outage.until, self._clock())

    def failed(self, store: object, way: str, error: StoreUnavailableError) -> None:
        """A call failed; each outage is logged once."""
        with self._lock:
            said = any((id(store), other) in self._out for other in (READING, WRITING))
            now = self._clock()
            self._out.setdefault((id(store), way), _Outage(now, now + FIRST)).failed(now)
        if said:
            return
        if isinstance(error, StoreReadOnlyError):
            log.warning("a store is read-only: %s; it keeps no new content", error)
            return
        if error.lasting:
            log.warning("a store is gone: %s; until then, its content is computed again", error)
            return
        log.warning(
            "a store cannot be reached: %s; its content is computed again. The next attempt is in %.1f s, "
            "and then again at intervals of up to %.0f s",
            error,
            FIRST,
            LONGEST,
        )

    def full(self, store: object, nbytes: int, error: StoreFullError) -> None:
        """It had no room for a serialized snapshot of ``nbytes``; logged once until it has room again."""
        with self._lock:
            full = self._full.setdefault(id(store), _Full(self._clock(), nbytes))
            full.nbytes, full.refused = min(nbytes, full.nbytes), full.refused + 1
        if full.refused == 1:
            log.warning("a store is full: %s; content that it does not accept is computed again", error)

    def took(self, store: object, nbytes: int) -> None:
        """It has accepted an entry of ``nbytes``; if an entry of that size was refused before, it has room
        again.
        """
        if not self._full:
            return
        with self._lock:
            full = self._full.get(id(store))
            if full is None or nbytes < full.nbytes:
                return
            del self._full[id(store)]
            now = self._clock()
        log.warning(
            "a store has room again after %.1f s: %r; it refused %d serialized snapshots in the meantime",
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
                "a store is %s again after %.1f s: %r; %d calls were skipped in the meantime",
                way,
                now - outage.since,
                store,
                outage.spared,
            )
