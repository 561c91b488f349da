"""The content of one tier in eviction order, with a budget for all and one for each tenant."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcache.stores.sizes import parse_bytes

__all__ = ["EvictionQueue", "TenantBudget", "TenantQueue"]

N = TypeVar("N", bound=Hashable)
Priority = tuple[int, ...]
"""The smallest is evicted first."""


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """The bytes of snapshots kept for one tenant on the device and in host memory; None: no limit.

    Sizes such as ``"64MiB"`` become numbers. Content shared by everyone, and content of open sessions, is not
    counted. If a tenant exceeds its budget, its own snapshots are evicted as if the tier were full.
    """

    device: int | None = None
    host: int | None = None

    def __init__(self, device: int | str | None = None, host: int | str | None = None) -> None:
        for name, value in (("device", device), ("host", host)):
            size = None if value is None else parse_bytes(value, f"TenantBudget: {name}")
            object.__setattr__(self, name, size)


class EvictionQueue(Generic[N]):
    """The content of one tier, counted in bytes against its budget (None: no limit).

    ``priority`` returns an entry's position in the order. It may rise at any time; call ``touch`` after it
    falls.
    """

    def __init__(self, budget: int | None, priority: Callable[[N], Priority]) -> None:
        self.budget = budget
        self.nbytes = 0
        self._priority = priority
        self._sizes: dict[N, int] = {}
        self._heap: list[tuple[Priority, int, N]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, entry: N) -> bool:
        return entry in self._sizes

    def __iter__(self) -> Iterator[N]:
        return iter([*self._sizes])

    def add(self, entry: N, nbytes: int) -> None:
        """Count an entry, or update its size."""
        if entry in self._sizes:
            self.discard(entry)
        self._sizes[entry] = nbytes
        self.nbytes += nbytes
        self._push(entry)

    def discard(self, entry: N) -> None:
        self.nbytes -= self._sizes.pop(entry, 0)

    def touch(self, entry: N) -> None:
        """Reorder an entry by its current priority."""
        if entry in self._sizes:
            self._push(entry)

    def _push(self, entry: N) -> None:
        heapq.heappush(self._heap, (self._priority(entry), next(self._count), entry))
        if len(self._heap) > 64 + 4 * len(self._sizes):
            self._heap = [(self._priority(e), next(self._count), e) for e in self]
            heapq.heapify(self._heap)

    @property
    def excess(self) -> int:
        return 0 if self.budget is None else max(0, self.nbytes - self.budget)

    def first(self) -> N | None:
        """The entry to be evicted first; it stays counted."""
        return next(self.in_order(), None)

    def peek(self) -> N | None:
        """As ``first``, by inspecting all entries without changing the queue."""
        return min(self, key=self._priority, default=None)

    def in_order(self) -> Generator[N, None, None]:
        """The entries in eviction order; nothing may change before this iterator is closed."""
        passed: dict[N, tuple[Priority, int, N]] = {}
        try:
            while self._heap:
                priority, _, entry = item = self._heap[0]
                known = entry in self._sizes and entry not in passed
                present = self._priority(entry) if known else priority
                if known and priority == present:
                    yield entry
                    passed[entry] = item
                heapq.heappop(self._heap)
                if priority < present:  # it has risen
                    heapq.heappush(self._heap, (present, next(self._count), entry))
        finally:
            for item in passed.values():
                heapq.heappush(self._heap, item)


class TenantQueue(EvictionQueue[N]):
    """A queue with a limit for each tenant in addition to that for all.

    ``tenant_of`` returns the tenant of an entry ("": shared by everyone) when it is added, ``limit`` the
    budget of a tenant.
    """

    def __init__(
        self,
        budget: int | None,
        priority: Callable[[N], Priority],
        tenant_of: Callable[[N], str],
        limit: Callable[[str], int | None],
    ) -> None:
        super().__init__(budget, priority)
        self._tenant_of, self._limit = tenant_of, limit
        self._queues: dict[str, EvictionQueue[N]] = {}
        self._owners: dict[N, str] = {}
        self._over: dict[str, None] = {}
        """Tenants that may be over their budget."""

    def add(self, entry: N, nbytes: int) -> None:
        super().add(entry, nbytes)
        tenant = self._tenant_of(entry)
        limit = self._limit(tenant) if tenant else None
        if limit is None:
            return
        queue = self._queues.setdefault(tenant, EvictionQueue(limit, self._priority))
        self._owners[entry] = tenant
        queue.add(entry, nbytes)
        if queue.excess:
            self._over[tenant] = None

    def discard(self, entry: N) -> None:
        super().discard(entry)
        if (tenant := self._owners.pop(entry, None)) is not None:
            self._queues[tenant].discard(entry)
            if not len(self._queues[tenant]):
                del self._queues[tenant]
                self._over.pop(tenant, None)

    def touch(self, entry: N) -> None:
        super().touch(entry)
        if (tenant := self._owners.get(entry)) is not None:
            self._queues[tenant].touch(entry)

    def fits(self, nbytes: int, entry: N) -> bool:
        """Whether an entry of this size would fit if all others were evicted."""
        tenant = self._tenant_of(entry)
        limit = self._limit(tenant) if tenant else None
        return (self.budget is None or nbytes <= self.budget) and (limit is None or nbytes <= limit)

    def is_full(self, nbytes: int, entry: N) -> bool:
        """Whether ``nbytes`` more bytes, of this entry, would exceed a budget."""
        tenant = self._tenant_of(entry)
        limit, own = self._limit(tenant) if tenant else None, self._queues.get(tenant)
        too_many = limit is not None and (0 if own is None else own.nbytes) + nbytes > limit
        return too_many or (self.budget is not None and self.nbytes + nbytes > self.budget)

    def over(self) -> tuple[N, int] | None:
        """The first entry to evict of a tenant over its budget, and the excess in bytes; None if no tenant
        is.
        """
        while self._over:
            tenant = next(iter(self._over))
            queue = self._queues[tenant]
            if queue.excess and (entry := queue.first()) is not None:
                return entry, queue.excess
            del self._over[tenant]
        return None
