"""What requests ask to be kept for longer is, and nothing is kept for ever where there is no room."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from kvcache import HostTier, InvalidRangeError
from kvcache.prefix.retention import Retention, TokenRange, merged, rank_of
from kvcache.stores import MemoryStore

from .rigs.conversing import LONG, Rig, Talk, asked, longest, room, some_caches

ONE, TWO, THREE = ([base + i for i in range(20)] for base in (100, 200, 300))


def set_clock(r: Rig) -> list[float]:
    now = [0.0]
    r.prefix.tree.now = lambda: now[0]
    return now


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [(None, None, [0, 20]), (36, None, [20, 0]), (34, None, [0, 20]), (None, 34, [20, 0]), (80, 90, [0, 20])],
)
def test_the_lowest_priority_goes_first_whatever_was_used_last(
    talk: Talk, first: int | None, second: int | None, left: list[int]
) -> None:
    r = talk()
    r.keep(ONE, retention=None if first is None else asked(first))
    r.keep(TWO, retention=None if second is None else asked(second))
    room(r, 20)
    assert longest(r, ONE, TWO) == left


def test_in_host_memory_too(talk: Talk) -> None:
    r = talk(tiers=[HostTier(1 << 20)])
    r.keep(ONE, retention=asked(90))
    r.keep(TWO)
    r.prefix.evict()
    assert r.prefix.tree.host is not None
    r.prefix.tree.host.budget = r.prefix.tree.host.nbytes // 2
    r.prefix.evictor.enforce()
    assert longest(r, ONE, TWO) == [20, 0]


@pytest.mark.parametrize(("begin", "end"), [(0, 7), (5, 9)])
def test_a_range_and_what_leads_to_it_are_kept_and_what_follows_goes(
    talk: Talk, begin: int, end: int
) -> None:
    r = talk()
    r.keep(ONE, retention=asked(90, begin=begin, end=end))
    r.keep(TWO)
    room(r, end)
    assert longest(r, ONE, TWO) == [end, 0]


def test_where_there_are_stores_ranges_are_of_whole_blocks_and_add_no_entries(talk: Talk) -> None:
    ranges = Retention([TokenRange(1, 2, 90), TokenRange(6, 7, 90), TokenRange(9, None, 10)])
    entries = []
    for retention in (None, ranges):
        store = MemoryStore()
        r = talk(tiers=[store])
        r.keep(ONE, retention=retention)
        kept = {node.end: node.data.rank for node in r.prefix.tree.radix_tree if node.data}
        r.prefix.flush()
        entries.append(store.usage().entries)
    assert kept == {4: 90, 8: 90, 12: 35, 20: 10}
    assert entries == [5, 5]


def test_after_its_duration_a_priority_is_the_default(talk: Talk) -> None:
    r = talk()
    now = set_clock(r)
    r.keep(ONE, retention=asked(90, duration=10))
    r.keep(TWO)
    for when, left in ((9.9, [20, 20]), (10.0, [20, 20])):
        now[0] = when
        room(r, 40)
        assert longest(r, ONE, TWO) == left
    room(r, 20)
    assert longest(r, ONE, TWO) == [0, 20]


def test_before_its_duration_is_over_it_holds_and_for_parts_of_it_too(talk: Talk) -> None:
    r = talk()
    now = set_clock(r)
    r.keep(ONE, retention=asked(90, duration=10))
    r.keep([*ONE[:7], 1, 2])  # parts the edge
    r.keep(TWO)
    now[0] = 9.0
    room(r, 20)
    assert longest(r, ONE, TWO) == [20, 0]
    r.keep(THREE)
    now[0] = 10.0
    r.prefix.tree.touch(r.prefix.tree.walk(r.prefix.alphabet.encode(THREE)))
    r.keep(TWO)
    assert longest(r, ONE, TWO) == [0, 20]


def test_what_is_left_of_an_edge_whose_end_went_has_its_priority_no_longer_than_the_whole(talk: Talk) -> None:
    r = talk()
    now = set_clock(r)
    r.keep(ONE, retention=asked(90, duration=10))
    r.prefix.evict(1)
    assert longest(r, ONE) == [16]
    r.keep(TWO)
    now[0] = 10.0
    room(r, 20)
    assert longest(r, ONE, TWO) == [0, 20]


def test_what_is_asked_for_again_and_again_is_watched_once(talk: Talk) -> None:
    r = talk()
    now = set_clock(r)
    for turn in range(120):
        r.keep([*ONE, turn], retention=asked(90, 1000.0 + turn))
        room(r, 30)
    assert len(r.prefix.evictor.retainer._ends) <= 64
    now[0] = 1100.0
    room(r, 20)
    assert longest(r, ONE) == [20]
    r.keep(TWO, retention=asked(80))
    room(r, 20)
    assert longest(r, ONE, TWO) == [20, 0]
    now[0] = 1120.0
    r.keep(TWO, retention=asked(80))
    room(r, 20)
    assert longest(r, ONE, TWO) == [0, 20]


def test_of_shared_tokens_the_highest_priority_counts_whoever_comes_last(talk: Talk) -> None:
    for order in itertools.permutations((90, 10, None)):
        r = talk()
        for i, priority in enumerate(order):
            r.keep([*ONE[:8], i], retention=None if priority is None else asked(priority))
        r.keep(TWO)
        room(r, 9)
        assert longest(r, ONE[:8], TWO) == [8, 0], order


def test_a_higher_priority_that_ends_uncovers_the_lower_one() -> None:
    both = merged(((90, 10.0),), ((50, math.inf),))
    assert [rank_of(both, when) for when in (0.0, 9.9, 10.0, 1e9)] == [90, 90, 50, 50]
    assert merged(both, ((40, math.inf), (90, 5.0))) == both
    assert rank_of(((90, 10.0),), 10.0) == 35


@some_caches
def test_where_everything_has_the_highest_priority_a_full_cache_goes_on(talk: Talk, cache: str) -> None:
    r = talk(cache)
    for i in range(8):
        prompt = [1000 * i + j for j in range(20)]
        r.keep(prompt, retention=asked(100))
        assert r.prefix.longest([*prompt, 0]) == 20
    assert r.prefix.tree.evicted


@some_caches
def test_nothing_goes_before_what_it_leads_to(talk: Talk, cache: str) -> None:
    r, rnd = talk(cache, 9000), random.Random(cache)
    now = set_clock(r)
    for _ in range(60):
        now[0] += rnd.random()
        tokens = rnd.choice((LONG[:6], LONG[:3])) + rnd.choices((6, 7), k=rnd.randint(1, 9))
        cut = rnd.randrange(1, len(tokens))
        ranges = [
            TokenRange(0, cut, rnd.randrange(35, 101), rnd.choice((None, 2.0))),
            TokenRange(cut, None, rnd.randrange(101)),
            TokenRange(cut, None, rnd.randrange(35, 101), 3.0),
        ]
        r.keep(
            tokens,
            retention=rnd.choice(
                (None, Retention(rnd.choice((ranges[:1], ranges[:2], ranges[::2], ranges[1:2]))))
            ),
        )
        r.prefix.evictor.enforce()
        for node in r.prefix.tree.radix_tree:
            up = node.parent
            if node.data is not None:
                assert node.data.rank == rank_of(node.data.grants, now[0])
                if up is not None and up.data is not None:
                    assert up.data.rank >= node.data.rank
    r.check_books()


@pytest.mark.parametrize(
    "bad",
    [
        {"begin": -1}, {"begin": 4, "end": 4}, {"priority": 101}, {"priority": -1}, {"priority": 1.5},
        {"duration": 0}, {"duration": -1.0}, {"duration": math.inf}, {"duration": math.nan}, {"begin": "0"},
        {"duration": "9"}, {"duration": 10**400},
        {"priority": 34, "duration": 1.0},
    ],
)  # fmt: skip
def test_a_range_out_of_range_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRangeError, match=rf"TokenRange: {[*bad][-1]}="):
        TokenRange(**bad)


def test_what_is_no_retention_is_refused_before_anything_begins(talk: Talk) -> None:
    r = talk()
    with pytest.raises(InvalidRangeError, match="retention='high'; it must be a Retention, or None"):
        r.prefix.begin(ONE, retention="high")  # type: ignore[arg-type]
    assert not r.prefix.sessions


def test_ranges_that_overlap_and_too_many_are_refused() -> None:
    with pytest.raises(InvalidRangeError, match="overlap"):
        Retention([TokenRange(4, 8), TokenRange(0, 5)])
    with pytest.raises(InvalidRangeError, match="overlap"):
        Retention([TokenRange(4), TokenRange(9, 12)])
    with pytest.raises(InvalidRangeError, match="at most 64"):
        Retention([TokenRange(i, i + 1) for i in range(65)])
    assert Retention(TokenRange(i, i + 1) for i in range(2)).cuts() == [1, 2]  # type: ignore[arg-type]
    with pytest.raises(InvalidRangeError, match="a range must be a TokenRange"):
        Retention(["0-8"])  # type: ignore[list-item]


def test_a_priority_ends_in_time_also_where_a_new_snapshot_takes_the_place_of_one_that_leads_nowhere(
    talk: Talk,
) -> None:
    r = talk("recurrent", tiers=[HostTier(1000)], options={"interval": 100})
    now = set_clock(r)
    r.keep(LONG, retention=asked(90, duration=60))
    r.prefix.evict()  # host memory has no room for the first piece
    r.keep([*LONG, 1])
    now[0] = 1000.0
    r.prefix.evictor.retainer.expire()
    assert {node.data.rank for node in r.prefix.tree.radix_tree if node.data} == {35}
