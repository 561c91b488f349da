"""The order in which a tier lets go, and its account of bytes, against sorting; of a tree, by last use."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from kvcache import HostTier
from kvcache.prefix.eviction_queue import EvictionQueue, TenantQueue
from kvcache.stores import MemoryStore

from .rigs.conversing import SOME, ConversationSetup, Talk

TOKEN = ConversationSetup().token_bytes


@dataclass(eq=False)
class Entry:
    name: int
    used: int = 0
    depth: int = 0
    rank: int = 0
    tenant: str = ""


def priority(entry: Entry) -> tuple[int, int, int]:
    return entry.rank, entry.used, -entry.depth


def ledger(budget: int | None = None) -> EvictionQueue[Entry]:
    return EvictionQueue(budget, priority)


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
            entry.used, entry.rank = clock // 3, rnd.choice((0, 0, 0, 1))
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


def test_touching_without_end_takes_no_more_memory_than_the_entries() -> None:
    held, entries = ledger(), [Entry(name) for name in range(10)]
    for entry in entries:
        held.add(entry, 1)
    for clock in range(10000):
        entries[clock % 10].used = clock
        held.touch(entries[clock % 10])
    assert len(held._heap) <= 64 + 4 * 10 + 1
    assert held.first() is entries[0]


@pytest.mark.parametrize(("cache", "seed"), [*zip(SOME, range(3), strict=True)])
def test_what_leads_somewhere_was_used_no_earlier_and_stays(talk: Talk, cache: str, seed: int) -> None:
    rnd = random.Random(seed)
    tiers = [[], [HostTier(rnd.choice((200, 2000)) * TOKEN)], [HostTier(500 * TOKEN), MemoryStore()]][seed]
    r = talk(cache, 60 * TOKEN, tiers, options={"block_size": 4, "interval": 8})
    for _ in range(40):
        prompt = [1, 2, 3] * rnd.randint(0, 2) + rnd.choices((4, 5, 6), k=rnd.randint(1, 12))
        r.keep(prompt, rnd.choice((3, 1000)))
        r.prefix.tree.drain()
        r.check_books()
        for node in r.prefix.tree.radix_tree if r.prefix.tree.divisible and len(tiers) < 2 else ():
            above = node.parent
            assert above is not None
            assert above.parent is None or (above.data is not None and above.data.present)
            if above.data is not None and node.data is not None:
                assert above.data.used >= node.data.used
    r.prefix.close()
