"""Stores that take their time: who computes waits for none of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcache.prefix.tiers import HostTier

from .rigs.conversing import LONG, Talk, line, some_caches
from .rigs.stores import FlakyStore, SlowStore

WRITING = {"block_size": 4, "interval": 8, "write_through": True}


@pytest.mark.parametrize("host", [False, True])
@some_caches
def test_no_session_waits_for_a_store_that_has_stopped_answering(
    talk: Talk, cache: str, host: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where it parts an edge that is being written, and not where what it evicts has no room to wait."""
    store = SlowStore()
    tiers = [HostTier(2000), store] if host else [store]
    r = talk(cache, 9000, tiers, backlog=3000, options=WRITING)
    r.keep(LONG)
    r.prefix.flush()
    store.gate.clear()
    try:
        r.keep([*LONG, 1, 2, 3, 4, 5, 6])
        r.prefix.write_through()
        r.keep([*LONG, 1, 2, 3, 90])
        r.keep([*LONG[:10], 91])
        for first in range(100, 700, 100):
            chat = r.chat(line(first, 20))
            chat.say([1, 2, 3])
            chat.close()
        assert 0 < r.prefix.nbytes["writing"] <= 3000 + 9000, "one always fits"
        r.check_books()
    finally:
        store.gate.set()
    assert caplog.text.count("the stores do not keep up") <= 1
    r.prefix.flush()
    r.prefix.close()
    other = talk(cache, tiers=[store])
    assert other.peek([*LONG, 1]) == other.prefix.stats.store == 20
    assert other.peek([*LONG, 1, 2, 3, 4, 5, 6, 7]) >= 20
    other.prefix.close()


def test_an_edge_that_is_parted_while_it_is_written_is_stored_whole(talk: Talk) -> None:
    store = SlowStore()
    store.gate.clear()
    r = talk(tiers=[store])
    r.keep(LONG)
    r.prefix.evict()
    assert [node.data.tier for node in r.prefix.tree.radix_tree] == ["writing"]
    for at in (10, 7, 12):
        assert r.keep([*LONG[:at], 90 + at]) == at
        r.check_books()
    store.gate.set()
    r.prefix.flush()
    r.check_books()
    r.prefix.close()
    other = talk(tiers=[store])
    prompts = [[*LONG, 1], *([*LONG[:at], 90 + at, 1] for at in (10, 7, 12))]
    assert [other.peek(prompt) for prompt in prompts] == [20, 11, 8, 13]


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("shut", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_writing_through_leaves_nothing_of_a_parted_conversation_to_a_flush(
    talk: Talk, host: bool, shut: bool, evicted: bool
) -> None:
    """As after ``kill -9``: another process finds each of them, up to what parts inside a block, too."""
    store = SlowStore()
    r = talk(tiers=[HostTier(20000), store] if host else [store], options=WRITING)
    if shut:  # it parts what is being written
        store.gate.clear()
    r.keep(LONG)
    if not shut:
        r.prefix.tree.drain()
    r.keep([*LONG[:10], 91, 92, 93, 94])
    if evicted:
        opening = threading.Timer(0.05, store.gate.set)
        opening.start()
        r.prefix.evict()
        opening.join()
    store.gate.set()
    r.prefix.tree.drain()
    prompts = ([*LONG[:10], 91, 92, 93, 94, 1], [*LONG, 1])
    assert [talk(tiers=[store]).peek(prompt) for prompt in prompts] == [14, 20]
    r.prefix.close()


def test_what_waits_to_be_written_is_not_written_after_all_was_forgotten(talk: Talk) -> None:
    store = SlowStore()
    store.gate.clear()
    r = talk(tiers=[store], options=WRITING)
    r.keep(LONG)
    opening = threading.Timer(0.05, store.gate.set)
    opening.start()
    r.prefix.clear()
    opening.join()
    assert r.prefix.nbytes["writing"] == 0
    entries = store._entries
    assert entries is not None
    assert len(entries) <= 1, "the one that was under way"
    assert r.prefix.failed["store"] == 0, "nobody asked for it any more"
    for key in [*entries]:
        store.delete(key)
    r.prefix.close()
    assert not entries


@pytest.mark.parametrize("behind", [False, True])
def test_what_a_store_refused_is_tried_again_though_it_recovers_while_others_are_handed_over(
    talk: Talk, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = FlakyStore(), threading.Event()
    r = talk(tiers=[store], options=WRITING)
    tree: Any = r.prefix.tree
    writes, writer = tree.store.writes, tree.writer
    store.failing, store.error = frozenset({"put"}), OSError
    r.keep(LONG)
    tree.drain()
    store.failing, put, serialized = frozenset(), store.put, writer._serialized
    monkeypatch.setattr(store, "put", lambda *call: gate.wait(60) and put(*call))
    r.keep(line(100, 20))

    def recovered(entry: Any) -> Any:
        gate.set()
        with writes._changed:
            assert writes._changed.wait_for(lambda: not writes.waiting, 60)
        return serialized(entry)

    writer._serialized, writer.behind = recovered, behind
    r.keep(line(200, 20))
    r.keep(line(300, 20))
    tree.drain()
    assert talk(tiers=[store]).peek([*LONG, 1]) == 20
    r.prefix.close()
