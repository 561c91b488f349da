"""A store is asked where fetching beats computing; all times are those of a clock that the test moves."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvcache.cache import InvalidRangeError
from kvcache.prefix.break_even import BreakEven, Link

from .rigs.conversing import LONG, ConversationSetup, Rig, Talk, some_caches
from .rigs.stores import Clock, LinkedStore, stored

STORE = object()
SLOW, FAST = 1e3, 1e9
"""Bytes per second. Twenty tokens of a rig are some kilobytes."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def measured(clock: Clock, **options: Any) -> BreakEven:
    """Of 1,000 bytes per token, 10,000 bytes per second, a tenth of a second, and 20 tokens per second."""
    found = BreakEven(clock=clock, **{"slack": 0.0, **options})
    found.sized(64_000, 64)
    found.computed(64, 3.2)
    for _ in range(2):
        with found.looking(STORE):
            clock.now += 0.1
    with found.reading(STORE) as read:
        read.nbytes = 64_000
        clock.now += 6.5
    return found


def link_of(found: BreakEven) -> tuple[float, float]:
    link = found.link(STORE)
    assert link is not None
    return link.bytes_per_second, link.latency


# The rule.


def test_what_is_not_measured_is_asked() -> None:
    fresh = BreakEven()
    assert fresh.link(STORE) is fresh.tokens_per_second is fresh.bytes_per_token is None
    assert fresh.decide(STORE, 10**9).reason == "unmeasured"


def test_fetching_pays_from_where_both_take_as_long(clock: Clock) -> None:
    found = BreakEven(slack=0.0, clock=clock)
    found.sized(100, 1)
    found.computed(50, 1.0)
    for seconds in (5.0, 1.0):  # the first look-up connects
        with found.looking(STORE):
            clock.now += seconds
    with found.reading(STORE) as read:
        read.nbytes = 10_000
        clock.now += 2.0
    decisions = {tokens: found.decide(STORE, tokens) for tokens in (1, 99, 100, 101, 10_000)}
    assert {tokens: one.fetch for tokens, one in decisions.items()} == {
        1: False, 99: False, 100: True, 101: True, 10_000: True,
    }  # fmt: skip
    assert (decisions[100].fetching, decisions[100].computing) == (2.0, 2.0)
    assert (decisions[99].reason, decisions[101].reason) == ("computing", "fetching")


def test_below_the_break_even_bandwidth_no_length_pays(clock: Clock) -> None:
    found = measured(clock)
    assert link_of(found) == pytest.approx((10_000, 0.1))
    assert (found.bytes_per_token, found.tokens_per_second) == (1000, 20)
    assert not any(found.decide(STORE, tokens).fetch for tokens in (1, 100, 10**6))


def test_computing_has_to_be_faster_by_the_slack(clock: Clock) -> None:
    found = measured(clock, slack=1.0)
    assert [found.decide(STORE, tokens).fetch for tokens in (17, 19)] == [True, False]


def test_a_store_can_be_asked_whatever_it_takes(clock: Clock) -> None:
    assert measured(clock, always=True).decide(STORE, 10**6).reason == "always"


def test_measured_values_follow_what_changes(clock: Clock) -> None:
    found = measured(clock)
    for _ in range(40):
        with found.reading(STORE) as read:
            read.nbytes = 64_000
            clock.now += 0.164
        found.computed(64, 64.0)
    assert link_of(found) == pytest.approx((1e6, 0.1), rel=0.1)
    assert found.tokens_per_second == pytest.approx(1.0, rel=0.1)
    assert found.decide(STORE, 100).fetch


def test_reads_at_the_same_time_share_the_link(clock: Clock) -> None:
    found = BreakEven(clock=clock)
    with found.reading(STORE) as one, found.reading(STORE) as other:
        one.nbytes = other.nbytes = 500
        clock.now += 1.0
    assert found.link(STORE) == Link(1000.0)


class Store:
    pass


def test_what_was_measured_of_a_store_goes_with_it(clock: Clock) -> None:
    """Another one may be at its address."""
    found = BreakEven(clock=clock)
    for _ in range(3):
        store = Store()
        with found.reading(store) as read:
            assert found.link(store) is None
            read.nbytes = 500
            clock.now += 1.0
        assert found.link(store) == Link(500.0)
        assert "stores measured: 1" in repr(found)
        del store
        gc.collect()
    assert "stores measured: 0" in repr(found)


def test_a_store_that_takes_no_weak_reference_keeps_its_measurements_to_itself(clock: Clock) -> None:
    found = BreakEven(clock=clock)
    for _ in range(3):
        with found.reading(object()) as read:
            read.nbytes = 500
            clock.now += 1.0
        assert found.link(object()) is None


def test_short_passes_do_not_say_how_fast_prompts_are_computed() -> None:
    found = BreakEven()
    for tokens, seconds, known in ((31, 1.0, None), (32, 4.0, 8), (9, 0.1, 8), (0, 1.0, 8), (64, 0.0, 8)):
        found.computed(tokens, seconds)
        assert found.tokens_per_second == known


def test_the_call_that_connects_and_those_that_fail_tell_nothing(clock: Clock) -> None:
    found = BreakEven(clock=clock)
    with found.looking(STORE):
        clock.now += 50.0
    with pytest.raises(ConnectionError), found.looking(STORE):
        clock.now += 50.0
        raise ConnectionError
    with pytest.raises(ConnectionError), found.reading(STORE):
        clock.now += 50.0
        raise ConnectionError
    assert found.link(STORE) is None


def test_a_store_that_is_not_asked_is_probed_at_intervals(clock: Clock) -> None:
    found, due = measured(clock, probe_every=60.0), []
    for _ in range(13):
        clock.now += 10.0
        due.append(found.note(STORE, found.decide(STORE, 64)))
    assert [i for i, each in enumerate(due) if each] == [5, 11]
    assert found.counts == {"computing": 13}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack": -1.0}, "slack=-1.0; it must be at least 0"),
        ({"probe_every": 0.0}, "probe_every=0.0; it must be above 0"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRangeError, match=message):
        BreakEven(**options)  # type: ignore[arg-type]


# In a PrefixCache.


def linked(talk: Talk, cache: str, clock: Clock, speed: float, **options: Any) -> tuple[Rig, LinkedStore]:
    """A cache that has LONG in its store alone, and nothing measured but how fast it computes."""
    store = LinkedStore(stored(talk, cache=cache), clock, latency=0.01, bytes_per_second=speed)
    r = talk(cache, tiers=[store], break_even=BreakEven(slack=0.0, clock=clock, **options))
    r.prefix.break_even.computed(100, 1.0)
    return r, store


@some_caches
def test_over_a_fast_link_a_prefix_is_fetched_each_time(talk: Talk, cache: str, clock: Clock) -> None:
    r, _ = linked(talk, cache, clock, FAST)
    for _ in range(3):
        assert r.peek([*LONG, 9]) == 20
        r.prefix.clear()
    assert (r.prefix.stats.store, r.prefix.stats.spared) == (60, 0)
    assert r.prefix.break_even.counts["computing"] == 0


@some_caches
def test_over_a_slow_link_a_prefix_is_fetched_once_and_computed_from_then_on(
    talk: Talk, cache: str, clock: Clock
) -> None:
    r, store = linked(talk, cache, clock, SLOW)
    assert r.peek([*LONG, 9]) == 20, "nobody knew"
    r.prefix.flush()  # the store has heard that they are in use
    asked, read = store.looked, len(store.read)
    for _ in range(3):
        r.prefix.clear()
        chat = r.chat([*LONG, 9])
        assert (chat.cached, chat.session.spared) == (0, 20)
        chat.close(keep=False)
    assert (store.looked, len(store.read)) == (asked, read), "the store hears nothing of them"
    assert (r.prefix.stats.store, r.prefix.stats.spared) == (20, 60)
    assert r.prefix.break_even.counts["computing"] == 3


def test_what_is_stored_of_a_long_prompt_may_be_too_short_to_be_fetched(talk: Talk, clock: Clock) -> None:
    r, store = linked(talk, "causal", clock, FAST)
    r.peek([*LONG, 9])
    positions = np.dtype(np.int64).itemsize
    assert r.prefix.break_even.bytes_per_token == pytest.approx(ConversationSetup().token_bytes + positions)
    r.prefix.clear()
    store.latency = 0.5
    for _ in range(30):
        with r.prefix.break_even.looking(store):
            clock.now += 0.5
    chat = r.chat([*LONG, *range(50, 76)])  # worth a look, if all were there: 46 tokens take 0.46 s
    assert (chat.cached, chat.session.spared) == (0, 45), "not even asked"
    chat.close(keep=False)
    r.prefix.break_even.computed(10**6, 10**6 / 60)
    looked, read = store.looked, len(store.read)
    chat = r.chat([*LONG, *range(50, 76)])
    assert (chat.cached, chat.session.spared) == (0, 20), "asked, and computed"
    assert store.looked > looked
    assert len(store.read) == read
    chat.close(keep=False)


def test_the_next_store_is_asked_where_the_first_one_is_too_slow(talk: Talk, clock: Clock) -> None:
    kept = stored(talk)
    slow, fast = (LinkedStore(kept, clock, 0.01, speed) for speed in (SLOW, FAST))
    r = talk(tiers=[slow, fast], break_even=BreakEven(slack=0.0, clock=clock))
    r.prefix.break_even.computed(100, 1.0)
    for expected in (slow, fast, fast):
        before = len(expected.read)
        assert r.peek([*LONG, 9]) == 20
        assert len(expected.read) > before
        r.prefix.clear()
    assert r.prefix.stats.spared == 0


def test_a_store_that_became_fast_is_found_by_a_probe_which_nobody_waits_for(
    talk: Talk, clock: Clock
) -> None:
    r, store = linked(talk, "causal", clock, SLOW, probe_every=60.0)
    r.peek([*LONG, 9])
    r.prefix.clear()
    store.bytes_per_second = FAST
    assert r.peek([*LONG, 9]) == 0
    r.prefix.clear()
    clock.now += 61.0
    read = len(store.read)
    assert r.peek([*LONG, 9]) == 0
    r.prefix.clear()
    r.tier.finish_probe()
    assert len(store.read) == read + 1, "one entry"
    assert r.peek([*LONG, 9]) == 20


@pytest.mark.parametrize("starts", [True, False])
def test_a_probe_that_fails_or_has_no_thread_is_nobodys_error(
    talk: Talk, clock: Clock, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    r, store = linked(talk, "causal", clock, SLOW, probe_every=60.0)
    r.peek([*LONG, 9])
    r.prefix.clear()
    store.prefix = store.stat = Mock(side_effect=OSError("gone"))
    if not starts:
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("told to fail")))
    clock.now += 61.0
    assert r.peek([*LONG, 9]) == 0
    r.tier.finish_probe()
    assert not any(r.prefix.store_errors.values())
