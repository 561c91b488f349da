"""Tiers of snapshots: limits and budgets to the byte, what goes first, and stores that fail."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.offload.tiers import HostTier
from kvcache.prefix.prefix_cache import SessionLimitError
from kvcache.stores import MemoryStore, SnapshotCorrupt, StoreFull, StoreUnavailable
from kvcache.testing.conversing import DIVISIBLE, ConversationSetup, Rig
from kvcache.testing.prefix_case import (
    CALLS,
    LONG,
    GatedStore,
    PlainStore,
    PrefixCase,
    SlowStore,
    Talk,
    every_cache,
)
from kvcache.testing.prefix_traces import FlakyStore

__all__ = ["PrefixTierTests"]


def settled(r: Rig) -> dict[str, int]:
    """Bytes per tier, of which none are counted while they are under way."""
    return {name: size for name, size in r.prefix.nbytes.items() if name != "leaving"}


class PrefixTierTests(PrefixCase):
    # Limits.

    def test_as_many_sessions_as_the_cache_has_sequences(self, talk: Talk) -> None:
        r = talk(max_sequences=2)
        one, two = r.chat([1, 2]), r.chat([1, 3])
        stats = replace(r.prefix.stats)
        with pytest.raises(SessionLimitError, match="2 sessions"):
            r.prefix.begin([1, 2, 3])
        assert r.prefix.stats == stats
        assert {one.session, two.session} == set(r.prefix.sessions)
        one.close()
        assert r.chat([1, 2, 3]).cached == 2
        two.say([4])

    def test_what_is_kept_makes_room_for_what_is_computed(self, talk: Talk) -> None:
        for tiers in ((), (HostTier(),), (MemoryStore(),)):
            r = talk(max_sequences=2, capacity=10, tiers=tiers)
            for start in range(0, 80, 10):
                r.keep(list(range(start, start + 10)))
            assert r.cache.free_cells == r.cache.cells
            chats = [r.chat([*range(100 * i, 100 * i + 10)]) for i in (1, 2)]
            for chat in chats:
                chat.close()
            assert r.keep([*range(200, 210), 1]) == 10
            if tiers:
                r.prefix.flush()
                assert r.keep([*range(10), 1]) == 10
            r.check_books()

    def test_a_prefix_that_does_not_fit_leaves_all_as_it_was(self, talk: Talk) -> None:
        r = talk(max_sequences=2, capacity=8, tiers=[HostTier()])
        r.keep(LONG[:8])
        r.prefix.evict()
        chat = r.chat(list(range(r.cache.cells - 4)))  # more where the backend asks for padding
        stats, nbytes = replace(r.prefix.stats), r.prefix.nbytes
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.prefix.begin([*LONG[:8], 1])
        assert (caught.value.asked, caught.value.free) == (8, 4)
        assert (r.prefix.stats, r.prefix.nbytes, len(r.prefix.sessions)) == (stats, nbytes, 1)
        chat.say([1, 2])
        chat.close()
        assert r.keep([*LONG[:8], 1]) == 8
        r.check_books()

    def test_what_a_refused_prompt_has_brought_back_is_within_the_budget(self, talk: Talk) -> None:
        r = talk(max_sequences=2, capacity=8, budget=0, tiers=[HostTier()])
        r.keep(LONG[:4])
        r.keep(LONG[:8])
        chat = r.chat(list(range(r.cache.cells - 5)))
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.prefix.begin([*LONG[:8], 1])
        assert (caught.value.asked, caught.value.free) == (4, 1), "half of it was there"
        assert r.prefix.nbytes["device"] == 0
        chat.close()
        assert r.keep([*LONG[:8], 1]) == 8
        r.check_books()

    @pytest.mark.parametrize(
        "tokens", [[], [-1], [1, "a"], [1.5], [None], [2**63], np.zeros(2), [[1]]], ids=repr
    )
    def test_what_is_no_prompt_is_refused(self, talk: Talk, tokens: Any) -> None:
        r = talk()
        chat = r.chat([1, 2, 3])
        for use in (r.prefix.begin, chat.session.extend):
            if use == chat.session.extend and isinstance(tokens, list) and not tokens:
                continue
            with pytest.raises((ValueError, TypeError)):
                use(tokens)
        assert r.prefix.stats.sessions == 1
        chat.say([4])
        chat.close()
        assert r.keep([1, 2, 3, 4, 5]) == 4

    # Budgets.

    def test_budgets_are_kept_to_the_byte(self, talk: Talk) -> None:
        one = ConversationSetup().token_bytes
        r = talk(budget=8 * one, tiers=[HostTier(8 * (one + 8))])
        r.keep([1, 2, 3, 4])
        assert settled(r) == {"device": 4 * one, "host": 0}
        r.keep([5, 6, 7, 8])
        assert settled(r) == {"device": 8 * one, "host": 0}
        r.keep([9, 10])
        assert settled(r) == {"device": 6 * one, "host": 4 * (one + 8)}, "positions take 8 bytes each"
        r.keep([11, 12, 13, 14, 15, 16])
        assert settled(r) == {"device": 8 * one, "host": 8 * (one + 8)}
        r.keep([17])
        assert settled(r) == {"device": 7 * one, "host": 6 * (one + 8)}
        assert r.peek([1, 2, 3, 4, 0]) == 0
        assert r.peek([5, 6, 7, 8, 0]) == 4
        tight = talk(budget=4 * one - 1)
        tight.keep([1, 2, 3, 4])
        assert tight.prefix.nbytes == {"device": 0}

    def test_the_least_recently_used_goes_first_and_a_hit_refreshes(self, talk: Talk) -> None:
        r = talk(budget=12 * ConversationSetup().token_bytes)
        for first in (10, 20, 30):
            r.keep([first, 1, 2, 3])
        assert r.peek([10, 1, 2, 9]) == 3
        r.keep([40, 1, 2, 3])
        assert [r.keep([first, 1, 2, 3]) for first in (40, 30, 10)] == [3, 3, 3]
        assert r.peek([20, 1, 2, 3]) == 0

    def test_of_one_conversation_the_deepest_goes_first(self, talk: Talk) -> None:
        r = talk()
        r.keep([1, 2, 3, 4])
        r.keep([1, 2, 3, 4, 5, 6, 7, 8])
        assert r.prefix.evict(1) == 1
        assert r.keep([1, 2, 3, 4, 5, 9]) == 4

    def test_what_is_pinned_goes_last(self, talk: Talk) -> None:
        r = talk()
        r.keep([1, 2, 3, 4])
        r.keep([5, 6, 7, 8])
        assert r.prefix.pin([1, 2, 3, 4, 9]) == 4
        assert r.prefix.evict(1) == 1
        assert r.peek([5, 6, 7, 8]) == 0
        assert r.peek([1, 2, 3, 4]) == 3
        r.prefix.unpin([1, 2, 3, 4])
        r.keep([5, 6, 7, 8])
        assert r.prefix.evict() == 2

    @every_cache
    def test_every_tier_small_and_smaller(self, talk: Talk, cache: str) -> None:
        for budget, host in ((0, 0), (0, None), (3000, 0), (3000, 1500), (None, 1500)):
            r = talk(cache, budget, [HostTier(host), MemoryStore()])
            for at in (20, 14, 9, 17):
                r.keep([*LONG[:at], 90, at])
                r.check_books()
            r.prefix.flush()
            assert r.keep([*LONG, 90, 20, 91]) == 22
            r.prefix.close()
            r.check_empty()

    def test_what_no_budget_can_hold_leaves_the_rest_where_it_is(self, talk: Talk) -> None:
        one = ConversationSetup().token_bytes
        r = talk(tiers=[HostTier(8 * (one + 8)), MemoryStore()])
        r.keep([1, 2, 3, 4])
        r.prefix.evict()
        r.keep(LONG)
        r.prefix.evict()
        assert r.prefix.nbytes["host"] == 4 * (one + 8)
        r.prefix.flush()
        assert [r.peek([1, 2, 3, 4, 5]), r.peek([*LONG, 1])] == [4, 20]
        assert (r.prefix.stats.host, r.prefix.stats.store) == (4, 20)

    @every_cache
    def test_what_came_from_a_store_goes_to_host_memory_when_the_device_lets_go(
        self, talk: Talk, cache: str
    ) -> None:
        store = FlakyStore()
        writer = talk(cache, tiers=[store])
        writer.keep(LONG)
        writer.prefix.close()
        r = talk(cache, tiers=[HostTier(), store])
        assert r.peek([*LONG, 1]) == 20
        r.prefix.evict()
        store.failing = frozenset(CALLS)
        assert r.peek([*LONG, 2]) == 20
        assert (r.prefix.stats.store, r.prefix.stats.host) == (20, 20)

    @pytest.mark.parametrize("cache", DIVISIBLE)
    def test_a_store_and_host_memory_may_take_turns(self, talk: Talk, cache: str) -> None:
        """The beginning fits the store only, and the end is in host memory: both are used."""
        one = replace(ConversationSetup(), cache="causal").token_bytes
        r = talk(cache, tiers=[HostTier(6 * (one + 8)), MemoryStore()])
        r.keep(LONG[:12])
        r.prefix.evict()
        r.prefix.flush()
        r.keep(LONG[:16])
        r.prefix.evict()
        assert r.peek([*LONG[:16], 1]) == 16
        assert (r.prefix.stats.store, r.prefix.stats.host) == (24, 4)
        assert r.peek([*LONG[:14], 90, 91, 92]) == 14
        assert r.peek([*LONG[:12], 93, 94]) == 12
        r.check_books()

    def test_a_page_may_have_to_leave_while_it_is_put_to_use(self, talk: Talk) -> None:
        r = talk(max_sequences=2, capacity=8, tiers=[HostTier(8 * (ConversationSetup().token_bytes + 8))])
        r.keep(LONG[:8])
        r.prefix.evict()
        r.keep([1, 2, 3, 4, 5, 6])
        r.prefix.pin([1, 2, 3, 4, 5, 6])
        r.chat([50, 51, 52, 53])
        assert r.peek([*LONG[:8], 9]) == 8
        r.check_books()

    @every_cache
    def test_a_conversation_outlives_what_it_began_with(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        r.keep(LONG)
        chat = r.chat([*LONG, 90, 91])
        r.prefix.evict()
        chat.say([92])
        chat.close()
        assert r.keep([*LONG, 90, 91, 92, 93]) == 23
        r.check_books()

    # Stores that fail.

    @pytest.mark.parametrize("error", [StoreUnavailable, StoreFull, SnapshotCorrupt, OSError])
    @pytest.mark.parametrize("call", CALLS)
    def test_a_store_that_fails_costs_a_recomputation_and_no_more(
        self, talk: Talk, call: str, error: type[Exception]
    ) -> None:
        for cache in ("causal", "wrapper"):
            store = FlakyStore()
            store.error = error
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
            r.check_books()
            r.prefix.close()

    def test_a_store_that_fails_now_and_then(self, talk: Talk) -> None:
        for cache in ("causal", "recurrent"):
            for every in (2, 3, 5, 7):
                store = FlakyStore()
                r = talk(cache, tiers=[store])
                store.every = every
                for at in (20, 8, 14, 20):
                    r.keep([*LONG[:at], 1, 2])
                    r.prefix.evict()
                    r.check_books()
                r.prefix.close()

    def test_what_one_store_lost_another_may_have(self, talk: Talk) -> None:
        near, far = FlakyStore(), FlakyStore()
        r = talk(tiers=[near, far])
        r.keep(LONG)
        r.prefix.close()
        near.error, near.failing = SnapshotCorrupt, frozenset(["get_into"])
        for _ in range(2):
            other = talk(tiers=[near, far])
            assert other.keep([*LONG, 1]) == 20
            assert other.prefix.stats.store == 20

    def test_pages_that_are_gone_cost_what_follows_them(self, talk: Talk) -> None:
        store = MemoryStore()
        r = talk(tiers=[store])
        r.keep(LONG)
        r.prefix.close()
        chain = r.prefix.tree.keys.chain(LONG)
        assert store.delete(chain.at(12))
        other = talk(tiers=[store])
        assert other.keep([*LONG, 1]) == 8

    @every_cache
    def test_what_waits_to_be_written_is_there_already(self, talk: Talk, cache: str) -> None:
        store = GatedStore()
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
        r.check_books()

    @every_cache
    def test_a_page_that_is_read_later_changes_nothing_that_was_read(self, talk: Talk, cache: str) -> None:
        store = MemoryStore()
        writer = talk(cache, tiers=[store])
        others = [[number, *LONG] for number in range(6)]
        for tokens in others:
            writer.keep(tokens)
        writer.prefix.close()
        r = talk(cache, tiers=[store])
        for first, second, third in (others[:3], others[3:]):
            chats = [r.begin([*tokens, 1]) for tokens in (first, second, third)]
            assert [chat.cached for chat in chats] == [21] * 3
            for chat in chats:
                chat.prefill()
                chat.close()
        r.check_books()

    @every_cache
    def test_nothing_hangs_on_how_the_interpreter_counts_references(
        self, talk: Talk, cache: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Versions of Python count them differently."""
        monkeypatch.setattr(sys, "getrefcount", lambda thing: 0)
        store = MemoryStore()
        writer = talk(cache, tiers=[store])
        writer.keep(LONG)
        writer.prefix.close()
        for reader in (talk(cache, tiers=[store]), talk(cache, tiers=[PlainStore(store)])):
            assert reader.keep([*LONG, 1]) == 20
            reader.prefix.close()

    def test_what_waits_to_be_written_is_bounded(self, talk: Talk) -> None:
        store = SlowStore()
        one = 4 * (ConversationSetup().token_bytes + 8)
        r = talk(tiers=[store], backlog=2 * one, max_sequences=1, capacity=200)
        store.look = lambda: r.prefix.nbytes["writing"]
        for start in range(0, 80, 4):
            r.keep([start, start + 1, start + 2, start + 3])
        assert r.prefix.evict() == 20
        r.prefix.flush()
        assert len(store.waited) == 20
        assert max(store.waited) <= 2 * one
        assert r.prefix.nbytes["writing"] == 0
        assert r.keep([0, 1, 2, 3, 4]) == 4
