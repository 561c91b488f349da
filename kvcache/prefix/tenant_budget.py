"""What one tenant may keep at most in each tier."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from kvcache.offload.eviction import EvictionQueue, Priority
from kvcache.stores.sizes import parse_bytes

__all__ = ["TenantBudget", "TenantQueue"]

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """Bytes of snapshots that are kept for one tenant on the device and in host memory; None: no limit.

    Sizes such as ``"64MiB"`` become numbers. What everyone may share counts for nobody, nor does what open
    sessions hold. What a tenant has too much goes as if the tier were full: its own that is worth least.
    """

    device: int | None = None
    host: int | None = None

    def __init__(self, device: int | str | None = None, host: int | str | None = None) -> None:
        for name, value in (("device", device), ("host", host)):
            found = None if value is None else parse_bytes(value, f"TenantBudget: {name}")
            object.__setattr__(self, name, found)


class TenantQueue(EvictionQueue[N]):
    """A queue with a limit for each tenant beside that for all.

    ``tenant_of`` tells whose an entry is ("": everyone's) when it is added, ``limit`` what a tenant may have.
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
        """Tenants that may have too much."""

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
        """Whether this entry, of this size, has room when all others have gone."""
        tenant = self._tenant_of(entry)
        limit = self._limit(tenant) if tenant else None
        return (self.budget is None or nbytes <= self.budget) and (limit is None or nbytes <= limit)

    def is_full(self, nbytes: int, entry: N) -> bool:
        """Whether so many bytes more, of this entry, would be too many."""
        tenant = self._tenant_of(entry)
        limit, own = self._limit(tenant) if tenant else None, self._queues.get(tenant)
        too_many = limit is not None and (0 if own is None else own.nbytes) + nbytes > limit
        return too_many or (self.budget is not None and self.nbytes + nbytes > self.budget)

    def over(self) -> tuple[N, int] | None:
        """Of a tenant that has too much what goes first, and how many bytes are too much; None: none has."""
        while self._over:
            tenant = next(iter(self._over))
            queue = self._queues[tenant]
            if queue.excess and (entry := queue.first()) is not None:
                return entry, queue.excess
            del self._over[tenant]
        return None
