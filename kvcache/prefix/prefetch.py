"""Reading entries of stores in advance for waiting prompts, into a limited amount of host memory.

Threads look up a prompt and read its entries in order; they end when there is nothing left to do. Look-ups
come first, so that a prompt without stored entries never waits for the entries of another. An entry that
several prompts share is read once. When a prompt's turn comes, the entries that have not been read yet are
left to the restoring thread. If bytes go directly from the stores into the cache, nothing is held here, and
the stores are told what will be read soon (``AdvisedStore``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.prefix.tiers import Loan, LookUp, StoreTier
from kvcache.stores.keys import Chain
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["Prefetch", "Prefetcher"]

log = logging.getLogger("kvcache")

WORKERS = 2
"""The number of threads: one reads the next entry while the other digests the previous one."""


@dataclass(eq=False, slots=True)
class _Page:
    """An entry that has been read, or is being read (``loan`` is None)."""

    loan: Loan | None = None
    begin: int = 0
    nbytes: int = 0
    users: int = 1
    refused: int = -1
    """The count of freed space when there was no space for it; -1 if there was space."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """The entries read ahead for one prompt. They occupy host memory until ``release``."""

    owner: Prefetcher
    chain: Chain
    floor: int
    limit: int
    divisible: bool
    found: LookUp | None = None
    ends: deque[tuple[int, int]] = field(default_factory=deque)
    """(end, end of the previous entry) of the entries that are still to be read, in order."""
    pages: list[tuple[str, _Page]] = field(default_factory=list)
    """The other entries, by key."""
    busy: int = 0
    """The number of threads working on it."""
    users: int = 1
    over: bool = False
    """Whether nothing more is started for it."""
    waits: bool = False
    """Whether it waits for others to release space."""

    @property
    def done(self) -> bool:
        """Whether it is complete: it has everything that the stores have, or as much as there is space
        for.
        """
        return self.owner.is_done(self)

    def wait(self) -> None:
        """Wait until it is done; blocks as long as others hold the space that it needs."""
        self.owner.wait(self)

    def release(self) -> None:
        """Release what was read. Call it once for each ``start``."""
        self.owner.release(self)


class Prefetcher:
    """Reads ahead from the stores of a tier; held entries take at most ``limit`` bytes.

    ``start``, ``release`` and the methods that return entries are thread-safe. A store that fails counts as a
    miss.
    """

    def __init__(self, tier: StoreTier, limit: int, begin_of: Callable[[SerializedSnapshot], int]) -> None:
        """``begin_of`` returns the position at which an entry begins, or raises SnapshotCorruptError."""
        self.limit = limit
        self.nbytes = 0
        """Bytes that are held or about to be read."""
        self.read = 0
        """The number of entries read."""
        self._freed = 0
        """How often space was freed."""
        self._tier, self._begin_of = tier, begin_of
        self._known: dict[str, Prefetch] = {}
        """Prompts by the key of the whole prompt."""
        self._queue: deque[Prefetch] = deque()
        self._pages: dict[str, _Page] = {}
        self._threads: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self._closed = False

    # For waiting prompts.

    def start(self, chain: Chain, floor: int, limit: int, divisible: bool) -> Prefetch:
        """Look up the longest stored prefix in (floor, limit], and read what follows ``floor``."""
        key = chain.at(limit)
        with self._changed:
            running = self._known.get(key)
            if running is not None and running.floor <= floor:
                running.users += 1
                return running
            made = Prefetch(self, chain, floor, limit, divisible, over=self._closed)
            if not self._closed:
                self._known[key] = made
                self._queue.append(made)
                self._wake()
            return made

    def is_done(self, prefetch: Prefetch) -> bool:
        with self._changed:
            settled = prefetch.over or (prefetch.found is not None and not prefetch.ends)
            return settled and not prefetch.busy

    def wait(self, prefetch: Prefetch) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_done(prefetch))

    def release(self, prefetch: Prefetch) -> None:
        with self._changed:
            prefetch.users -= 1
            if prefetch.users:
                return
            self._leave_queue(prefetch)
            key = prefetch.chain.at(prefetch.limit)
            if self._known.get(key) is prefetch:
                del self._known[key]
            self._let_go(prefetch)
            self._wake()
            self._changed.notify_all()

    def clear(self) -> None:
        """Release everything that was read or is being read; waiting prompts are looked up again."""
        with self._changed:
            for prefetch in [*self._queue]:
                self._leave_queue(prefetch)
            self._known.clear()
            pages, self._pages = self._pages, {}
            for key, page in pages.items():
                page.users = 0  # one that is being read is released when it arrives
                if page.loan is not None:
                    self._drop(key, page)
            self._changed.notify_all()

    def close(self) -> None:
        """Start nothing more, wait for reads in progress, and release all entries."""
        with self._changed:
            self._closed = True
            for prefetch in [*self._known.values(), *self._queue]:
                self._leave_queue(prefetch)
            self._changed.wait_for(lambda: not self._threads)
            for page in self._pages.values():
                if page.loan is not None:
                    page.loan.give_back()
            self._pages.clear()
            self._known.clear()
            self.nbytes = 0

    # For prompts whose turn has come.

    def look_up(self, chain: Chain, floor: int, limit: int) -> LookUp | None:
        """What stores have of ``[0, limit)``, if that has been looked up; nothing further is read.

        None if it was not requested, or not directly after ``floor``.
        """
        with self._changed:
            prefetch = self._known.get(chain.at(limit))
            if prefetch is None or prefetch.floor > floor:
                return None
            self._leave_queue(prefetch)
            if prefetch.found is None:
                self._changed.wait_for(lambda: not prefetch.busy)
            if prefetch.found is None:
                return None
            stored, spared = prefetch.found
            best = max(stored, floor)
            return LookUp(best, max(0, stored + spared - best))

    def page(self, key: str) -> SerializedSnapshot | None:
        """An entry that was read, valid until it is released; waits if it is being read."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._pages or self._pages[key].loan is not None)
            page = self._pages.get(key)
            return None if page is None or page.loan is None else page.loan.serialized

    # The threads.

    def _wake(self) -> None:
        """Start as many threads as allowed; threads without work end."""
        while self._queue and len(self._threads) < WORKERS:
            thread = threading.Thread(target=self._work, name="kvcache-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system cannot start another thread
                log.info("prefetch: %s; waiting prefixes are read when their turn comes", error)
                for prefetch in () if self._threads else [*self._queue]:
                    self._leave_queue(prefetch)
                self._changed.notify_all()
                return
            self._threads.add(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next()
                if job is None:
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
            try:
                job()
            except Exception:  # errors of stores are handled by their tier; this is a different error
                log.exception("prefetch: waiting prefixes are read when their turn comes")

    def _next(self) -> Callable[[], None] | None:
        for prefetch in self._queue:
            if prefetch.found is None and not prefetch.busy:
                prefetch.busy += 1
                return lambda: self._look(prefetch)
        for prefetch in list(self._queue):
            if prefetch.waits:  # later entries would take the space that it waits for
                return None
            taken = self._next_entry(prefetch)
            if taken is not None or prefetch in self._queue:  # it is still being read, and may need the space
                return taken
        return None

    def _next_entry(self, prefetch: Prefetch) -> Callable[[], None] | None:
        """The next entry of a prompt that is not being read; None if there is none, or it must wait."""
        while prefetch.ends:
            end, before = prefetch.ends[0]
            key = prefetch.chain.at(end)
            page = self._pages.get(key)
            if page is None:
                prefetch.ends.popleft()
                self._pages[key] = page = _Page()
                prefetch.pages.append((key, page))
                prefetch.busy += 1
                return lambda: self._fetch(prefetch, key, page, end, before)
            if page.loan is None:
                return None
            prefetch.ends.popleft()
            prefetch.pages.append((key, page))
            page.users += 1
            self._lead_to(prefetch, page, before)
        if not prefetch.busy and prefetch.found is not None:
            self._leave_queue(prefetch)
        return None

    def _look(self, prefetch: Prefetch) -> None:
        answer: LookUp | None = None
        try:
            answer = self._tier.look_up(prefetch.chain, prefetch.floor, prefetch.limit, prefetch.divisible)
            if self._tier.reads_straight and answer.stored > prefetch.floor:
                self._tier.advise([prefetch.chain.at(end) for end, _ in self._ends(prefetch, answer.stored)])
        finally:
            with self._changed:
                prefetch.busy -= 1
                prefetch.found = answer
                if answer is None or self._tier.reads_straight:
                    self._leave_queue(prefetch)
                elif not prefetch.over and answer.stored > prefetch.floor:
                    prefetch.ends.extend(self._ends(prefetch, answer.stored))
                self._wake()
                self._changed.notify_all()

    @staticmethod
    def _ends(prefetch: Prefetch, stored: int) -> list[tuple[int, int]]:
        """The ends of entries: each multiple of the block size, if content is divisible, and the last one."""
        if not prefetch.divisible:
            return [(stored, prefetch.floor)]
        size = prefetch.chain.block_size
        first = prefetch.floor - prefetch.floor % size + size
        ends = [*range(first, stored, size), stored]
        return list(zip(ends, [prefetch.floor, *ends], strict=False))

    def _fetch(self, prefetch: Prefetch, key: str, page: _Page, end: int, before: int) -> None:
        loan: Loan | None = None
        try:
            loan = self._tier.read(key, lambda nbytes: self._reserve(page, nbytes))
            if loan.serialized is not None:
                page.begin = self._begin_of(loan.serialized)
        except Exception as error:
            # The restoring thread will find out what is wrong and handle it.
            log.info("prefetch: %s", error)
            if loan is not None:
                loan.give_back()
        with self._changed:
            prefetch.busy -= 1
            if loan is None or loan.serialized is None:
                self._give_up(prefetch, key, page, end, before)
            else:
                page.loan = loan
                self.read += 1
                self._lead_to(prefetch, page, before)
                if page.users <= 0:
                    self._drop(key, page)
            self._wake()
            self._changed.notify_all()

    def _lead_to(self, prefetch: Prefetch, page: _Page, before: int) -> None:
        """If an entry begins after the end of the previous one, other entries lead to it."""
        if page.begin > before and not prefetch.over:
            prefetch.ends.appendleft((page.begin, before))

    def _give_up(self, prefetch: Prefetch, key: str, page: _Page, end: int, before: int) -> None:
        """An entry is missing, or there is no space for it: stop reading, or wait for space."""
        self._drop(key, page)
        if prefetch.over:
            return
        prefetch.pages.remove((key, page))
        refused = page.refused >= 0
        if refused and (page.refused < self._freed or len(self._pages) > len(prefetch.pages)):
            prefetch.ends.appendleft((end, before))
            prefetch.waits = page.refused == self._freed
            return
        prefetch.ends.clear()
        if refused or prefetch.found is None:
            return
        if prefetch.divisible:  # it does not extend the previous entry
            prefetch.found = LookUp(min(prefetch.found.stored, before), prefetch.found.spared)
        else:  # another entry may exist, which is looked up when its turn comes
            prefetch.found = None
            self._leave_queue(prefetch)

    # With the lock held.

    def _reserve(self, page: _Page, nbytes: int) -> bool:
        """Reserve space for an entry; returns whether there was enough. Takes the lock."""
        with self._changed:
            self.nbytes -= page.nbytes
            fits = self.nbytes + nbytes <= self.limit and page.users > 0
            page.refused, page.nbytes = (-1, nbytes) if fits else (self._freed, 0)
            self.nbytes += page.nbytes
            return fits

    def _let_go(self, prefetch: Prefetch) -> None:
        for key, page in prefetch.pages:
            page.users -= 1
            if page.users <= 0 and page.loan is not None:
                self._drop(key, page)
        prefetch.pages.clear()

    def _drop(self, key: str, page: _Page) -> None:
        if self._pages.get(key) is page:
            del self._pages[key]
        if page.nbytes:
            self.nbytes -= page.nbytes
            page.nbytes = 0
            self._freed += 1
            for prefetch in self._queue:
                prefetch.waits = False
        if page.loan is not None:
            page.loan.give_back()

    def _leave_queue(self, prefetch: Prefetch) -> None:
        prefetch.over = True
        prefetch.ends.clear()
        if prefetch in self._queue:
            self._queue.remove(prefetch)
