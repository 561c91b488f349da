"""Where room is short: budgets to the byte, what goes first and how much of it, and stores that fail."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache import CausalCache, InvalidRangeError, PrefixCache
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.prefix.tiers import HostTier
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.stores import FileStore, MemoryStore, SnapshotCorruptError
from kvcache.testing.rigs.protocol import Plan, only_protocol

from .rigs.conversing import (
    DIVISIBLE,
    LONG,
    ConversationSetup,
    Rig,
    Talk,
    every_cache,
    line,
    some_caches,
)
from .rigs.stores import CALLS, FlakyStore, SlowStore, stored

ONE = ConversationSetup().token_bytes
SMALL: dict[str, Any] = {"max_sequences": 1, "capacity": 64, "max_batch": 64}


def settled(r: Rig) -> dict[str, int]:
    """Bytes per tier, of which none are counted while they are under way."""
    return {name: size for name, size in r.prefix.nbytes.items() if name != "leaving"}


# Budgets.


def test_a_budget_is_a_number_of_bytes_or_a_size(backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(backend, ml.DType.F32, 1, 16, 16)
    for given, budget in (("1.5KiB", 1536), (2048, 2048), (None, None)):
        with PrefixCache(cache, budget=given) as prefix:
            assert prefix.tree.device.budget == budget
    for refused in (-1, "many"):
        with pytest.raises(InvalidRangeError, match=f"budget={refused!r}; it must be a number of bytes"):
            PrefixCache(cache, budget=refused)


def test_budgets_are_kept_to_the_byte(talk: Talk) -> None:
    r = talk(budget=8 * ONE, tiers=[HostTier(8 * (ONE + 8))])
    r.keep([1, 2, 3, 4])
    assert settled(r) == {"device": 4 * ONE, "host": 0}
    r.keep([5, 6, 7, 8])
    assert settled(r) == {"device": 8 * ONE, "host": 0}
    r.keep([9, 10])
    assert settled(r) == {"device": 6 * ONE, "host": 4 * (ONE + 8)}, "positions take 8 bytes each"
    r.keep([11, 12, 13, 14, 15, 16])
    assert settled(r) == {"device": 8 * ONE, "host": 8 * (ONE + 8)}
    r.keep([17])
    assert settled(r) == {"device": 7 * ONE, "host": 6 * (ONE + 8)}
    assert [r.peek([1, 2, 3, 4, 0]), r.peek([5, 6, 7, 8, 0])] == [0, 4]
    tight = talk(budget=4 * ONE - 1)
    tight.keep([1, 2, 3, 4])
    assert tight.prefix.nbytes == {"device": 0}


@some_caches
def test_what_the_device_has_no_room_for_goes_to_host_memory_and_disk(
    backend: ml.Backend, cache: str, tmp_path: Path
) -> None:
    """Each tier within its budget, and nothing computed twice, also after a restart."""
    setup = ConversationSetup(cache, max_sequences=1, capacity=30)
    prompts = [[number, *LONG] for number in range(6)]
    with FileStore(tmp_path / "store", durable=False) as store:
        r = Rig(setup, backend, 4000, [HostTier(3000), store])
        for prompt in prompts:
            r.keep(prompt)
            assert r.prefix.nbytes["device"] <= 4000
            assert r.prefix.nbytes["host"] <= 3000
        r.prefix.flush()
        computed = r.evaluated
        assert [r.keep([*prompt, 1]) for prompt in prompts] == [21] * 6
        assert r.evaluated == computed + 6
        assert r.prefix.stats.store > 0
        r.prefix.close()
    with FileStore(tmp_path / "store", durable=False) as again:
        other = Rig(setup, backend, None, [again])
        assert [other.peek([*prompt, 1, 2]) for prompt in prompts] == [22] * 6


@every_cache
def test_every_tier_small_and_smaller(talk: Talk, cache: str) -> None:
    for budget, host in ((0, 0), (3000, 1500)):
        r = talk(cache, budget, [HostTier(host), MemoryStore()])
        for at in (20, 14, 9, 17):
            r.keep([*LONG[:at], 90, at])
        r.prefix.flush()
        assert r.keep([*LONG, 90, 20, 91]) == 22
        r.prefix.close()
        r.check_empty()


@pytest.mark.parametrize("in_flight", [0, 1 << 20])
def test_what_no_budget_can_hold_leaves_the_rest_where_it_is(talk: Talk, in_flight: int) -> None:
    r = talk(tiers=[HostTier(8 * (ONE + 8)), MemoryStore()], in_flight=in_flight)
    r.keep([1, 2, 3, 4])
    r.prefix.evict()
    r.keep(LONG)
    r.prefix.evict()
    assert r.prefix.nbytes["host"] == 4 * (ONE + 8)
    r.prefix.flush()
    assert [r.peek([1, 2, 3, 4, 5]), r.peek([*LONG, 1])] == [4, 20]
    assert (r.prefix.stats.host, r.prefix.stats.store) == (4, 20)


@some_caches
def test_what_came_from_a_store_goes_to_host_memory_when_the_device_lets_go(talk: Talk, cache: str) -> None:
    store = stored(talk, cache=cache, store=FlakyStore())
    r = talk(cache, tiers=[HostTier(), store])
    assert r.peek([*LONG, 1]) == 20
    r.prefix.evict()
    store.failing = frozenset(CALLS)
    assert r.peek([*LONG, 2]) == 20
    assert (r.prefix.stats.store, r.prefix.stats.host) == (20, 20)


@pytest.mark.parametrize("cache", DIVISIBLE)
def test_a_store_and_host_memory_may_take_turns(talk: Talk, cache: str) -> None:
    """The beginning fits the store only, and the end is in host memory: both are used."""
    r = talk(cache, tiers=[HostTier(6 * (ONE + 8)), MemoryStore()])
    r.keep(LONG[:12])
    r.prefix.evict()
    r.prefix.flush()
    r.keep(LONG[:16])
    r.prefix.evict()
    assert r.peek([*LONG[:16], 1]) == 16
    assert (r.prefix.stats.store, r.prefix.stats.host) == (24, 4)
    assert r.peek([*LONG[:14], 90, 91, 92]) == 14
    assert r.peek([*LONG[:12], 93, 94]) == 12


def test_a_snapshot_may_have_to_leave_while_it_is_put_to_use(talk: Talk) -> None:
    r = talk(max_sequences=2, capacity=8, tiers=[HostTier(8 * (ONE + 8))])
    r.keep(LONG[:8])
    r.prefix.evict()
    r.keep([1, 2, 3, 4, 5, 6], retention=Retention([TokenRange(priority=100)]))
    r.chat([50, 51, 52, 53])
    assert r.peek([*LONG[:8], 9]) == 8
    r.check_books()


# What goes first. Edges are parted at multiples of 16 tokens.


def test_the_least_recently_used_goes_first_and_a_hit_refreshes(talk: Talk) -> None:
    r = talk(budget=12 * ONE)
    for first in (10, 20, 20, 20, 30):  # however often the second one was used
        r.keep([first, 1, 2, 3])
    assert r.peek([10, 1, 2, 9]) == 3
    r.keep([40, 1, 2, 3])
    assert [r.keep([first, 1, 2, 3]) for first in (40, 30, 10)] == [3, 3, 3]
    assert r.peek([20, 1, 2, 3]) == 0


@pytest.mark.parametrize("cache", DIVISIBLE)
def test_the_end_of_an_edge_goes_first(talk: Talk, cache: str) -> None:
    r = talk(cache, **SMALL)
    r.keep(line(100, 48))
    for number, (need, left) in enumerate(((16, 48), (1, 32), (15, 32), (33, 0))):
        r.keep(line(1000 * (number + 1), need))
        assert r.prefix.longest([*line(100, 48), 9]) == left


@pytest.mark.parametrize(("excess", "left"), [(0, 48), (1, 32), (16, 32), (17, 16), (33, 0)])
def test_a_budget_keeps_the_beginning_of_what_is_too_long(talk: Talk, excess: int, left: int) -> None:
    r = talk(budget=(48 - excess) * ONE)
    r.keep(line(100, 48))
    assert r.prefix.nbytes == {"device": left * ONE}
    assert r.peek([*line(100, 48), 9]) == left


@pytest.mark.parametrize("kind", ["host", "store"])
def test_an_end_that_went_to_another_tier_is_found_behind_its_beginning(talk: Talk, kind: str) -> None:
    store = FlakyStore()
    r = talk(**SMALL, tiers=[HostTier() if kind == "host" else store])
    r.keep(line(100, 48))
    r.prefix.flush()
    written = store.usage().entries
    r.keep(line(1000, 20))
    r.prefix.evict() if kind == "store" else None
    r.prefix.flush()
    assert store.usage().entries in (0, written + 5), "what is stored is not written again when it is parted"
    assert r.peek([*line(100, 48), 9]) == 48
    assert getattr(r.prefix.stats, kind) == (16 if kind == "host" else 48)


def test_what_an_open_session_uses_goes_later_than_all_that_is_not_in_use(talk: Talk) -> None:
    r = talk(max_sequences=2, capacity=40, max_batch=128)
    first, second = line(100, 32), line(200, 32)
    r.keep(first)
    chat = r.chat([*first, 1])
    r.keep(second)
    r.keep(line(300, 30))
    assert [r.prefix.longest([*tokens, 9]) for tokens in (first, second)] == [32, 16]
    chat.close(keep=False)
    r.keep(line(400, 18))
    assert [r.prefix.longest([*tokens, 9]) for tokens in (first, second)] == [32, 0]


def test_the_end_of_an_edge_is_no_newer_for_a_prompt_that_parted_before_it(talk: Talk) -> None:
    r = talk(max_sequences=1, capacity=80, max_batch=128)
    old, other = line(100, 48), line(200, 16)
    r.keep(old)
    r.keep(other)
    r.keep([*old[:16], 1, 2, 3, 4])
    r.keep(line(300, 44))
    assert [r.prefix.longest([*tokens, 9]) for tokens in (old, other)] == [16, 16]
    assert r.prefix.longest([*old[:16], 1, 2, 3, 4, 9]) == 20


def test_what_an_eviction_costs_does_not_grow_with_what_is_kept(talk: Talk) -> None:
    counts = []
    frees: Any = AttentionSnapshot.__dict__["frees_cells"]
    for conversations in (32, 320):
        r = talk(max_sequences=1, capacity=4 * conversations, max_batch=64)
        for i in range(conversations):
            r.keep(line(10 * i, 4))
        looked: list[object] = []

        def look(snapshot: AttentionSnapshot, looked: list[object] = looked) -> bool:
            looked.append(snapshot)
            return bool(frees.fget(snapshot))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AttentionSnapshot, "frees_cells", property(look))
            r.keep(line(10_000, 60))
        counts.append(len(looked))
    assert counts[0] == counts[1] <= 2 * 60 // 4


def test_what_was_copied_out_of_the_cache_goes_in_its_turn(talk: Talk) -> None:
    """It takes the device's memory, and no cells."""
    r = talk(max_sequences=1, capacity=32, max_batch=64, tiers=[HostTier()])
    for first in (100, 200, 300):
        r.keep(line(first, 8))
    for node in r.prefix.tree.radix_tree:
        if node.data is not None and node.data.snapshot is not None and int(node.tokens[0]) < 300:
            node.data.snapshot.detach()
    r.keep(line(400, 30))
    r.prefix.flush()
    assert r.prefix.nbytes["device"] == 30 * ONE
    assert [r.peek([*line(first, 8), 9]) for first in (100, 200, 300)] == [8, 8, 8]


def test_a_parted_edges_snapshots_take_the_memory_that_they_count(talk: Talk) -> None:
    for layout, parted_on_device in itertools.product(ml.Layout, (True, False)):
        r = talk(tiers=[HostTier()], config=ml.CacheConfig(layout=layout))
        r.keep(LONG)
        if not parted_on_device:
            r.prefix.evict()
        r.keep([*LONG[:7], 90])
        r.prefix.evict()
        found = [node.data.serialized for node in r.prefix.tree.radix_tree if node.data is not None]
        assert len(found) == 3
        for array in (array for serialized in found for array in serialized.arrays.values()):
            owner = array if array.base is None else array.base
            assert owner.nbytes == array.nbytes


def test_an_edge_that_has_left_host_memory_is_parted_on_the_device(talk: Talk) -> None:
    r = talk(tiers=[HostTier()])
    r.keep(LONG)
    r.prefix.evict()
    assert r.keep([*LONG, 90]) == 20
    (first,) = r.prefix.tree.radix_tree.root.children.values()
    r.prefix.tree.host.budget = 0
    r.prefix.tree.shrink_host()
    assert first.data.snapshot is not None
    assert r.keep([*LONG[:7], 91]) == 7
    assert r.keep([*LONG, 90, 92]) == 21
    r.check_books()


def test_an_edge_that_cannot_be_parted_stays_as_it_is(talk: Talk) -> None:
    r = talk()
    chat = r.chat([*LONG[:7], 90])
    r.keep(LONG)
    (node,) = r.prefix.tree.radix_tree
    snapshot: Any = node.data.snapshot
    snapshot.source.pin.lost = True
    chat.close()
    assert [*r.prefix.tree.radix_tree] == [node]
    assert r.keep([*LONG, 1]) == 0
    r.check_books()


# Devices and stores that fail, or are slow.


@pytest.mark.parametrize("tier", [HostTier, MemoryStore])
@some_caches
def test_a_device_that_fails_while_a_prefix_is_restored_costs_a_recomputation_and_no_more(
    backend: ml.Backend, cache: str, tier: Any
) -> None:
    plan = Plan()
    r = Rig(ConversationSetup(cache), only_protocol(backend, plan), tiers=[tier()])
    other = r.chat([5, 6, 7])
    r.keep(LONG)
    for fail_at in itertools.count(0, 11):
        r.prefix.evict()
        r.prefix.flush()
        plan.arm(fail_at)
        chat = r.begin([*LONG, 1])
        calls = len(plan.calls)
        plan.arm(None)
        assert chat.cached == (0 if fail_at < calls else 20)
        chat.prefill()
        chat.close(keep=False)
        assert r.peek([*LONG, 1]) == 20
        r.check_books()
        if fail_at >= calls:
            break
    assert fail_at > 0
    other.say([8])


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_fails_costs_a_recomputation_and_no_more(talk: Talk, call: str) -> None:
    for cache in ("causal", "wrapper"):
        store = FlakyStore()
        store.error = OSError
        r = talk(cache, tiers=[store])
        store.failing = frozenset([call])
        r.keep(LONG)
        r.prefix.evict()
        r.prefix.flush()
        assert r.keep([*LONG, 1]) in (0, 20)
        store.failing = frozenset()
        r.prefix.evict()
        r.prefix.flush()
        assert r.keep([*LONG, 1, 2]) == 21
        store.failing = frozenset([call])
        assert r.keep([*LONG, 1, 2, *LONG]) == 22  # what memory has
        r.prefix.close()


def test_what_one_store_lost_another_may_have(talk: Talk) -> None:
    near, far = stored(talk, store=FlakyStore()), stored(talk)
    near.error, near.failing = SnapshotCorruptError, frozenset(["get_into"])
    for _ in range(2):
        other = talk(tiers=[near, far])
        assert other.keep([*LONG, 1]) == other.prefix.stats.store == 20


@some_caches
def test_what_waits_to_be_written_is_there_already(talk: Talk, cache: str) -> None:
    store = SlowStore()
    store.gate.clear()
    r = talk(cache, tiers=[store])
    try:
        r.keep(LONG)
        r.prefix.evict()
        assert r.prefix.nbytes["device"] == 0 < r.prefix.nbytes["writing"]
        assert r.peek([*LONG, 1]) == 20
        assert r.prefix.stats.host == 20
    finally:
        store.gate.set()
    r.prefix.evict()
    r.prefix.flush()
    assert r.peek([*LONG, 1]) == 20


@some_caches
def test_a_snapshot_that_is_read_later_changes_nothing_that_was_read(talk: Talk, cache: str) -> None:
    others = [[number, *LONG] for number in range(6)]
    r = talk(cache, tiers=[stored(talk, *others, cache=cache)])
    for those in (others[:3], others[3:]):
        chats = [r.begin([*tokens, 1]) for tokens in those]
        assert [chat.cached for chat in chats] == [21] * 3
        for chat in chats:
            chat.prefill()
            chat.close()


def test_what_waits_to_be_written_is_bounded(talk: Talk) -> None:
    store = SlowStore()
    four = 4 * (ONE + 8)
    r = talk(tiers=[store], backlog=2 * four, max_sequences=1, capacity=200)
    store.look = lambda: r.prefix.nbytes["writing"]
    for start in range(0, 80, 4):
        r.keep(line(start, 4))
    assert r.prefix.evict() == 20
    r.prefix.flush()
    assert len(store.waited) == 20
    assert max(store.waited) <= 2 * four
    assert r.prefix.nbytes["writing"] == 0
    assert r.keep([0, 1, 2, 3, 4]) == 4


@pytest.mark.parametrize("nbytes", [500, None])
def test_writing_through_waits_for_no_store(talk: Talk, nbytes: int | None) -> None:
    """One that has stopped answering: what is handed over goes as far as the backlog."""
    store = SlowStore()
    store.gate.clear()
    r = talk(tiers=[store], backlog=6000, capacity=120)
    for first in range(4):
        r.keep(line(100 * first, 12))
    try:
        for _ in range(6):
            assert r.prefix.write_through(nbytes)
        assert 0 < r.prefix.nbytes["writing"] <= 6000
    finally:
        store.gate.set()
    r.prefix.flush()
    assert not r.prefix.write_through(500)
    r.prefix.close()
