"""What a session leaves to others, and what is done behind its back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvcache
import ml
from kvcache.offload.tiers import HostTier
from kvcache.prefix.prefix_cache import PrefixCache, SessionReplacedError
from kvcache.stores import MemoryStore
from kvcache.testing.conversing import STATEFUL
from kvcache.testing.prefix_case import (
    LONG,
    WHOLE,
    PrefixCase,
    Talk,
    every_cache,
)
from kvcache.testing.prefix_traces import FlakyStore
from kvcache.testing.rigs.protocol import InjectedError
from ml import DType

__all__ = ["PrefixSessionTests"]


class PrefixSessionTests(PrefixCase):
    # What is kept.

    def test_tokens_that_were_not_evaluated_are_forgotten(self, talk: Talk) -> None:
        r = talk()
        chat = r.chat([1, 2, 3])
        chat.session.extend([4, 5])
        assert chat.session.tokens == [1, 2, 3, 4, 5]
        chat.close()
        assert r.keep([1, 2, 3, 4, 5, 6]) == 3
        unread = r.begin([7, 8, 9])
        unread.close()
        assert r.keep([7, 8, 9]) == 0

    @every_cache
    def test_nothing_is_kept_of_what_is_not_to_be(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        chat = r.chat(LONG)
        chat.close(keep=False)
        chat.close()
        assert r.prefix.nbytes == {"device": 0}
        r.check_empty()
        assert r.keep(LONG) == 0

    @every_cache
    def test_a_pass_that_fails_in_its_middle_is_not_kept(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        chat = r.chat(LONG)
        with pytest.raises(InjectedError), chat.session as session:
            session.extend([90, 91])
            r.start_only(session.seq, 20, 2)
            raise InjectedError
        # Of a state that a pass has begun to change nothing is left but what was kept before.
        assert r.keep([*LONG, 90, 91, 92]) == (19 if cache in STATEFUL else 20)
        prompt = r.begin([5, 6, 7])
        with pytest.raises(InjectedError), prompt.session as session:
            r.start_only(session.seq, 0, 3)
            raise InjectedError
        assert r.keep([5, 6, 7, 8]) == 0
        r.check_books()

    @every_cache
    def test_what_was_evaluated_before_an_exception_is_kept(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        chat = r.begin(LONG)
        with pytest.raises(InjectedError), chat.session as session:
            chat.prefill()
            chat.say([90])
            session.extend([91])
            raise InjectedError
        assert session.closed
        assert r.prefix.sessions == ()
        assert r.keep([*LONG, 90, 91]) == 21

    @every_cache
    def test_what_was_taken_back_is_kept_as_it_was_evaluated(self, talk: Talk, cache: str) -> None:
        r = talk(cache)
        chat = r.chat(LONG)
        chat.say([90, 91, 92])
        chat.rewind(20)
        assert r.evaluated == 23 + 20 - chat.session.cached, "only what the cache no longer has"
        assert cache in WHOLE or chat.session.cached == 20
        chat.say([93, 94])
        assert chat.session.tokens == [*LONG, 93, 94]
        chat.close()
        assert r.keep([*LONG, 93, 94, 95]) == 22
        assert r.keep([*LONG, 90, 91, 92]) >= 19

    @every_cache
    def test_what_was_removed_behind_its_back_is_not_trusted(self, talk: Talk, cache: str) -> None:
        r = talk(cache, max_sequences=3)
        chat = r.chat(LONG)
        r.cache.remove(chat.seq, 15)
        at = r.cache.offset(chat.seq)
        others = [*LONG[:at], 90, 91, 92, 93, 94, 95, 96]
        if r.cache.can_resume(chat.seq, at):
            r.evaluate(chat.seq, others[:at], others[at : at + 5])
        assert r.peek(LONG) <= 15
        chat.session.extend([97, 98])
        chat.close()
        for tokens in (LONG, [*LONG, 97, 98, 1], [*others, 1]):
            assert r.peek(tokens) <= 15
        r.check_books()

    def test_drafts_that_are_refused_cost_nothing(self, talk: Talk) -> None:
        r = talk()
        chat = r.chat(LONG)
        r.evaluate(chat.seq, LONG, [90, 91, 92])
        r.cache.remove(chat.seq, 21)
        chat.session.extend([90, 93])
        r.evaluate(chat.seq, [*LONG, 90], [93])
        chat.close()
        assert r.keep([*LONG, 90, 93, 1]) == 22

    def test_a_sequence_that_was_lost_is_not_kept(self, talk: Talk) -> None:
        r = talk()
        one, two = r.chat(LONG), r.chat([1, 2, 3])
        r.cache.mark_lost(one.seq)
        one.close()
        assert r.keep(LONG) == 0
        two.say([4])
        assert len(r.prefix.sessions) == 1

    # Going back.

    @pytest.mark.parametrize("cache", WHOLE)
    @pytest.mark.parametrize("size", [7, 1000])
    def test_going_back_goes_to_the_nearest_snapshot(self, talk: Talk, cache: str, size: int) -> None:
        r = talk(cache)
        chat = r.chat(LONG, size)
        chat.session.keep()
        for length, expected in ((38, 32), (24, 20), (18, 16), (14, 8), (7, 0)):
            other = r.chat([*LONG, *range(50, 50 + length)], size)
            other.rewind(length)
            assert length >= other.session.cached >= expected
            other.close()
        chat.say([90, 91, 92, 93, 94, 95])
        for length in (18, 17):
            chat.rewind(length)
            assert length >= chat.session.cached >= 16
            chat.say([99, 98])
        chat.close()
        assert r.keep([*LONG[:17], 99, 98, 97]) == 19
        r.check_books()

    def test_going_back_takes_what_host_memory_has(self, talk: Talk) -> None:
        r = talk("wrapper", tiers=[HostTier()])
        chat = r.chat(LONG)
        chat.say([90])
        chat.session.keep()
        r.prefix.evict()
        chat.rewind(17)
        assert chat.session.cached == 16
        assert r.prefix.nbytes["host"] > 0
        chat.close()
        assert r.keep([*LONG[:17], 1]) == 17

    def test_going_back_where_nothing_is_kept_evaluates_again(self, talk: Talk) -> None:
        r = talk("wrapper", budget=0)
        chat = r.chat(LONG)
        chat.say([90])
        chat.rewind(17)
        assert chat.session.cached == 0
        chat.close()

    def test_going_back_where_others_hold_the_cells_evaluates_again(self, talk: Talk) -> None:
        r = talk("wrapper", max_sequences=2, capacity=10, tiers=[HostTier()])
        chat = r.chat(LONG[:10])
        chat.session.keep()
        r.prefix.evict()
        other = r.chat([*LONG[:9], 1])
        other.rewind(9)
        assert chat.session.cached == 0
        assert other.tokens == LONG[:9]
        for one in (chat, other):
            one.close()
        r.check_books()

    # Behind its back.

    @every_cache
    def test_a_session_whose_sequence_was_replaced_says_so(self, talk: Talk, cache: str) -> None:
        r = talk(cache, max_sequences=4)
        one, two = r.chat(LONG), r.chat([1, 2, 3])
        r.cache.copy_prefix(one.seq, two.seq, 20)
        offset = r.cache.offset(two.seq)
        uses: list[Callable[[], object]] = [
            lambda: two.session.extend([9]), two.session.keep, lambda: two.session.extend([9]),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(SessionReplacedError, match=f"sequence {two.seq}.*rewind"):
                use()
        assert two.session.tokens == [1, 2, 3]
        assert r.cache.offset(two.seq) == offset, "what it holds now is left as it is"
        assert r.peek([1, 2, 3, 4]) == 0, "nobody shares what it holds"
        two.done = two.session.rewind(3)
        assert two.done == 0
        two.prefill()
        two.say([4])
        two.close()
        assert r.keep([1, 2, 3, 4, 5]) == 4
        one.say([90])
        one.close()
        assert r.keep([*LONG, 90, 91]) == 21
        r.check_books()

    @every_cache
    def test_nothing_is_kept_of_a_sequence_that_was_replaced(self, talk: Talk, cache: str) -> None:
        r = talk(cache, max_sequences=4)
        one, two = r.chat(LONG), r.chat([1, 2, 3])
        r.cache.copy_prefix(one.seq, two.seq, 20)
        two.close()
        assert r.keep([1, 2, 3, 4]) == 0
        prompt = r.begin([5, 6, 7])
        parts = prompt.session.chunks(2)
        r.cache.copy_prefix(one.seq, prompt.seq, 20)
        with pytest.raises(SessionReplacedError, match="chunks"):
            next(parts)
        with pytest.raises(SessionReplacedError), prompt.session as session:
            session.extend([8])
        one.close()
        assert r.keep([5, 6, 7, 8]) == 0
        r.check_books()

    def test_a_cache_takes_one_prefix_cache_at_a_time(self, talk: Talk) -> None:
        r = talk("wrapper")
        chat = r.chat(LONG)
        for cache in (r.cache, *r.cache.caches, kvcache.WrapperCache(r.cache.caches[1])):
            with pytest.raises(kvcache.InvalidRangeError, match="another PrefixCache, with 1 open session"):
                PrefixCache(cache)
        chat.say([1])
        r.prefix.close()
        with PrefixCache(r.cache) as again:
            assert again.longest(LONG) == 0
        own = kvcache.CausalCache()
        own.init(r.backend, DType.F32, 2, 8, 8)
        with pytest.raises(kvcache.InvalidRangeError, match="interval"):
            PrefixCache(own, interval=0)
        PrefixCache(own)
        with PrefixCache(own) as dropped:
            assert dropped.sessions == (), "one that is gone without close is no obstacle"
        held = PrefixCache(own).begin([1, 2])
        with pytest.raises(kvcache.InvalidRangeError, match="another PrefixCache, with 1 open session"):
            PrefixCache(own)
        held.close()

    def test_a_cache_without_positions_is_refused(self, backend: ml.Backend) -> None:
        cache: Any = kvcache.EncoderCache()
        cache.init(backend, DType.F32, 2, 8, 8)
        with pytest.raises(kvcache.InvalidRangeError, match="EncoderCache knows no positions; wrap it"):
            PrefixCache(cache)

    # Clearing and closing.

    @every_cache
    def test_clear_forgets_all_but_open_sessions_and_stores(self, talk: Talk, cache: str) -> None:
        r = talk(cache, tiers=[HostTier()])
        r.keep([1, 2, 3, 4])
        r.prefix.evict()
        r.keep([5, 6, 7, 8])
        chat = r.chat(LONG)
        r.prefix.clear()
        assert r.prefix.nbytes == {"device": 0, "leaving": 0, "host": 0}
        assert [r.keep([1, 2, 3, 4]), r.keep([5, 6, 7, 8])] == [0, 0]
        chat.say([1])
        assert r.chat([*LONG, 1, 2]).cached == 21
        store = MemoryStore()
        kept = talk(cache, tiers=[store])
        kept.keep(LONG)
        kept.prefix.flush()
        kept.prefix.clear()
        kept.check_empty()
        assert kept.keep([*LONG, 1]) == 20

    def test_flush_writes_all_and_what_is_written_is_not_written_again(self, talk: Talk) -> None:
        store = FlakyStore()
        r = talk(tiers=[HostTier(), store])
        r.keep(LONG)
        r.prefix.evict()
        r.keep([1, 2, 3])
        assert store.usage().entries == 0
        r.prefix.flush()
        assert store.usage().entries == 5 + 1
        store.calls = 0
        r.prefix.flush()
        r.prefix.evict()
        r.prefix.flush()
        assert store.calls == 0

    def test_close_ends_sessions_and_lets_go_of_the_cache(self, talk: Talk) -> None:
        store = MemoryStore()
        r = talk(tiers=[store])
        chat = r.chat(LONG)
        r.prefix.close()
        r.prefix.close()
        assert chat.session.closed
        r.check_empty()
        uses: list[Callable[[], object]] = [
            lambda: r.prefix.begin([1]), lambda: r.prefix.pin([1]), lambda: r.prefix.unpin([1]),
            r.prefix.evict, r.prefix.clear, r.prefix.flush,
            lambda: chat.session.extend([1]), lambda: chat.session.rewind(1),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(kvcache.ClosedError):
                use()
        chat.close()
        with PrefixCache(
            r.cache, tiers=[store], identity={"model": "digests"}, block_size=4, interval=8
        ) as again:
            assert again.begin([*LONG, 1]).cached == 20, "the caller's store stays open"
