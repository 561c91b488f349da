"""What goes first when a tier is full, and what each entry counts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

__all__ = ["EvictionQueue"]

N = TypeVar("N")
Priority = tuple[float, ...]
"""(pinned, priority, score, minus depth) in a tree: the smallest goes first."""


class EvictionQueue(Generic[N]):
    """What one tier holds, counted in bytes, against its budget (None: no limit).

    ``priority`` tells an entry's order. It may rise at any time; a ``touch`` follows where it falls.
    """

    def __init__(self, budget: int | None, priority: Callable[[N], Priority]) -> None:
        self.budget = budget
        self.nbytes = 0
        self.age = 0.0
        """The highest score of what has gone, for policies by which entries age."""
        self._priority = priority
        self._sizes: dict[int, tuple[N, int]] = {}
        self._heap: list[tuple[Priority, int, N]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, entry: N) -> bool:
        return id(entry) in self._sizes

    def __iter__(self) -> Iterator[N]:
        return (entry for entry, _ in [*self._sizes.values()])

    def add(self, entry: N, nbytes: int) -> None:
        """Count an entry, or count it anew with another size."""
        self.discard(entry)
        self._sizes[id(entry)] = entry, nbytes
        self.nbytes += nbytes
        self.touch(entry)

    def discard(self, entry: N) -> None:
        _, nbytes = self._sizes.pop(id(entry), (entry, 0))
        self.nbytes -= nbytes

    def touch(self, entry: N) -> None:
        """Order an entry by its present priority."""
        if id(entry) in self._sizes:
            heapq.heappush(self._heap, (self._priority(entry), next(self._count), entry))
            if len(self._heap) > 64 + 4 * len(self._sizes):
                self._heap = [(self._priority(e), next(self._count), e) for e in self]
                heapq.heapify(self._heap)

    @property
    def excess(self) -> int:
        return 0 if self.budget is None else max(0, self.nbytes - self.budget)

    def first(self) -> N | None:
        """The entry that goes first; it stays counted."""
        return next(self.in_order(), None)

    def peek(self) -> N | None:
        """As ``first``, by a look at all entries that leaves the queue as it is."""
        return min(self, key=self._priority, default=None)

    def in_order(self) -> Generator[N, None, None]:
        """The entries, as they go one after another; nothing is to change before this is closed."""
        passed: dict[int, tuple[Priority, int, N]] = {}
        try:
            while self._heap:
                priority, _, entry = item = self._heap[0]
                known = id(entry) in self._sizes and id(entry) not in passed
                present = self._priority(entry) if known else priority
                if known and priority == present:
                    yield entry
                    passed[id(entry)] = item
                heapq.heappop(self._heap)
                if priority < present:  # it has risen
                    heapq.heappush(self._heap, (present, next(self._count), entry))
        finally:
            for item in passed.values():
                heapq.heappush(self._heap, item)
