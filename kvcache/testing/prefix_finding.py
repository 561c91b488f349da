"""What a session starts from: the longest prefix that is there, of its own kind, without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import kvcache
import ml
from kvcache.offload.tiers import HostTier
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import MemoryStore
from kvcache.testing.conversing import DIVISIBLE, ConversationSetup, Rig
from kvcache.testing.prefix_case import (
    CALLS,
    LONG,
    WHOLE,
    PrefixCase,
    Talk,
    every_cache,
)
from kvcache.testing.prefix_traces import FlakyStore
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml import DType

__all__ = ["PrefixFindingTests"]


class PrefixFindingTests(PrefixCase):
    # What is found.

    @every_cache
    def test_a_conversation_is_not_evaluated_twice(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        chat = r.chat(LONG, 7)
        assert chat.cached == 0
        chat.say([90])
        chat.say([91, 92])
        chat.close()
        assert r.evaluated == 23
        assert r.keep([*LONG, 90, 91, 92, 93]) == 23
        assert r.keep(LONG) == 19, "one token is left, whose logits are needed"
        assert r.keep([*LONG, 90, 91, 92, 93]) == 23
        r.check_books()

    def test_one_token_is_always_left(self, talk: Talk) -> None:
        r = talk()
        assert [r.keep([1]), r.keep([1]), r.keep([1, 2]), r.keep([1, 2]), r.keep([1])] == [0, 0, 1, 1, 0]

    @pytest.mark.parametrize("cache", DIVISIBLE)
    def test_what_diverges_shares_all_before_it(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        r.keep(LONG)
        for at in (14, 15, 3, 17, 0, 1):
            assert r.keep([*LONG[:at], 90 + at, 5, 5]) == at

    @pytest.mark.parametrize("cache", WHOLE)
    def test_what_diverges_shares_all_up_to_the_nearest_snapshot(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        r.keep(LONG)
        assert r.keep([*LONG[:14], 90, 5, 5]) == 8
        assert r.keep([*LONG[:14], 91, 5, 5]) == 14, "one was taken where the two parted"
        assert r.keep([*LONG[:18], 92, 5, 5]) == 16
        assert r.keep([*LONG[:7], 93]) == 0

    def test_a_recurrent_state_inside_a_batch_is_not_there_to_be_kept_and_that_is_said_once(
        self, talk: Talk, caplog: pytest.LogCaptureFixture
    ) -> None:
        r = talk("recurrent")
        for first in (0, 50):
            chat = r.begin([first, *LONG])
            chat.prefill(honour=False)
            chat.close()
        assert r.prefix.stats.skipped == 6
        (said,) = caplog.messages
        assert "ran past [8, 16, 20]" in said
        assert r.keep([0, *LONG[:13], 90]) == 0
        assert r.keep([0, *LONG, 90]) == 21
        assert r.prefix.stats.skipped == 6

    @every_cache
    def test_open_sessions_share_what_they_hold(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        first = r.chat(LONG)
        second, third = r.chat([*LONG, 1]), r.chat([*LONG, 2])
        assert (second.cached, third.cached) == (20, 20)
        assert r.prefix.stats.live == 40
        for number in range(3):
            for chat in (first, second, third):
                chat.say([number])
        second.close()
        fourth = r.chat([*LONG, 0, 1])
        assert fourth.cached >= 20
        for chat in (third, first, fourth):
            chat.say([9])
            chat.close()
        r.check_books()

    @every_cache
    def test_of_all_that_is_there_the_longest_is_taken(self, talk: Talk, cache: str) -> None:
        store = FlakyStore()
        writer = talk(cache, tiers=[store])
        writer.keep(LONG[:12])
        writer.prefix.flush()
        r = talk(cache, tiers=[HostTier(), store])
        store.failing = frozenset(CALLS)
        r.keep(LONG[:8])
        r.prefix.evict()
        assert r.keep([*LONG[:8], 90]) == 8
        r.prefix.evict()
        store.failing = frozenset()
        before = replace(r.prefix.stats)
        chat = r.chat([*LONG[:12], 91])
        assert chat.cached == 12, "the store has more than host memory"
        assert r.prefix.stats.store > before.store
        chat.say([92])
        chat.close()
        assert r.keep([*LONG[:12], 91, 92, 93]) == 14, "the cache has more than the store"
        live = r.chat([*LONG[:12], 91, 92, 93, 94, 95])
        other = r.chat([*LONG[:12], 91, 92, 93, 94, 95, 96])
        assert other.cached == 17, "an open session has more than the cache"
        live.close()
        other.close()
        r.check_books()

    @every_cache
    def test_each_tier_gives_back_what_it_was_given(self, talk: Talk, cache: str) -> None:
        tiers: list[list[Any]] = [[], [HostTier()], [FlakyStore()]]
        for name, where in zip(("device", "host", "store"), tiers, strict=True):
            r = talk(cache, tiers=where)
            r.keep(LONG)
            if name != "device":
                assert r.prefix.evict() > 0
                assert r.prefix.nbytes["device"] == 0
            if name == "store":
                r.prefix.flush()
            assert r.keep([*LONG, 90]) == 20
            stats = r.prefix.stats
            assert (getattr(stats, name), stats.reused, stats.tokens, stats.sessions) == (20, 20, 41, 2)
            r.check_books()
            r.prefix.close()
            r.check_empty()

    def test_a_prefix_comes_from_several_tiers_at_once(self, talk: Talk) -> None:
        store = FlakyStore()
        writer = talk(tiers=[store])
        writer.keep(LONG[:16])
        writer.prefix.close()
        r = talk(tiers=[store])
        store.failing = frozenset(CALLS)
        r.keep(LONG[:6])
        store.failing = frozenset()
        assert r.keep(LONG) == 16
        assert (r.prefix.stats.device, r.prefix.stats.store) == (6, 10)

    @every_cache
    def test_a_store_serves_another_process(self, talk: Talk, cache: str) -> None:
        store = MemoryStore()
        with talk(cache, tiers=[store]).prefix as prefix:
            assert prefix.nbytes == {"device": 0, "leaving": 0, "writing": 0}
        first = talk(cache, tiers=[store])
        first.keep(LONG)
        first.prefix.close()
        second = talk(cache, tiers=[store])
        assert second.keep([*LONG, 90]) == 20
        assert second.prefix.stats.store == 20
        second.prefix.evict()
        assert second.keep([*LONG, 90, 91]) >= 20

    # Who shares with whom.

    def test_items_are_told_apart(self, talk: Talk) -> None:
        store = MemoryStore()
        r = talk(tiers=[store])
        r.keep([1, b"a cat", 2, 3])
        assert r.keep([1, b"a cat", 2, 4]) == 3
        assert r.keep([1, b"a dog", 2, 3]) == 1
        assert r.keep([1, b"a dog", b"a cat", 3]) == 2
        r.prefix.close()
        other = talk(tiers=[store])
        chat = other.begin([1, b"a dog", 2, 3, b"a cat"])
        assert chat.cached == 4, "numbers that this one gave other items mean nothing to that one"
        assert chat.session.tokens == [1, b"a dog", 2, 3, b"a cat"]

    @pytest.mark.parametrize("what", ["salt", "identity", "dtype", "window", "block_size"])
    def test_what_was_computed_otherwise_is_never_shared(self, talk: Talk, what: str) -> None:
        store = MemoryStore()
        cache = "sliding" if what == "window" else "causal"
        others: dict[str, dict[str, Any]] = {
            "salt": {"salt": "another"},
            "identity": {"identity": {"model": "another"}},
            "dtype": {"dtype": DType.F16},
            "block_size": {"options": {"block_size": 5, "interval": 8}},
        }
        first = talk(cache, tiers=[store])
        first.keep(LONG)
        first.prefix.close()
        if what == "window":
            wide = kvcache.SlidingWindowCache(4)
            wide.init(first.backend, DType.F32, 2, 32, 32)
            prefix = PrefixCache(wide, tiers=[store], identity={"model": "digests"}, block_size=4, interval=8)
            assert prefix.begin([*LONG, 1]).cached == 0
            return
        second = talk(cache, tiers=[store], **others[what])
        assert second.keep([*LONG, 1]) == 0
        third = talk(cache, tiers=[store])
        assert third.keep([*LONG, 1]) == 20

    def test_a_store_needs_to_know_the_model(self, talk: Talk) -> None:
        with pytest.raises(kvcache.InvalidRangeError, match="identity"):
            talk(tiers=[MemoryStore()], identity={})

    @pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0], ids=lambda dtype: dtype.name)
    @every_cache
    def test_conversations_of_a_quantized_cache_share_codes_and_scales(
        self, talk: Talk, declared: ml.Features, cache: str, dtype: DType
    ) -> None:
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        store = MemoryStore()
        r = talk(cache, tiers=[HostTier(), store], dtype=dtype)
        live = r.chat(LONG)
        assert r.keep([*LONG, 1, 2]) == 20
        live.close()
        for number in range(3):
            r.prefix.evict()
            assert r.keep([*LONG, 1, 2, number]) == 22
        r.check_books()
        r.prefix.close()
        other = talk(cache, tiers=[store], dtype=dtype)
        assert other.keep([*LONG, 1, 2, 9]) == 22
        assert other.prefix.stats.store == 22

    def test_an_encoders_output_goes_with_the_token_that_it_came_with(self, talk: Talk) -> None:
        r = talk("encoder", tiers=[HostTier()])
        first = r.chat([0, 1, b"a picture", 2, 3, 5, 6])
        assert first.session.cached == 0
        second = r.chat([0, 1, b"a picture", 2, 3, 7])
        assert second.session.cached == 5
        assert r.keep([0, 1, b"another picture", 2, 3, 7]) == 2
        nbytes = r.cache.caches[0].nbytes
        third = r.chat([0, 1, b"a picture", 8])
        assert third.session.cached == 3
        assert r.cache.caches[0].nbytes == nbytes, "shared, not copied"
        for chat in (first, second, third):
            chat.close()
        r.prefix.evict()
        assert r.cache.caches[0].nbytes == 0
        assert r.keep([0, 1, b"a picture", 2, 3, 5, 9]) == 6
        r.check_books()

    # What is moved.

    @every_cache
    def test_sharing_moves_no_data(self, backend: ml.Backend, cache: str) -> None:
        plan = Plan()
        r = Rig(ConversationSetup(cache), only_protocol(backend, plan))
        live = r.chat(LONG)
        plan.arm(None)
        chat = r.begin([*LONG, 1])
        chat.close()
        live.close()
        again = [r.begin([*LONG, 1]), r.begin([*LONG, 2])]
        assert [chat.cached for chat in again] == [20, 20]
        assert plan.calls == []
        for chat in again:
            chat.prefill()
        r.check_books()

    def test_a_prefix_from_host_memory_is_copied_once_for_all_who_use_it(self, backend: ml.Backend) -> None:
        plan = Plan()
        r = Rig(ConversationSetup(), only_protocol(backend, plan), tiers=[HostTier()])
        r.keep(LONG)
        r.prefix.evict()
        first = r.begin([*LONG, 1])
        plan.arm(None)
        second = r.begin([*LONG, 2])
        assert (first.cached, second.cached) == (20, 20)
        assert plan.calls == []
