"""What a session leaves to others and goes back to, and who may use its cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvcache
import ml
from kvcache import Batch, branches
from kvcache.prefix.prefix_cache import PrefixCache, SessionLimitError, SessionReplacedError
from kvcache.prefix.tiers import HostTier
from kvcache.stores import MemoryStore
from kvcache.testing.rigs.protocol import InjectedError
from ml import DType

from .rigs.conversing import LONG, SOME, STATEFUL, WHOLE, Rig, Talk, longest, some_caches


@some_caches
def test_what_is_kept_of_a_session_depends_on_its_end(talk: Talk, cache: str) -> None:
    r = talk(cache)
    r.chat(LONG).close(keep=False)
    assert r.prefix.nbytes == {"device": 0}
    assert r.begin(LONG).cached == 0
    r.prefix.sessions[0].close()
    r.check_empty()
    chat = r.chat(LONG)
    with pytest.raises(InjectedError), chat.session as session:
        session.extend([90, 91])
        r.start_only(session.seq, 20, 2)
        raise InjectedError
    # Of a state that a pass has begun to change nothing is left but what was kept before.
    assert r.keep([*LONG, 90, 91, 92]) == (19 if cache in STATEFUL else 20)
    chat = r.begin([1, *LONG])
    with pytest.raises(InjectedError), chat.session as session:
        chat.prefill()
        chat.say([90])
        session.extend([91])
        raise InjectedError
    assert r.prefix.sessions == ()
    assert r.keep([1, *LONG, 90, 91]) == 22, "what was evaluated before an exception"
    r.chat([5, 6]).session.extend([7])
    r.prefix.sessions[0].close()
    assert r.keep([5, 6, 7, 8]) == 2, "what was added and not evaluated is forgotten"
    r.check_books()


@some_caches
def test_a_prefix_cache_that_an_exception_leaves_keeps_what_its_sessions_would(
    talk: Talk, cache: str
) -> None:
    store = MemoryStore()
    r = talk(cache, tiers=[store])
    session = r.chat(LONG).session
    with pytest.raises(InjectedError), r.prefix:
        session.extend([90])
        r.evaluate(session.seq, LONG, [90])
        raise InjectedError
    assert (session.closed, r.prefix.closed) == (True, True)
    assert talk(cache, tiers=[store]).peek([*LONG, 90, 91]) == (19 if cache in STATEFUL else 20)


@pytest.mark.parametrize("cache", [name for name in SOME if name not in STATEFUL])
def test_a_prompt_evaluated_in_chunks_is_kept_where_an_exception_follows(talk: Talk, cache: str) -> None:
    store = MemoryStore()
    r = talk(cache, tiers=[store])
    with pytest.raises(InjectedError), r.prefix:
        session, done = r.prefix.begin(LONG), 0
        for chunk in session.chunks(7):
            r.evaluate(session.seq, LONG[:done], chunk)
            done += len(chunk)
        raise InjectedError
    assert talk(cache, tiers=[store]).peek([*LONG, 90, 91]) == 20


@some_caches
def test_what_was_removed_behind_its_back_is_not_trusted(talk: Talk, cache: str) -> None:
    r = talk(cache)
    chat = r.chat(LONG)
    r.cache.remove(chat.seq, 15)
    at = r.cache.offset(chat.seq)
    others = [*LONG[:at], 90, 91, 92, 93, 94, 95, 96]
    if r.cache.can_resume(chat.seq, at):
        r.evaluate(chat.seq, others[:at], others[at : at + 5])
    assert r.peek(LONG) <= 15
    chat.session.extend([97, 98])
    chat.close()
    assert max(r.peek(tokens) for tokens in (LONG, [*LONG, 97, 98, 1], [*others, 1])) <= 15


# Going back.


@pytest.mark.parametrize("cache", WHOLE)
def test_going_back_goes_to_the_nearest_snapshot(talk: Talk, cache: str) -> None:
    r = talk(cache)
    chat = r.chat(LONG, 7)
    chat.session.keep()
    for length, expected in ((38, 32), (24, 20), (18, 16), (14, 8), (7, 0)):
        other = r.chat([*LONG, *range(50, 50 + length)], 7)
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


@pytest.mark.parametrize(("budget", "tiers", "reached"), [(None, [HostTier()], 16), (0, [], 0)])
def test_going_back_takes_what_host_memory_has(talk: Talk, budget: Any, tiers: Any, reached: int) -> None:
    r = talk("wrapper", budget, tiers)
    chat = r.chat(LONG)
    chat.say([90])
    chat.session.keep()
    r.prefix.evict()
    chat.rewind(17)
    assert chat.session.cached == reached
    chat.close()


def test_going_back_where_others_hold_the_cells_evaluates_again(talk: Talk) -> None:
    r = talk("wrapper", max_sequences=2, capacity=10, tiers=[HostTier()])
    chat = r.chat(LONG[:10])
    chat.session.keep()
    r.prefix.evict()
    other = r.chat([*LONG[:9], 1])
    other.rewind(9)
    assert chat.session.cached == 0
    assert other.tokens == LONG[:9]


# Behind its back.


@pytest.mark.parametrize("cache", ["causal", "recurrent"])
def test_nothing_is_kept_of_a_sequence_that_was_replaced(talk: Talk, cache: str) -> None:
    r = talk(cache, max_sequences=4)
    one, two, prompt = r.chat(LONG), r.chat([1, 2, 3]), r.begin([5, 6, 7])
    parts = prompt.session.chunks(2)
    for chat in (two, prompt):
        r.cache.copy_prefix(one.seq, chat.seq, 20)
    two.close()
    with pytest.raises(SessionReplacedError, match="chunks"):
        next(parts)
    with pytest.raises(SessionReplacedError), prompt.session as session:
        session.extend([8])
    one.close()
    assert [r.keep([1, 2, 3, 4]), r.keep([5, 6, 7, 8])] == [0, 0]
    r.check_books()


@pytest.mark.parametrize("cache", ["causal", "sliding", "wrapper", "recurrent"])
def test_a_pass_behind_tokens_that_were_removed_is_refused(talk: Talk, cache: str) -> None:
    r = talk(cache)
    chat = r.chat([1, 2, 3])
    r.cache.remove(chat.seq, 0)
    chat.session.extend([4])
    with pytest.raises(kvcache.InvalidBatchError, match="position 0"):
        r.start_only(chat.seq, 3, 1)
    assert r.cache.offset(chat.seq) == 0
    r.evaluate(chat.seq, [], [1, 2, 3, 4])  # all of them again
    chat.close()
    r.prefix.close()
    if cache == "causal":  # what no PrefixCache uses may have gaps
        r.start_only(0, 3, 1)


def test_a_position_that_a_session_holds_is_given_back_by_its_rewind(talk: Talk) -> None:
    r = talk()
    chat = r.chat([1, 2, 3])
    with pytest.raises(kvcache.InvalidBatchError, match=r"position 1; call rewind\(1\) of its session"):
        r.start_only(chat.seq, 1, 1)
    chat.close()
    r.prefix.close()
    r.start_only(0, 0, 2)
    with pytest.raises(kvcache.InvalidBatchError, match=r"position 1; call remove\(0, 1\)"):
        r.start_only(0, 1, 1)


def test_a_full_cache_names_what_frees_cells(talk: Talk) -> None:
    r = talk(max_sequences=2, capacity=8, tiers=[HostTier("1MiB")])
    chat = r.chat(LONG[:10])
    chat.close()
    other = r.chat([1, *LONG[:11]])
    with pytest.raises(
        kvcache.CacheFullError, match=r"^begin: 9 cells .* 4 are free.*close one of Prefix"
    ) as hit:
        r.begin(LONG[:10])
    assert (hit.value.asked, hit.value.free, hit.value.held) == (9, 4, {other.seq: 12})
    assert [session.seq for session in r.prefix.sessions] == [other.seq]
    with pytest.raises(kvcache.CacheFullError, match=r"^start_forward.*close one of PrefixCache.sessions"):
        r.start_only(other.seq, 12, 5)
    other.close()
    assert r.keep(LONG[:10]) == 9, "as the message says"
    r.prefix.close()
    with pytest.raises(kvcache.CacheFullError, match="remove a sequence"):
        r.start_only(0, 0, 17)


@pytest.mark.parametrize("cache", ["causal", "recurrent"])
def test_a_branch_in_a_free_sequence_is_left_alone(talk: Talk, cache: str) -> None:
    r = talk(cache, max_sequences=3)
    chat = r.chat([1, 2])
    branches.fork(r.cache, chat.seq, [1])
    r.evaluate(1, [1, 2], [5])
    other = r.chat([7, 8, 9])
    assert (other.seq, r.cache.offset(1)) == (2, 3)
    r.evaluate(1, [1, 2, 5], [6])  # the branch goes on
    with pytest.raises(
        SessionLimitError, match=r"begin: 2 sessions are open.*\[1\] hold tokens of no session"
    ):
        r.begin([3])
    with pytest.raises(SessionLimitError, match="adopt: 2 sessions"):
        r.prefix.adopt([7, 8, 9], other.session.snapshots())
    branches.drop(r.cache, [1])
    assert r.begin([3]).seq == 1


@pytest.mark.parametrize("call", ["begin", "rewind", "close"])
@pytest.mark.parametrize("cache", ["causal", "recurrent"])
def test_a_pass_that_a_call_of_sessions_ended_says_so(talk: Talk, cache: str, call: str) -> None:
    r = talk(cache)
    chat = r.chat([1, 2])
    with r.backend.new_context() as ctx:
        r.cache.start_forward(ctx, Batch([2], [chat.seq]))
        {"begin": lambda: r.begin([3]), "rewind": lambda: chat.session.rewind(1), "close": chat.close}[call]()
        row = ctx.zeros((1, 1, 4), DType.F32)
        with pytest.raises(kvcache.OrderError, match=rf"put: .*start_forward.*(PrefixCache|Session).*{call}"):
            r.cache.put(ctx, row, row)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r, s: r.prefix.evict(-5), "evict: nbytes=-5"),
        (lambda r, s: r.prefix.evict(2.5), "evict: nbytes=2.5"),
        (lambda r, s: r.prefix.write_through("much"), "write_through: nbytes='much'"),
        (lambda r, s: r.prefix.publish_events(5), "publish_events: publish=5"),
        (lambda r, s: r.prefix.adopt([1, 2], "x"), "restore: .* not str"),
        (lambda r, s: s.rewind(2.0), "rewind: length=2.0"),
        (lambda r, s: s.rewind(True), "rewind: length=True"),
        (lambda r, s: list(s.chunks("2")), "chunks: size='2'"),
        (lambda r, s: list(s.chunks(0)), "chunks: size=0"),
        (lambda r, s: r.prefix.begin("hello"), "begin: tokens='hello'.*tokenizer"),
        (lambda r, s: r.prefix.begin([]), "begin: the prompt is empty"),
        (lambda r, s: r.prefix.longest(3), r"longest: tokens=3; .*pass \[3\]"),
        (lambda r, s: r.prefix.adopt([-1], []), "adopt: token -1"),
        (lambda r, s: s.extend(3), r"extend: tokens=3; .*pass \[3\]"),
        (lambda r, s: s.extend([1.5]), r"extend: token 1.5"),
        (lambda r, s: branches.fork(r.cache, s.seq, 1), r"fork: into=1; .* \[1\]"),
        (lambda r, s: branches.keep(r.cache, s.seq, 1, 2), r"keep: losers=2; .* \[1\]"),
        (lambda r, s: branches.drop(r.cache, 1), r"drop: branches=1; .* \[1\]"),
    ],
)
def test_a_prefix_cache_and_its_sessions_refuse_and_stay_as_they_were(
    talk: Talk, call: Callable[[Rig, Any], object], says: str
) -> None:
    r = talk()
    chat = r.chat([1, 2])
    with pytest.raises(kvcache.InvalidRangeError, match=f"^{says}"):
        call(r, chat.session)
    assert (chat.session.tokens, r.prefix.stats.sessions) == ([1, 2], 1)
    assert r.cache.held() == {chat.seq: 2}
    chat.say([3])


def test_a_cache_takes_one_prefix_cache_at_a_time(talk: Talk) -> None:
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
        PrefixCache(own, options=kvcache.PrefixOptions(interval=0))
    PrefixCache(own)
    with PrefixCache(own) as dropped:
        assert dropped.sessions == (), "one that is gone without close is no obstacle"
    held = PrefixCache(own).begin([1, 2])
    with pytest.raises(kvcache.InvalidRangeError, match="another PrefixCache, with 1 open session"):
        PrefixCache(own)
    held.close()


def test_a_cache_without_positions_is_refused(backend: ml.Backend) -> None:
    cache: Any = kvcache.EncoderCache()
    cache.init(backend, DType.F32, 2, 8, 8)
    with pytest.raises(kvcache.InvalidRangeError, match="EncoderCache knows no positions; wrap it"):
        PrefixCache(cache)


def test_close_ends_sessions_and_lets_go_of_the_cache(talk: Talk) -> None:
    store = MemoryStore()
    r = talk(tiers=[store])
    chat = r.chat(LONG)
    r.prefix.close()
    r.prefix.close()
    assert chat.session.closed
    r.check_empty()
    uses: list[Callable[[], object]] = [
        lambda: r.prefix.begin([1]), r.prefix.evict, r.prefix.clear, r.prefix.flush,
        lambda: chat.session.extend([1]), lambda: chat.session.rewind(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(kvcache.ClosedError):
            use()
    chat.close()
    with PrefixCache(
        r.cache,
        tiers=[store],
        identity={"model": "digests"},
        block_size=4,
        options=kvcache.PrefixOptions(interval=8),
    ) as again:
        assert again.begin([*LONG, 1]).cached == 20, "the caller's store stays open"


@some_caches
def test_clear_forgets_all_but_stores_and_what_open_sessions_hold_for_themselves(
    talk: Talk, cache: str
) -> None:
    store = MemoryStore()
    r = talk(cache, tiers=[HostTier(), store])
    r.keep([1, 2, 3, 4])
    chat = r.chat(LONG)
    r.prefix.flush()
    r.prefix.clear()
    assert not any(r.prefix.nbytes.values())
    chat.say([1])
    other = r.chat([*LONG, 1, 2])
    assert other.cached == 0, "computed by what was forgotten"
    assert r.keep([1, 2, 3, 4, 5]) == r.prefix.stats.store == 4
    other.close(keep=False)
    chat.session.keep()
    chat.close()
    assert r.peek([*LONG, 1, 2]) == 0
    r.prefix.clear()
    r.check_empty()


@pytest.mark.parametrize("cache", SOME)
def test_what_leaves_a_kept_conversation_before_it_leaves_an_open_one_is_kept_where_it_belongs(
    talk: Talk, cache: str
) -> None:
    """Shared with the open session it reaches further than its path in the tree, whose last edge parts."""
    r = talk(cache)
    one, other = [*LONG[:8], 1, 2], [*LONG[:8], 3, 4]
    running = r.chat(one)
    r.keep([LONG[0], 60, 61, 62])
    r.keep(other)
    running.close(keep=False)
    assert longest(r, [LONG[0], 60, 61, 62, *other[4:]]) == [4], "wrong tokens"
    assert longest(r, other) == [len(other)]
    assert r.peek([*other, 5]) == len(other)
