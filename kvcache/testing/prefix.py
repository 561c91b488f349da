"""Sessions that share their prefixes: what is found, what it costs, what is kept, and what fails.

What a session sees is judged bit for bit against its own tokens (see :mod:`kvcache.testing.conversing`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache.prefix import PrefixCache, SessionLimitError
from kvcache.stores import MemoryStore, SnapshotCorrupt, StoreFull, StoreUnavailable
from kvcache.testing.conversing import CACHES, DIVISIBLE, STATEFUL, ConversationSetup, Rig
from kvcache.testing.harness import CacheCase
from kvcache.testing.prefix_traces import FlakyStore, prefix_failure
from kvcache.testing.protocol import InjectedError, Plan, only_protocol
from kvcache.tiers import HostTier
from ml import DType

__all__ = ["PrefixTests"]

Talk = Callable[..., Rig]
WHOLE = tuple(name for name in CACHES if name not in DIVISIBLE)
every_cache = pytest.mark.parametrize("cache", list(CACHES))
LONG = list(range(10, 30))
"""Twenty tokens. Whole content is kept at 8, 16, 19 and 20 of them."""
CALLS = ("put", "stat", "get_into", "prefix", "delete")


class SlowStore(MemoryStore):
    """Takes its time, and notes how many bytes wait meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], int] = int
        self.waited: list[int] = []

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        time.sleep(0.002)
        self.waited.append(self.look())
        return super().put(key, parts)


class GatedStore(MemoryStore):
    """Writes nothing before its gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        self.gate.wait()
        return super().put(key, parts)


class PrefixTests(CacheCase):
    prefix_traces: ClassVar[int] = 12
    """How many random traces are run."""

    @pytest.fixture
    def talk(self, backend: ml.Backend) -> Talk:
        """``talk(cache="causal", budget, tiers, **changes of the setup or options)``: a rig."""

        def make(cache: str = "causal", budget: int | None = None, tiers: Any = (), **changes: Any) -> Rig:
            options = {name: changes.pop(name) for name in ("salt", "identity", "backlog") if name in changes}
            return Rig(replace(ConversationSetup(cache), **changes), backend, budget, tiers, **options)

        return make

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

    def test_a_recurrent_state_inside_a_batch_is_not_there_to_be_kept(self, talk: Talk) -> None:
        r = talk("recurrent")
        chat = r.begin(LONG)
        chat.prefill(honour=False)
        chat.close()
        assert r.keep([*LONG[:14], 90]) == 0
        assert r.keep([*LONG, 90]) == 20

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
            assert prefix.nbytes == {"device": 0, "writing": 0}
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

    @pytest.mark.parametrize("what", ["salt", "identity", "dtype", "window", "chunk"])
    def test_what_was_computed_otherwise_is_never_shared(self, talk: Talk, what: str) -> None:
        store = MemoryStore()
        cache = "sliding" if what == "window" else "causal"
        others: dict[str, dict[str, Any]] = {
            "salt": {"salt": "another"},
            "identity": {"identity": {"model": "another"}},
            "dtype": {"dtype": DType.F16},
            "chunk": {"options": {"chunk": 5, "interval": 8}},
        }
        first = talk(cache, tiers=[store])
        first.keep(LONG)
        first.prefix.close()
        if what == "window":
            wide = kvcache.SlidingWindowCache(4)
            wide.init(first.backend, DType.F32, 2, 32, 32)
            prefix = PrefixCache(wide, tiers=[store], identity={"model": "digests"}, chunk=4, interval=8)
            assert prefix.begin([*LONG, 1]).cached == 0
            return
        second = talk(cache, tiers=[store], **others[what])
        assert second.keep([*LONG, 1]) == 0
        third = talk(cache, tiers=[store])
        assert third.keep([*LONG, 1]) == 20

    def test_a_store_needs_to_know_the_model(self, talk: Talk) -> None:
        with pytest.raises(kvcache.InvalidRangeError, match="identity"):
            talk(tiers=[MemoryStore()], identity={})

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
        chat = r.chat(list(range(12)))
        stats, nbytes = replace(r.prefix.stats), r.prefix.nbytes
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.prefix.begin([*LONG[:8], 1])
        assert (caught.value.asked, caught.value.free) == (8, 4)
        assert (r.prefix.stats, r.prefix.nbytes, len(r.prefix.sessions)) == (stats, nbytes, 1)
        chat.say([1, 2])
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
        assert r.prefix.nbytes == {"device": 4 * one, "host": 0}
        r.keep([5, 6, 7, 8])
        assert r.prefix.nbytes == {"device": 8 * one, "host": 0}
        r.keep([9, 10])
        assert r.prefix.nbytes == {"device": 6 * one, "host": 4 * (one + 8)}, "positions take 8 bytes each"
        r.keep([11, 12, 13, 14, 15, 16])
        assert r.prefix.nbytes == {"device": 8 * one, "host": 8 * (one + 8)}
        r.keep([17])
        assert r.prefix.nbytes == {"device": 7 * one, "host": 6 * (one + 8)}
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

    # What is moved.

    @pytest.mark.parametrize("cache", ["causal", "chunked", "sliding", "wrapper"])
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

    # Clearing and closing.

    @every_cache
    def test_clear_forgets_all_but_open_sessions_and_stores(self, talk: Talk, cache: str) -> None:
        r = talk(cache, tiers=[HostTier()])
        r.keep([1, 2, 3, 4])
        r.prefix.evict()
        r.keep([5, 6, 7, 8])
        chat = r.chat(LONG)
        r.prefix.clear()
        assert r.prefix.nbytes == {"device": 0, "host": 0}
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
        with PrefixCache(r.cache, tiers=[store], identity={"model": "digests"}, chunk=4, interval=8) as again:
            assert again.begin([*LONG, 1]).cached == 20, "the caller's store stays open"

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
        chain = r.prefix.shelf.keys.chain(LONG)
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

    # Anything at all.

    def test_random_conversations(self, backend: ml.Backend, floats: list[DType]) -> None:
        for seed in range(self.prefix_traces):
            failure = prefix_failure(backend, seed, floats)
            assert failure is None, failure
