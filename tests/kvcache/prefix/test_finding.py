"""What a session starts from, what that costs, and whose it is, in exact figures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, PrefixOptions
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.radix_tree import RadixTree
from kvcache.prefix.tiers import HostTier
from kvcache.stores import FileStore, MemoryStore
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml import DType

from ...rigs.memory import peak_memory
from .rigs.conversing import LONG, SOME, WHOLE, ConversationSetup, Rig, Talk, every_cache, some_caches
from .rigs.stores import CALLS, FlakyStore, stored


def turn(r: Rig, history: list[int], rnd: random.Random) -> int:
    """A question of three tokens and an answer of four; how many tokens were computed for it."""
    before = r.evaluated
    history += rnd.choices(range(50), k=3)
    chat = r.chat(history, 7)
    for _ in range(4):
        history.append(rnd.randrange(50))
        chat.say(history[-1:])
    chat.close()
    return r.evaluated - before


@every_cache
def test_a_conversation_is_not_evaluated_twice(talk: Talk, cache: str) -> None:
    r, rnd, history = talk(cache, capacity=120), random.Random(1), [*LONG]
    assert [turn(r, history, rnd) for _ in range(6)] == [27, *[7] * 5], "the question and the answer"
    computed = r.evaluated
    assert r.keep([*history, 51]) == len(history)
    assert r.evaluated == computed + 1
    r.check_books()


@some_caches
def test_a_session_walks_the_tree_once_when_it_begins_and_once_when_it_closes(
    talk: Talk, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk(cache, tiers=[HostTier()])
    r.keep(LONG)
    walks = Mock(side_effect=RadixTree.match, autospec=True)
    monkeypatch.setattr(RadixTree, "match", lambda *args: walks(*args))
    for place in ("device", "host"):
        if place == "host":
            r.prefix.evict()
        chat = r.chat([*LONG, 90])
        assert (chat.cached, walks.call_count) == (20, 1), place
        chat.say([7])
        chat.close()
        assert walks.call_count == 2, place
        walks.reset_mock()


@pytest.mark.parametrize("cache", WHOLE)
def test_what_diverges_shares_all_up_to_the_nearest_snapshot(talk: Talk, cache: str) -> None:
    r = talk(cache)
    r.keep(LONG)
    assert r.keep([*LONG[:14], 90, 5, 5]) == 8
    assert r.keep([*LONG[:14], 91, 5, 5]) == 14, "one was taken where the two parted"
    assert r.keep([*LONG[:18], 92, 5, 5]) == 16
    assert r.keep([*LONG[:7], 93]) == 0


def test_a_recurrent_state_inside_a_batch_is_not_there_to_be_kept_and_that_is_said_once(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    r = talk("recurrent")
    for first in (0, 50):
        chat = r.begin([first, *LONG])
        chat.prefill(honour=False)
        chat.close()
    assert r.prefix.stats.skipped == 6
    (said,) = caplog.messages
    assert "passed [8, 16, 20]" in said
    assert r.keep([0, *LONG[:13], 90]) == 0
    assert r.keep([0, *LONG, 90]) == 21


@pytest.mark.parametrize("cut", ["shift_context", "remove"])
def test_what_lies_behind_a_cut_is_not_said_to_be_passed_by_a_batch(
    backend: ml.Backend, ctx: ml.Context, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvcache.SlidingWindowCache(5, shift=lambda ctx, layer, key, offsets: key)
    cache.init(backend, DType.F32, 2, 60, 16)
    prefix = PrefixCache(cache, options=PrefixOptions(interval=3))
    session = prefix.begin(range(12))

    def evaluate(count: int) -> None:
        at = cache.offset(session.seq)
        cache.start_forward(ctx, Batch(range(at, at + count), [session.seq] * count))
        cache.put(ctx, *[ctx.zeros((count, 1, 4), DType.F32)] * 2)

    for part in session.chunks(16):
        evaluate(len(part))
    if cut == "shift_context":
        assert cache.shift_context(session.seq, 2) == 5
    else:
        cache.remove(session.seq, 2, 7)
    session.extend([1])
    evaluate(1)
    session.close()
    assert (prefix.stats.skipped, caplog.messages) == (0, [])


@some_caches
def test_of_all_that_is_there_the_longest_is_taken(talk: Talk, cache: str) -> None:
    store = stored(talk, LONG[:12], cache=cache, store=FlakyStore())
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
    assert r.chat([*LONG[:12], 91, 92, 93, 94, 95, 96]).cached == 17, "an open session has more than both"
    live.close()


def test_the_device_goes_on_inside_an_edge_where_what_a_store_gave_back_ends(talk: Talk) -> None:
    r = talk(tiers=[FlakyStore()])
    r.keep(LONG[:8])
    r.keep(LONG)
    r.prefix.flush()
    (first,) = r.prefix.tree.radix_tree.root.children.values()
    r.prefix.tree.offload(first)
    before = replace(r.prefix.stats)
    assert r.keep([*LONG[:14], 90]) == 14
    assert (r.prefix.stats.store - before.store, r.prefix.stats.device - before.device) == (12, 2)
    assert r.prefix.tree.evicted == 0, "what a store has is not gone from everywhere"


@pytest.mark.parametrize("cache", WHOLE)
def test_behind_what_a_store_gave_back_the_device_goes_on_to_the_end(talk: Talk, cache: str) -> None:
    r = talk(cache, tiers=[FlakyStore()])
    r.keep(LONG[:9])
    r.prefix.flush()
    r.keep(LONG)
    for node in [node for node in r.prefix.tree.radix_tree if node.end <= 9]:
        r.prefix.tree.offload(node)
    assert r.keep([*LONG, 90]) == 20
    assert r.prefix.stats.device >= 1


@some_caches
def test_each_tier_gives_back_what_it_was_given(talk: Talk, cache: str) -> None:
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
        r.prefix.close()
        r.check_empty()


@every_cache
def test_a_store_serves_another_process(talk: Talk, cache: str) -> None:
    """Also one that dies: it loses what was computed since it last wrote through."""
    store = MemoryStore()
    first = talk(cache, tiers=[store])
    first.keep(LONG)
    kept = first.prefix.nbytes["device"]
    assert not first.prefix.write_through()
    assert first.prefix.nbytes["device"] == kept, "nothing is evicted for it"
    first.tier.writes.flush()
    first.keep([*LONG, 90, 91])
    second = talk(cache, tiers=[store])
    assert second.keep([*LONG, 90, 91]) == second.prefix.stats.store == 20
    second.prefix.evict()
    second.prefix.flush()  # entries of one chain are found in the store once all of them are written
    assert second.keep([*LONG, 90, 91, 92]) == 22


def test_a_conversation_goes_on_on_another_backend(tmp_path: Path, open_any: Callable) -> None:
    for cache in SOME:
        history, computed = [*LONG], []
        for name in ("numpy", "torch", "mlx", "numpy"):
            with open_any(name) as other, FileStore(tmp_path / cache, durable=False) as store:
                r = Rig(ConversationSetup(cache), other, tiers=[store])
                computed.append(turn(r, history, random.Random(len(history))))
                r.prefix.close()
        assert computed == [27, 7, 7, 7]


# Who shares with whom.


def test_items_are_told_apart(talk: Talk) -> None:
    store = MemoryStore()
    r = talk(tiers=[store])
    r.keep([1, b"a cat", 2, 3])
    assert r.keep([1, b"a cat", 2, 4]) == 3
    assert r.keep([1, b"a dog", 2, 3]) == 1
    r.prefix.close()
    chat = talk(tiers=[store]).begin([1, b"a dog", 2, 3, b"a cat"])
    assert chat.cached == 4, "numbers that this one gave other items mean nothing to that one"
    assert chat.session.tokens == [1, b"a dog", 2, 3, b"a cat"]


@pytest.mark.parametrize("what", ["salt", "identity", "dtype", "block_size", "window"])
def test_what_was_computed_otherwise_is_never_shared(talk: Talk, what: str) -> None:
    store = MemoryStore()
    changed: dict[str, dict[str, Any]] = {
        "salt": {"salt": "another"},
        "identity": {"identity": {"model": "another"}},
        "dtype": {"dtype": DType.F16},
        "block_size": {"options": {"block_size": 5, "interval": 8}},
        "window": {"cache": "sliding with memory"},
    }
    cache = "sliding" if what == "window" else "causal"
    first = talk(cache, tiers=[store])
    first.keep(LONG)
    first.prefix.close()
    other: Any = {"cache": cache, **changed[what]}
    assert talk(tiers=[store], **other).keep([*LONG, 1]) == (20 if what == "window" else 0)
    if what == "window":
        narrow = first.cache.window
        for wide in (kvcache.SlidingWindowCache(4), kvcache.SlidingWindowCache(narrow, keep=2)):
            wide.init(first.backend, DType.F32, 2, 32, 32)
            options = PrefixOptions(interval=8)
            prefix = PrefixCache(
                wide, tiers=[store], identity={"model": "digests"}, block_size=4, options=options
            )
            assert prefix.begin([*LONG, 1]).cached == 0
    assert talk(cache, tiers=[store]).keep([*LONG, 1]) == 20


def test_a_store_needs_to_know_the_model(talk: Talk) -> None:
    with pytest.raises(kvcache.InvalidRangeError, match="identity"):
        talk(tiers=[MemoryStore()], identity={})


def test_an_encoders_output_goes_with_the_token_that_it_came_with(talk: Talk) -> None:
    r = talk("encoder", tiers=[HostTier()])
    first = r.chat([0, 1, b"a picture", 2, 3, 5, 6])
    second = r.chat([0, 1, b"a picture", 2, 3, 7])
    assert (first.cached, second.cached) == (0, 5)
    assert r.keep([0, 1, b"another picture", 2, 3, 7]) == 2
    nbytes = r.cache.caches[0].nbytes
    third = r.chat([0, 1, b"a picture", 8])
    assert third.cached == 3
    assert r.cache.caches[0].nbytes == nbytes, "shared, not copied"
    for chat in (first, second, third):
        chat.close()
    r.prefix.evict()
    assert r.cache.caches[0].nbytes == 0
    assert r.keep([0, 1, b"a picture", 2, 3, 5, 9]) == 6


# What is moved.


@every_cache
def test_sharing_moves_no_data(backend: ml.Backend, cache: str) -> None:
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


def test_a_prefix_from_host_memory_is_copied_once_for_all_who_use_it(backend: ml.Backend) -> None:
    plan = Plan()
    r = Rig(ConversationSetup(), only_protocol(backend, plan), tiers=[HostTier()])
    r.keep(LONG)
    r.prefix.evict()
    assert r.begin([*LONG, 1]).cached == 20
    plan.arm(None)
    assert r.begin([*LONG, 2]).cached == 20
    assert plan.calls == []


def test_reuse_does_not_double_peak_memory(backend: ml.Backend) -> None:
    heads, dim, tokens = 2, 64, 1024
    cache = CausalCache()
    cache.init(backend, DType.F32, 4, tokens + 8, tokens)
    prefix, prompt = PrefixCache(cache), list(range(tokens))
    with prefix.begin(prompt) as session, backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(prompt, [session.seq] * tokens))
        rows = ctx.zeros((tokens, heads, dim), DType.F32)
        cache.put(ctx, rows, rows)
    content, allocated = tokens * heads * dim * 2 * 4, cache.nbytes
    assert prefix.nbytes == {"device": content}
    with peak_memory() as most:
        sessions = [prefix.begin([*prompt, number]) for number in range(4)]
        assert most() < content / 4
    assert [session.cached for session in sessions] == [tokens] * 4
    assert cache.nbytes == allocated


@some_caches
def test_forks_that_hold_nothing_go_with_the_last_branch(talk: Talk, cache: str) -> None:
    r = talk(cache)
    for tail in (1, 2):
        r.keep([*LONG[:8], tail, *LONG[9:16]])
    tree = r.prefix.tree
    for _ in range(2):
        for node in sorted(tree.radix_tree, key=lambda node: (node.end, node.prefix().tolist())):
            if node.parent is not None and node.data is not None:
                tree.drop(node)
        r.check_books()
    assert not len(tree.radix_tree)
