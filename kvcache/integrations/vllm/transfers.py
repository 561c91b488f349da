"""A worker's side: pages are loaded from stores into blocks, and saved from blocks to stores, between and
after passes. Threads load into blocks that vLLM has reserved for the request and does not read before the
load is reported. A save copies its blocks to host memory before the step ends, ordered with the device's
work, so vLLM may then reuse the blocks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from kvcache import StoreTier
from kvcache.integrations.open_stores import use_entry
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.pages import PageFormat
from kvcache.integrations.vllm.steps import PageLoad, PageSave, Report, Step
from kvcache.integrations.vllm.work import Workers
from kvcache.stores import SerializedSnapshot

__all__ = ["Copied", "DeviceBlocks", "Transfers"]

log = logging.getLogger("kvcache")

POLL = 0.001
"""The interval in seconds between checks for room."""
PATIENCE = 10.0
"""At shutdown, the seconds without progress after which a store is abandoned."""
IDLE = 0.002
"""Seconds that a step without computation waits for loads, since a busy loop would starve threads."""


class Copied(Protocol):
    """Blocks on their way to host memory."""

    arrays: Sequence[np.ndarray]
    """In the order of the page format; valid once ``ready``."""

    def ready(self) -> bool:
        """Whether the copy has finished."""


class DeviceBlocks(Protocol):
    """The blocks of vLLM's cache on this rank."""

    @property
    def pages(self) -> PageFormat:
        """The format of pages."""

    def gather(self, blocks: Sequence[int]) -> Copied:
        """Copy blocks, after all work queued on the device so far and before later work."""

    def follow(self) -> None:
        """Order later ``scatter`` calls after all work queued so far, since blocks may have been used by
        others.
        """

    def scatter(self, blocks: Sequence[int | None], arrays: Sequence[np.ndarray]) -> None:
        """Write a page's arrays into its blocks, except those that are None; complete on return."""


@dataclass(eq=False, slots=True)
class _Loading:
    """A request whose pages are being loaded."""

    request: str
    left: int
    failed: set[int] = field(default_factory=set)
    stopped: bool = False
    """A page was lost or the request has ended; the rest is not read."""
    ended: bool = False


class Transfers:
    """Loads in ``threads`` threads, each with one page in host memory; saves through the tier's own thread.

    At most ``tier.writes.backlog`` bytes of pages wait to be written (one page always may). Called by the
    thread that runs vLLM's steps.
    """

    def __init__(
        self,
        rank: int,
        blocks: DeviceBlocks,
        tier: StoreTier,
        workers: Workers,
        counters: Counters,
        save_wait: float = 0.0,
    ) -> None:
        self._rank, self._pages, self._blocks = rank, blocks.pages, blocks
        self._tier, self._workers, self._counters = tier, workers, counters
        self._save_wait = save_wait
        self._loading: dict[str, _Loading] = {}
        self._lock = threading.Lock()
        self._some_arrived = threading.Event()
        self._loaded: deque[_Loading] = deque()
        self._copying: deque[tuple[PageSave, Copied]] = deque()
        self._report = Report()
        self._invalid: set[int] = set()
        self._least = math.inf
        """Bytes left to write when closing last made progress."""

    # Loading.

    def load(self, step: Step) -> None:
        """Begin a step's loads, ordered after earlier passes, copies and fills of the same blocks."""
        if step.loads:
            self._blocks.follow()
        for request, pages in step.loads.items():
            loading = self._loading[request] = _Loading(request, len(pages))
            for page in pages:
                self._workers.submit(partial(self._load, loading, page))

    def _load(self, loading: _Loading, page: PageLoad) -> None:
        begun = time.perf_counter()
        well = False
        try:
            well = not loading.stopped and self._read(page)
        except Exception:
            log.exception("load: a page of %d tokens did not reach its blocks", self._pages.tokens)
        if well:
            self._counters.add("pages_loaded")
            self._counters.add("bytes_loaded", self._pages.nbytes)
        self._counters.add("load_seconds", time.perf_counter() - begun)
        with self._lock:
            if not well:
                loading.stopped = True
                loading.failed.update(block for block in page.blocks if block is not None)
            loading.left -= 1
            if not loading.left:
                self._loaded.append(loading)
                self._some_arrived.set()

    def _read(self, page: PageLoad) -> bool:
        def scatter(entry: SerializedSnapshot) -> bool:
            self._blocks.scatter(page.blocks, self._pages.unpack(page.begin, entry))
            return True

        if use_entry(self._tier, page.keys[self._rank], scatter):
            return True
        self._counters.add("pages_lost")
        return False

    def arrived(self, ended: set[str], idle: bool = False) -> set[str]:
        """Requests whose loads have ended since the last call, successfully or not; each once. ``ended`` are
        requests that vLLM has finished, whose remaining loads are cancelled. An ``idle`` step waits briefly
        for the first result.
        """
        for request in ended & self._loading.keys():
            self._loading[request].stopped = self._loading[request].ended = True
        if idle and self._loading:
            self._some_arrived.wait(IDLE)
        self._some_arrived.clear()
        done: set[str] = set()
        while self._loaded:
            loading = self._loaded.popleft()
            del self._loading[loading.request]
            done.add(loading.request)
            if loading.failed and not loading.ended:
                self._invalid |= loading.failed
                self._report.broken.add(loading.request)
        return done

    def invalid_blocks(self) -> set[int]:
        """Blocks of arrived requests that were not loaded; each reported once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    # Saving.

    def save(self, step: Step) -> None:
        """Copy and write the pages that a step has completed. Waits up to ``save_wait`` seconds for room."""
        until = time.monotonic() + self._save_wait
        for page in step.saves:
            if not self._has_room(until):
                self._report.postponed.add(page.keys[0])
                self._counters.add("pages_postponed")
                continue
            self._copying.append((page, self._blocks.gather(page.blocks)))
        self.settle()

    def _has_room(self, until: float) -> bool:
        while True:
            self.settle()
            pending = self._pending()
            if not pending or pending + self._pages.nbytes <= self._tier.writes.backlog:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(POLL)

    def _pending(self) -> int:
        return len(self._copying) * self._pages.nbytes + self._tier.writes.waiting

    def settle(self) -> None:
        """Pass finished copies to the writer, and record what was written."""
        while (
            self._copying and self._copying[0][1].ready() and self._tier.writes.has_room(self._pages.nbytes)
        ):
            page, copied = self._copying.popleft()
            packed = self._pages.pack(page.begin, copied.arrays)
            self._tier.write_later(page.keys[self._rank], packed, owner=page.keys[0])
        for write in self._tier.writes.finished():
            (self._report.failed if write.failed else self._report.stored).add(str(write.owner))
            self._counters.add("pages_refused" if write.failed else "pages_stored")
            if not write.failed:
                self._counters.add("bytes_stored", write.nbytes)

    def report(self) -> Report | None:
        """The results since the last call; None if there are none."""
        report, self._report = self._report, Report()
        return report if report else None

    def close(self) -> bool:
        """End the loads, and write everything copied. False if a store hangs and must not be closed. A slow
        store has ``PATIENCE`` seconds for each page. A second call waits only while there is progress.
        """
        for loading in [*self._loading.values()]:
            loading.stopped = True
        ended = self._workers.close(PATIENCE)
        until = 0.0
        while (pending := self._pending()) and (pending < self._least or time.monotonic() < until):
            if pending < self._least:
                self._least, until = pending, time.monotonic() + PATIENCE
            self.settle()
            time.sleep(POLL)
        self.settle()
        if pending:
            log.warning(
                "close: %d bytes were not written: a store did not answer within %g s", pending, PATIENCE
            )
        return self._tier.close(0.0 if pending else PATIENCE) and ended
