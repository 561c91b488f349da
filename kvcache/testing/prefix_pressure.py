"""Where room is short: what was least recently used goes first, of an edge its end, no more than it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.offload.tiers import HostTier
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.stores import MemoryStore
from kvcache.testing.conversing import DIVISIBLE, ConversationSetup
from kvcache.testing.prefix_case import LONG, PrefixCase, Talk

__all__ = ["PrefixPressureTests"]

ONE = ConversationSetup().token_bytes


def line(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


class PrefixPressureTests(PrefixCase):
    """Edges are parted at multiples of 16 tokens; backends that ask for padding have more cells."""

    @pytest.mark.parametrize("cache", DIVISIBLE)
    def test_the_end_of_an_edge_goes_first(self, talk: Talk, cache: str) -> None:
        r = talk(cache, max_sequences=1, capacity=64, max_batch=64)
        r.keep(line(100, 48))
        for number, (need, left) in enumerate(((16, 48), (1, 32), (15, 32), (33, 0))):
            r.keep(line(1000 * (number + 1), need))
            assert r.prefix.longest([*line(100, 48), 9]) == left
            r.check_books()

    @pytest.mark.parametrize(("excess", "left"), [(0, 48), (1, 32), (16, 32), (17, 16), (32, 16), (33, 0)])
    def test_a_budget_keeps_the_beginning_of_what_is_too_long(
        self, talk: Talk, excess: int, left: int
    ) -> None:
        r = talk(budget=(48 - excess) * ONE)
        r.keep(line(100, 48))
        assert r.prefix.nbytes == {"device": left * ONE}
        assert r.peek([*line(100, 48), 9]) == left

    @pytest.mark.parametrize("cache", DIVISIBLE)
    @pytest.mark.parametrize("kind", ["host", "store"])
    def test_an_end_that_went_to_another_tier_is_found_behind_its_beginning(
        self, talk: Talk, kind: str, cache: str
    ) -> None:
        tier: Any = HostTier() if kind == "host" else MemoryStore()
        r = talk(cache, max_sequences=1, capacity=64, max_batch=64, tiers=[tier])
        r.keep(line(100, 48))
        r.keep(line(1000, 20))
        r.prefix.flush()
        assert r.peek([*line(100, 48), 9]) == 48
        assert (r.prefix.stats.device, getattr(r.prefix.stats, kind)) == (32, 16)
        r.check_books()

    def test_what_is_stored_already_is_not_written_again_when_it_is_parted(self, talk: Talk) -> None:
        store = MemoryStore()
        r = talk(max_sequences=1, capacity=64, max_batch=64, tiers=[store])
        r.keep(line(100, 48))
        r.prefix.flush()
        written = store.usage().entries
        r.keep(line(1000, 20))
        r.prefix.evict()
        r.prefix.flush()
        assert store.usage().entries == written + 5, "the pages of the second conversation"
        assert r.peek([*line(100, 48), 9]) == 48

    def test_what_an_open_session_uses_goes_later_than_all_that_is_not_in_use(self, talk: Talk) -> None:
        r = talk(max_sequences=2, capacity=40, max_batch=128)
        first, second = line(100, 32), line(200, 32)
        r.keep(first)
        chat = r.chat([*first, 1])
        r.keep(second)
        r.keep(line(300, r.cache.cells - 50))
        assert [r.prefix.longest([*tokens, 9]) for tokens in (first, second)] == [32, 16]
        chat.close(keep=False)
        r.keep(line(400, 18))
        assert [r.prefix.longest([*tokens, 9]) for tokens in (first, second)] == [32, 0]
        r.check_books()

    def test_the_end_of_an_edge_is_no_newer_for_a_prompt_that_parted_before_it(self, talk: Talk) -> None:
        r = talk(max_sequences=1, capacity=80, max_batch=128)
        old, other = line(100, 48), line(200, 16)
        r.keep(old)
        r.keep(other)
        r.keep([*old[:16], 1, 2, 3, 4])
        r.keep(line(300, r.cache.cells - 36))
        assert [r.prefix.longest([*tokens, 9]) for tokens in (old, other)] == [16, 16]
        assert r.prefix.longest([*old[:16], 1, 2, 3, 4, 9]) == 20

    def test_what_an_eviction_costs_does_not_grow_with_what_is_kept(self, talk: Talk) -> None:
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

    def test_what_was_copied_out_of_the_cache_goes_in_its_turn(self, talk: Talk) -> None:
        """It takes the device's memory, and no cells."""
        r = talk(max_sequences=1, capacity=32, max_batch=64, tiers=[HostTier()])
        for first in (100, 200, 300):
            r.keep(line(first, 8))
        for node in r.prefix.tree.radix_tree:
            if node.data is not None and node.data.snapshot is not None and int(node.tokens[0]) < 300:
                node.data.snapshot.detach()
        r.keep(line(400, r.cache.cells - 2))
        r.prefix.flush()
        assert r.prefix.nbytes["device"] == (r.cache.cells - 2) * ONE
        assert [r.peek([*line(first, 8), 9]) for first in (100, 200, 300)] == [8, 8, 8]
        r.check_books()

    def test_a_parted_edges_pages_take_the_memory_that_they_count(self, talk: Talk) -> None:
        for parted_on_device in (True, False):
            r = talk(tiers=[HostTier()])
            r.keep(LONG)
            if not parted_on_device:
                r.prefix.evict()
            r.keep([*LONG[:7], 90])
            r.prefix.evict()
            pages = [node.data.page for node in r.prefix.tree.radix_tree if node.data is not None]
            assert len(pages) == 3
            for page in pages:
                assert page is not None
                positions = page.arrays["positions"]
                owner = positions if positions.base is None else positions.base
                assert isinstance(owner, np.ndarray)
                assert owner.nbytes == positions.nbytes

    def test_an_edge_that_cannot_be_parted_stays_as_it_is(self, talk: Talk) -> None:
        r = talk()
        chat = r.chat([*LONG[:7], 90])
        r.keep(LONG)
        (node,) = r.prefix.tree.radix_tree
        assert node.data is not None
        snapshot: Any = node.data.snapshot
        snapshot.source.pin.lost = True
        chat.close()
        assert [*r.prefix.tree.radix_tree] == [node]
        r.check_books()
        assert r.keep([*LONG, 1]) == 0
        r.check_books()
