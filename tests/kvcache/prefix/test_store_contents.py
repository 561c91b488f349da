"""What stores have of conversations stays of use: after evictions, crashes, outages and errors."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

import ml
from kvcache import InvalidRangeError
from kvcache.prefix import loading, prefix_tree
from kvcache.prefix.alphabet import Tenant
from kvcache.prefix.session import SessionReplacedError
from kvcache.prefix.tiers import HostTier, StoreTier
from kvcache.stores import MemoryStore
from kvcache.stores import keys as stores_keys
from kvcache.testing.rigs.protocol import InjectedError, only_protocol

from ...rigs.child_processes import child, finished
from .rigs.conversing import LONG, STATEFUL, ConversationSetup, Rig, Talk, some_caches
from .rigs.stores import FlakyStore, GatedStore, SlowStore, stored

ONE = ConversationSetup().token_bytes
BRANCHES = [[*LONG[:10], first, *LONG] for first in (1, 2, 3)]
"""They part inside a block."""


def keys(r: Rig, tokens: list[int], *ends: int) -> list[str]:
    chain = r.prefix.tree.keys.chain(tokens)
    return [chain.at(end) for end in ends]


def sizes(store: MemoryStore) -> int:
    return store.usage().nbytes


@some_caches
def test_a_prefix_whose_entry_is_lost_is_computed_once_and_found_again(talk: Talk, cache: str) -> None:
    """Entries behind it begin where it ended, inside a block, so that they lead nowhere without it."""
    store = stored(talk, *BRANCHES, cache=cache)
    r = talk(cache, tiers=[store])
    (lost,) = keys(r, BRANCHES[0], 10 if r.prefix.tree.divisible else 8)
    assert store.delete(lost)
    found = []
    for _ in range(4):
        r = talk(cache, tiers=[store])
        found.append(r.keep([*BRANCHES[0], 1]))
        r.prefix.close()
    assert found[0] < 31 == found[-1]


@some_caches
def test_what_a_store_has_evicted_of_what_is_kept_is_written_again(talk: Talk, cache: str) -> None:
    store = MemoryStore()
    r = talk(cache, tiers=[store])
    r.keep(LONG)
    r.prefix.flush()
    for key in keys(r, LONG, *range(1, 21)):
        store.delete(key)
    r.prefix.flush()
    r.prefix.close()
    assert talk(cache, tiers=[store]).keep([*LONG, 1]) == 20


@pytest.mark.parametrize("read", [False, True])
def test_a_store_evicts_the_end_of_a_conversation_before_its_beginning(talk: Talk, read: bool) -> None:
    store = stored(talk, *([*LONG, *range(first, first + 12)] for first in (0, 100, 200)))
    if read:
        r = talk(tiers=[store])
        assert r.keep([*LONG, *range(100, 113)]) == 32
        r.prefix.close()
    store.budget = sizes(store) - 1
    store.put("another", [bytes(8)])
    r = talk(tiers=[store])
    found = [r.peek([*LONG, *range(first, first + 13)]) for first in (0, 100, 200)]
    assert sorted(found) == [28, 32, 32]
    assert found[1] == 32 or not read


def test_of_parted_conversations_what_is_read_is_used_last_and_its_beginning_last_of_all(talk: Talk) -> None:
    store = stored(talk, *BRANCHES)
    r = talk(tiers=[store])
    assert r.keep([*BRANCHES[1], 1]) == 31
    r.tier.writes.flush()
    used = list(store._entries)[::-1]
    assert used[:9] == keys(r, BRANCHES[1], 4, 8, 10, 12, 16, 20, 24, 28, 31)


def test_the_stored_beginning_of_an_edge_that_parts_is_not_written_again(talk: Talk) -> None:
    r = talk(tiers=[MemoryStore()])
    r.keep(LONG)
    r.prefix.flush()
    assert r.keep([*LONG[:16], 90]) == 16
    assert r.prefix.tree.unwritten == ONE, "the token behind it"


@some_caches
def test_a_store_that_has_what_it_does_not_give_is_asked_for_it_once(talk: Talk, cache: str) -> None:
    store = GatedStore(stored(talk, cache=cache))
    store.get_into = lambda key, buffer: bool(store.read.append(key))
    assert talk(cache, tiers=[store]).peek([*LONG, 1]) == 0
    assert len(store.read) == len({*store.read})


def test_a_store_that_does_not_answer_has_what_it_had(talk: Talk) -> None:
    store = FlakyStore()
    r = talk(tiers=[store])
    r.keep(LONG)
    r.prefix.flush()
    store.failing = frozenset(["stat"])
    r.prefix.flush()
    assert r.prefix.tree.unwritten == 0
    assert r.tier.written == 5


def test_what_was_not_taken_is_tried_once_in_each_round(talk: Talk) -> None:
    store = FlakyStore()
    store.failing = frozenset(["put"])
    r = talk(tiers=[store])
    r.keep(LONG)
    for attempt in range(1, 4):
        assert not r.prefix.write_through()
        r.prefix.tree.drain()
        assert r.prefix.failed["store"] == attempt


def test_what_no_store_takes_keeps_nothing_else_from_it(talk: Talk) -> None:
    store = MemoryStore(budget=30 * (ONE + 8))
    r = talk(tiers=[store], capacity=120, options={"block_size": 64})
    for first, count in ((0, 40), (100, 6), (200, 40)):  # whatever comes first
        r.keep(list(range(first, first + count)))
    left = [r.prefix.write_through(1) for _ in range(12) if not r.prefix.tree.drain()]
    assert not all(left), "it says when all has been tried"
    r = talk(tiers=[store], capacity=120, options={"block_size": 64})
    assert r.peek([*range(100, 106), 1]) == 6


def test_one_snapshot_that_cannot_be_copied_keeps_no_other_from_the_stores(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(backend: Any, snapshot: Any) -> Any:
        if snapshot.nbytes > 10 * ONE:
            raise MemoryError("told to fail")
        return serialize(backend, snapshot)

    serialize = prefix_tree.serialize
    monkeypatch.setattr(prefix_tree, "serialize", limited)
    store = MemoryStore()
    r = talk(tiers=[store])
    for tokens in (LONG, [1, 2, 3, 4, 5, 6], [7, 8, 9]):
        r.keep(tokens)
    r.prefix.close()
    assert (r.prefix.closed, r.prefix.failed["host"]) == (True, 1)
    r = talk(tiers=[store])
    assert [r.peek([*tokens, 1]) for tokens in (LONG, [1, 2, 3, 4, 5, 6], [7, 8, 9])] == [0, 6, 3]


def test_a_cache_that_was_closed_first_takes_nothing_along(talk: Talk) -> None:
    store = MemoryStore()
    r = talk(tiers=[store])
    r.keep(LONG)
    r.cache.close()
    r.prefix.close()
    assert talk(tiers=[store]).peek([*LONG, 1]) == 20


@pytest.mark.parametrize("tier", [HostTier(), MemoryStore()])
def test_a_thread_that_cannot_be_started_is_an_error_and_no_wait(
    backend: ml.Backend, tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = Rig(ConversationSetup(), only_protocol(backend), tiers=[tier])
    r.keep(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("told to fail")))
        with pytest.raises(RuntimeError, match="told to fail"):
            r.prefix.evict() if isinstance(tier, HostTier) else r.prefix.write_through()
    r.prefix.evict()
    r.prefix.flush()
    assert r.keep([*LONG, 1]) == 20


@pytest.mark.parametrize("cache", STATEFUL)
def test_a_conversation_is_found_again_after_no_tier_had_room_for_its_beginning(
    talk: Talk, cache: str
) -> None:
    r = talk(cache, tiers=[HostTier(1000)], options={"interval": 100})
    r.keep(LONG)
    r.prefix.evict()
    assert [node.data.begin for node in r.prefix.tree.radix_tree if node.data] == [19]
    r.keep([*LONG, 1])
    assert r.keep([*LONG, 1, 2]) == 21
    r.check_books()


def test_a_snapshot_that_the_cache_refuses_is_dropped_and_computed_again(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk("recurrent")
    r.keep(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(r.cache, "restore", Mock(side_effect=InvalidRangeError("told to fail")))
        assert r.keep([*LONG, 1]) == 0
    assert r.keep([*LONG, 2]) == 20
    r.check_books()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_goes_on_and_waits_for_nothing_that_its_parent_writes(talk: Talk) -> None:
    store = SlowStore()
    r = talk(tiers=[store])
    r.keep(LONG)
    store.gate.clear()
    r.prefix.write_through()

    def work(_: int) -> None:
        signal.alarm(60)
        store.gate.set()
        r.prefix.flush()
        r.keep([1, 2, 3])
        r.prefix.close()
        assert len(store.waited) == 1, "what the child computed"

    finished(*child(work))
    store.gate.set()
    r.prefix.close()


def test_what_is_leaving_the_device_is_left_to_be_written(talk: Talk) -> None:
    r = talk(tiers=[HostTier(), MemoryStore()])
    assert isinstance(r.prefix.tree.store, StoreTier)
    r.keep(LONG)
    node = next(iter(r.prefix.tree.radix_tree))
    r.prefix.tree.offload(node)
    assert r.prefix.tree.write_through() is (node.data is not None and node.data.leaving is not None)
    r.prefix.flush()
    assert not r.prefix.write_through()
    assert r.prefix.tree.unwritten == 0


def test_a_rewind_that_fails_half_way_leaves_a_session_that_says_so(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk("wrapper", tiers=[HostTier()])
    chat = r.chat(LONG)
    chat.say([1])  # the window goes on
    chat.session.keep()
    r.prefix.evict()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "restore_serialized", Mock(side_effect=MemoryError()))
        with pytest.raises(MemoryError):
            chat.session.rewind(9)
    with pytest.raises(SessionReplacedError, match="a rewind that failed"):
        chat.session.extend([1])
    chat.rewind(9)
    chat.say([1, 2])
    chat.close()
    r.check_books()


def test_a_session_that_cannot_begin_leaves_its_sequence_empty(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk(tiers=[HostTier()])
    r.keep(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(r.prefix.evictor, "enforce", Mock(side_effect=ml.DeviceError("told to fail")))
        with pytest.raises(ml.DeviceError):
            r.prefix.begin([*LONG, 1])
    assert (r.prefix.sessions, r.cache.held()) == ((), {})


@pytest.mark.parametrize("error", [KeyboardInterrupt, InjectedError])
def test_a_session_whose_sequence_cannot_be_emptied_gives_it_back(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    r = talk(max_sequences=1)
    chat = r.chat(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(r.cache, "remove", Mock(side_effect=error()))
        with pytest.raises(error):
            chat.session.close()
    assert (r.prefix.sessions, r.cache.offset(chat.seq)) == ((), 20)
    assert [r.keep([*LONG, turn]) for turn in range(4)] == [20] * 4


@pytest.mark.parametrize("salt", ["", "ada"])
def test_a_block_is_hashed_once_in_a_conversations_life(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, salt: str
) -> None:
    r, hashed, link = talk(tiers=[MemoryStore()], capacity=200), Counter[bytes](), stores_keys._link

    def counted(before: bytes, parts: list[bytes | memoryview]) -> bytes:
        digest = link(before, parts)
        hashed[digest] += 1
        return digest

    monkeypatch.setattr(stores_keys, "_link", counted)
    others = [[*range(9000 + 100 * i, 9030 + 100 * i)] for i in range(3)]
    for turn in range(1, 6):
        for tokens in ([*range(23 * turn)], *others):
            r.keep(tokens, salt=salt)
        r.prefix.flush()
    chain = r.prefix.tree.chain(r.prefix.alphabet.encode([*range(115)], Tenant.of(salt, 0, None)))
    blocks = [bytes.fromhex(key) for key in chain.aligned]
    assert [hashed[block] for block in blocks] == [1] * (115 // r.prefix.tree.keys.block_size)
