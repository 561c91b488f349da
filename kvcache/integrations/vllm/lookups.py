"""Lookups of prefixes in stores by threads, so that a scheduler does not wait for a slow store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache import StoreTier
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.work import Workers

__all__ = ["Lookups", "PageKeys", "stored_pages"]

log = logging.getLogger("kvcache")

PageKeys = Sequence[Sequence[str]]
"""By rank, the keys of a chain's pages, in order."""


def stored_pages(tier: StoreTier, keys: PageKeys) -> int:
    """The number of leading pages that are stored for every rank."""
    count = min(map(len, keys))
    for own in keys:
        count = tier.prefix(own[:count]) if count else 0
    return count


@dataclass(slots=True)
class _Lookup:
    tokens: int
    asked: float
    done: threading.Event = field(default_factory=threading.Event)
    pages: int = 0


class Lookups:
    """One lookup per request, kept until it is dropped or the request's tokens change. The first call waits
    ``wait`` seconds; later ones do not wait. A lookup that takes longer than ``timeout`` seconds is a miss.
    Called only by the scheduler's thread.
    """

    def __init__(
        self,
        count: Callable[[PageKeys], int],
        workers: Workers,
        wait: float,
        timeout: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._workers, self._counters, self._clock = count, workers, counters, clock
        self._wait, self._timeout = wait, timeout
        self._lookups: dict[str, _Lookup] = {}

    def pages(self, request: str, tokens: int, keys: Callable[[], PageKeys]) -> int | None:
        """The number of stored leading pages of a request with ``tokens`` tokens; None: not known yet."""
        lookup = self._lookups.get(request)
        if lookup is None or lookup.tokens != tokens:
            self.forget(request)
            lookup = self._lookups[request] = _Lookup(tokens, self._clock())
            self._counters.add("lookups")
            self._workers.submit(self._job(lookup, keys()))
            lookup.done.wait(self._wait)
        if lookup.done.is_set():
            return lookup.pages
        if self._clock() - lookup.asked >= self._timeout:
            self._counters.add("lookups_timed_out")
            log.warning("lookup: no answer in %.3g s; the prompt is computed instead", self._timeout)
            self.forget(request)
            self._lookups[request] = late = _Lookup(tokens, lookup.asked)
            late.done.set()
            return 0
        return None

    def forget(self, request: str) -> None:
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            lookup.done.set()

    def _job(self, lookup: _Lookup, keys: PageKeys) -> Callable[[], None]:
        def look() -> None:
            if lookup.done.is_set():  # no longer needed
                return
            try:
                lookup.pages = self._count(keys)
            finally:
                lookup.done.set()

        return look
