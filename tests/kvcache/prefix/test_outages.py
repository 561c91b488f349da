"""A store that is out of reach: one line of the log, left alone for a while, and used again."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import ml
from kvcache.prefix.outages import FIRST, LONGEST, READING, WRITING, Outages
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import (
    FileStore,
    Keys,
    MemoryStore,
    SerializedSnapshot,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)

from ...needs import need_server
from ...rigs.servers import ValkeyServer
from .rigs.conversing import ConversationSetup, Rig
from .rigs.stores import CALLS, Clock, FlakyStore

LONG = list(range(20))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_store_that_works_is_always_asked(clock: Clock) -> None:
    outages, store = Outages(clock), object()
    assert all(outages.asks(store, READING) for _ in range(3))
    outages.worked(store, READING)
    assert outages.asks(store, READING)


def test_a_store_that_fails_is_left_alone_each_time_longer(clock: Clock) -> None:
    outages, store, waits = Outages(clock), object(), []
    for _ in range(12):
        outages.failed(store, READING, StoreUnavailableError("gone"))
        began = clock.now
        while not outages.asks(store, READING):
            clock.now += FIRST / 2
        waits.append(clock.now - began)
    assert waits == [min(FIRST * 2**i, LONGEST) for i in range(12)]
    outages.worked(store, READING)
    assert outages.asks(store, READING)
    outages.failed(store, READING, StoreUnavailableError("gone"))
    clock.now += FIRST
    assert outages.asks(store, READING), "after it has worked, the waiting begins anew"


def test_calls_that_were_under_way_together_are_one_failure(clock: Clock) -> None:
    outages, store = Outages(clock), object()
    for wait in (FIRST, 2 * FIRST):
        for _ in range(8):
            outages.failed(store, READING, StoreUnavailableError("gone"))
            clock.now += FIRST / 16
        clock.now += wait - FIRST / 2
        asks = [outages.asks(store, READING) for _ in range(3)]
        assert asks == [True, False, False], "of those that come when the time is over one asks"


def test_a_store_that_answers_with_another_error_is_within_reach() -> None:
    class Odd(MemoryStore):
        errors: ClassVar = [RuntimeError("odd"), StoreUnavailableError("gone")]

        def prefix(self, keys: Sequence[str]) -> int:
            raise self.errors.pop()

    store = Odd()
    tier = StoreTier([store], 1 << 20)
    for _ in range(2):
        assert tier.prefix(["a" * 64]) == 0
        tier.outages.ask_again()
    assert tier.outages.asks(store, READING)
    assert tier.outages.asks(store, READING), "no call is the one that tries"
    tier.close()


class Advised(FlakyStore):
    def advise(self, keys: Sequence[str]) -> None:
        self.stat(keys)


@pytest.mark.parametrize(
    "call",
    [
        lambda tier, keys: tier.read(keys[0]).give_back(),
        lambda tier, keys: tier.prefix(keys[:1]),
        lambda tier, keys: tier.stored(keys[:1]),
        lambda tier, keys: tier.stored(keys),
        lambda tier, keys: tier.lacking(keys),
        lambda tier, keys: tier.lacking([]),
        lambda tier, keys: tier.advise(keys),
        lambda tier, keys: tier.look_up(Keys({}, 4).chain(LONG), 0, 20, True),
    ],
    ids=["read", "prefix", "stored", "more stored", "lacking", "nothing lacking", "advise", "look_up"],
)
@pytest.mark.parametrize("back", [True, False])
def test_who_takes_the_one_call_that_tries_asks_the_store_and_says_how_it_went(
    clock: Clock, call: Callable[[StoreTier, list[str]], object], back: bool
) -> None:
    one, other, keys = MemoryStore(), Advised(), ["a" * 64, "b" * 64]
    tier = StoreTier([one], 1 << 20)
    assert tier.write(keys[0], SerializedSnapshot({}, {"x": np.zeros(4, np.uint8)}))
    tier.stores, tier.outages = (one, other), Outages(clock)
    tier.outages.failed(other, READING, StoreUnavailableError("gone"))
    other.failing = frozenset() if back else frozenset(CALLS)
    clock.now += FIRST
    call(tier, keys)
    asked = other.calls > 0
    assert tier.outages.asks(other, READING) is (back or not asked)
    assert tier.outages.asks(other, READING) is (back and asked), "no other call was the one that tries"
    tier.close()


def test_a_store_that_is_full_is_within_reach(clock: Clock) -> None:
    store = MemoryStore(10)
    tier = StoreTier([store], 1 << 20)
    tier.outages = Outages(clock)
    tier.outages.failed(store, WRITING, StoreUnavailableError("gone"))
    clock.now += FIRST
    assert not tier.write("a" * 64, SerializedSnapshot({}, {"x": np.zeros(4, np.uint8)}))
    assert tier.errors["full"] == 1
    assert tier.outages.asks(store, WRITING)
    assert tier.outages.asks(store, WRITING)
    tier.close()


def test_reading_and_writing_and_other_stores_fail_apart(clock: Clock) -> None:
    outages, one, other = Outages(clock), object(), object()
    outages.failed(one, WRITING, StoreUnavailableError("is read-only"))
    assert not outages.asks(one, WRITING)
    assert outages.asks(one, READING)
    assert outages.asks(other, WRITING)


def test_an_outage_is_one_line_of_the_log_and_its_end_another(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages, store = Outages(clock), MemoryStore()
    for _ in range(5):
        outages.failed(store, READING, StoreUnavailableError("stat: no route to host"))
        outages.failed(store, WRITING, StoreUnavailableError("put: no route to host"))
        clock.now += LONGEST
    assert len(lines(caplog)) == 1
    assert "stat: no route to host" in lines(caplog)[0]
    outages.worked(store, READING)
    outages.worked(store, READING)
    assert len(lines(caplog)) == 2
    assert "read again after 150.0 s" in lines(caplog)[1]


def test_a_store_that_may_only_be_read_is_not_called_out_of_reach(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages, store = Outages(clock), object()
    for _ in range(3):
        outages.failed(store, WRITING, StoreReadOnlyError("put: /x is read-only"))
        clock.now += LONGEST
    expected = "a store is read-only: put: /x is read-only; it keeps no new content"
    assert lines(caplog) == [expected]
    assert outages.asks(store, READING)


def test_a_folder_that_was_deleted_is_promised_no_other_attempt(
    clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with FileStore(tmp_path / "kept") as store:
        shutil.rmtree(tmp_path / "kept")
        with pytest.raises(StoreUnavailableError, match="was deleted while it was open") as gone:
            store.stat(["a"])
        Outages(clock).failed(store, READING, gone.value)
    (line,) = lines(caplog)
    assert line.startswith("a store is gone: stat: the folder ")
    assert "attempt" not in line


def test_a_folder_that_cannot_be_made_says_which_can(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreUnavailableError, match=r"FileStore: .*: Not a directory; choose a folder that this"
    ):
        FileStore(tmp_path / "file")


def test_a_store_that_is_full_is_one_line_until_it_has_room(
    numpy_backend: ml.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store = FlakyStore()
    r = Rig(ConversationSetup("causal", options={"block_size": 100}), numpy_backend, tiers=[store])

    def keep(first: int, count: int, error: type[Exception] | None) -> list[str]:
        caplog.clear()
        store.failing, store.error = frozenset(["put"] if error else []), error or StoreFullError
        r.keep(range(first, first + count))
        r.prefix.flush()
        return [re.split(":| after", line)[0] for line in lines(caplog)]

    assert keep(0, 10, None) == []
    assert keep(100, 10, StoreFullError) == ["a store is full"]
    assert keep(200, 6, StoreFullError) == []
    assert keep(300, 4, None) == ["a store has room again"], "what was refused goes to it now"
    r.prefix.close()


def test_a_page_larger_than_a_budget_is_said_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Smaller ones fit between them."""
    outages, store = Outages(clock), object()
    for _ in range(3):
        outages.full(store, 1000, StoreFullError("put: 1000 bytes; the budget is 900"))
        outages.took(store, 800)
    assert len(lines(caplog)) == 1
    outages.took(store, 1000)
    assert "it refused 3 serialized snapshots" in lines(caplog)[1]


def over(backend: ml.Backend, store: Any, clock: Clock, cache: str = "causal") -> Rig:
    r = Rig(ConversationSetup(cache), backend, tiers=[store])
    r.tier.outages = Outages(clock)
    return r


def count_calls(store: FlakyStore, r: Rig) -> int:
    before = store.calls
    r.keep([*LONG, 1])
    r.prefix.evict()
    r.prefix.tree.drain()
    return store.calls - before


def test_a_prefix_cache_leaves_a_store_alone_that_is_out_of_reach(
    numpy_backend: ml.Backend, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = FlakyStore()
    r = over(numpy_backend, store, clock)
    r.keep(LONG)
    r.prefix.evict()
    r.prefix.flush()
    store.failing = frozenset(["put", "stat", "get_into", "prefix", "delete"])
    r.keep([*LONG, 7])
    r.prefix.evict()
    r.prefix.tree.drain()
    assert count_calls(store, r) == 0
    assert len(lines(caplog)) == 1
    store.failing = frozenset()
    assert count_calls(store, r) == 0, "nobody has asked yet"
    clock.now += FIRST
    computed = r.evaluated
    assert r.keep([*LONG, 2]) == 20
    assert r.evaluated == computed + 1
    r.check_books()
    r.prefix.close()


@pytest.mark.parametrize("back", [False, True])
def test_who_flushes_asks_a_store_again_and_who_closes_is_told_what_none_took(
    numpy_backend: ml.Backend, clock: Clock, caplog: pytest.LogCaptureFixture, back: bool
) -> None:
    store = FlakyStore()
    r = over(numpy_backend, store, clock)
    store.failing = frozenset(["put", "stat", "prefix"])
    r.keep(LONG)
    r.prefix.flush()
    if back:
        store.failing = frozenset()
    r.prefix.close()
    assert bool(store.usage().entries) is back
    assert ("could not be written to any store" in lines(caplog)[-1]) is not back


@pytest.mark.parametrize("cache", ["causal", "recurrent", "wrapper"])
def test_a_prefix_cache_outlives_its_server_and_uses_it_again_when_it_is_back(
    numpy_backend: ml.Backend, clock: Clock, caplog: pytest.LogCaptureFixture, cache: str
) -> None:
    need_server()
    with ValkeyServer() as server:
        r = over(numpy_backend, server.url, clock, cache)

        def turn(tokens: list[int]) -> int:
            """How many of the tokens were there; what is kept afterwards is in the store alone."""
            found = r.keep(tokens)
            r.prefix.evict()
            r.prefix.flush()
            return found

        turn(LONG)
        assert turn([*LONG, 1]) == 20
        server.kill()
        for number in range(2, 6):
            assert turn([*LONG, number]) == 0, "computed again, and no error"
            clock.now += 0.1
        assert len(lines(caplog)) == 1, lines(caplog)
        assert server.url in lines(caplog)[0]
        server.start()
        clock.now += LONGEST
        turn([*LONG, 7])
        assert turn([*LONG, 8]) == 20
        assert r.prefix.stats.store > 0
        assert len(lines(caplog)) <= 3, lines(caplog)
        r.check_books()
        r.prefix.close()
