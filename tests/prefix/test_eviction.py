"""The order in which a tier lets go, and its account of bytes, against sorting."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from kvcache.offload.eviction import EvictionQueue
from kvcache.prefix.tenant_budget import TenantQueue


@dataclass(eq=False)
class Entry:
    name: int
    used: int = 0
    depth: int = 0
    pins: int = 0
    tenant: str = ""


def priority(entry: Entry) -> tuple[bool, int, int]:
    return entry.pins > 0, entry.used, -entry.depth


def ledger(budget: int | None = None) -> EvictionQueue[Entry]:
    return EvictionQueue(budget, priority)


def test_the_least_recently_used_the_deepest_of_equals_pinned_ones_last() -> None:
    entries = [
        Entry(3, used=2, depth=9), Entry(1, used=1, depth=5), Entry(4, used=3), Entry(2, used=1, depth=4),
        Entry(5, used=0, pins=1), Entry(6, used=0, depth=-1, pins=2),
    ]  # fmt: skip
    held = ledger()
    for entry in entries:
        held.add(entry, 1)
    order = []
    while (entry := held.first()) is not None:
        order.append(entry.name)
        held.discard(entry)
    assert order == [1, 2, 3, 4, 5, 6]
    assert (held.nbytes, len(held), held.first()) == (0, 0, None)


@pytest.mark.parametrize("seed", range(20))
def test_any_changes_agree_with_sorting(seed: int) -> None:
    rnd = random.Random(seed)
    held, sizes = ledger(500), {}
    pool = [Entry(name) for name in range(40)]
    for clock in range(600):
        entry = rnd.choice(pool)
        roll = rnd.random()
        if roll < 0.3:
            entry.used, entry.depth = clock, rnd.randrange(4)
            sizes[entry] = rnd.randrange(50)
            held.add(entry, sizes[entry])
        elif roll < 0.75:
            entry.used, entry.pins = clock // 3, rnd.choice((0, 0, 0, 1))
            held.touch(entry)
        else:
            held.discard(entry)
            sizes.pop(entry, None)
        assert held.nbytes == sum(sizes.values())
        assert held.excess == max(0, held.nbytes - 500)
        assert (len(held), set(held)) == (len(sizes), set(sizes))
        assert all((entry in held) == (entry in sizes) for entry in pool)
        assert held.first() is next(held.in_order(), None)
        upto = rnd.randrange(50)
        order = [priority(entry) for entry in itertools.islice(held.in_order(), upto)]
        assert order == sorted(map(priority, sizes))[:upto]


def test_without_a_budget_nothing_is_too_much() -> None:
    held = ledger()
    held.add(Entry(1), 10**15)
    assert held.excess == 0


LIMITS = {"": None, "ada": 10, "bob": 25, "eve": None}


def tenants(budget: int | None = None) -> TenantQueue[Entry]:
    return TenantQueue(budget, priority, lambda entry: entry.tenant, lambda tenant: LIMITS[tenant])


def test_what_fits_has_room_when_all_others_have_gone() -> None:
    held = tenants(20)
    held.add(Entry(1), 20)
    fits = {
        tenant: [held.fits(size, Entry(2, tenant=tenant)) for size in (10, 11, 20, 21)] for tenant in LIMITS
    }
    assert fits == {
        "": [True, True, True, False],
        "ada": [True, False, False, False],
        "bob": [True, True, True, False],
        "eve": [True, True, True, False],
    }
    assert tenants().fits(10**18, Entry(3))
    held.add(Entry(4), 1)
    assert held.excess == 1


@pytest.mark.parametrize("seed", range(10))
def test_who_has_too_much_loses_the_first_of_its_own(seed: int) -> None:
    rnd = random.Random(seed)
    held, sizes = tenants(), {}
    pool = [Entry(name, tenant=rnd.choice([*LIMITS])) for name in range(40)]
    for clock in range(400):
        entry, roll = rnd.choice(pool), rnd.random()
        if roll < 0.5:
            entry.used = clock
            sizes[entry] = rnd.randrange(1, 12)
            held.add(entry, sizes[entry])
        elif roll < 0.8:
            entry.used, entry.pins = clock // 3, rnd.choice((0, 0, 0, 1))
            held.touch(entry)
        else:
            held.discard(entry)
            sizes.pop(entry, None)
        while (found := held.over()) is not None:
            first, excess = found
            own = [entry for entry in sizes if entry.tenant == first.tenant]
            assert excess == sum(sizes[entry] for entry in own) - (LIMITS[first.tenant] or 0)
            assert priority(first) == min(map(priority, own))
            held.discard(first)
            del sizes[first]
        for tenant, limit in LIMITS.items():
            taken = sum(size for entry, size in sizes.items() if entry.tenant == tenant)
            assert limit is None or taken <= limit
        assert held.nbytes == sum(sizes.values())


def test_an_entry_added_again_counts_with_its_new_size() -> None:
    held, entry = ledger(), Entry(1)
    held.add(entry, 5)
    held.add(entry, 3)
    assert (held.nbytes, len(held)) == (3, 1)
    held.discard(entry)
    held.discard(entry)
    assert held.nbytes == 0


def test_touching_without_end_takes_no_more_memory_than_the_entries() -> None:
    held, entries = ledger(), [Entry(name) for name in range(10)]
    for entry in entries:
        held.add(entry, 1)
    for clock in range(10000):
        entries[clock % 10].used = clock
        held.touch(entries[clock % 10])
    assert len(held._heap) <= 64 + 4 * 10 + 1
    assert held.first() is entries[0]
