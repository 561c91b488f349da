"""What is kept of a window gets the room that is free: beside its cells, as far as the budget goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import kvcache
from kvcache.prefix.radix_tree import RadixTree
from kvcache.prefix.tiers import HostTier
from kvcache.snapshots.snapshot import AttentionSnapshot, Snapshot, SnapshotChain, unwrapped_snapshot

from .rigs import conversing
from .rigs.conversing import CACHES, CHUNK, CONV, STATE, WHOLE, WINDOW, Layers, Rig, Talk, line, read

WIDE = 5
_, (_window, _whole) = CACHES["wrapper"]
_wide = Layers(lambda position: max(0, position - WIDE), (5,))
MORE: dict[str, tuple[Callable[[], Any], tuple[Layers, ...]]] = {
    "full first": (
        lambda: kvcache.WrapperCache(kvcache.CausalCache(), kvcache.SlidingWindowCache(WINDOW)),
        (_whole, _window),
    ),
    "two windows": (
        lambda: kvcache.WrapperCache(
            kvcache.SlidingWindowCache(WINDOW), kvcache.CausalCache(), kvcache.SlidingWindowCache(WIDE)
        ),
        (_window, _whole, _wide),
    ),
    "window and chunks": (
        lambda: kvcache.WrapperCache(kvcache.SlidingWindowCache(WINDOW), kvcache.ChunkedCache(CHUNK)),
        (_window, Layers(lambda position: position - position % CHUNK, (2,))),
    ),
    "windows alone": (
        lambda: kvcache.WrapperCache(kvcache.SlidingWindowCache(WINDOW), kvcache.SlidingWindowCache(WIDE)),
        (_window, _wide),
    ),
    "states alone": (
        lambda: kvcache.RecurrentCache(CONV, STATE, checkpoints=2, checkpoint_interval=6).states,
        (Layers(layers=(), states=(0, 2)),),
    ),
}
BESIDE_ALL = ("wrapper", "full first", "two windows", "window and chunks", "recurrent and sliding")
"""Windows beside a cache that has room for all of the past."""
ALONE = ("sliding", "windows alone", "encoder and sliding", "states alone")
"""Caches whose cells do not depend on the length of a conversation."""
WINDOWS = (*BESIDE_ALL, "sliding", "sliding with memory", "windows alone", "encoder and sliding")


@pytest.fixture(autouse=True)
def more_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in MORE.items():
        monkeypatch.setitem(conversing.CACHES, name, made)


def indivisible(r: Rig) -> list[Snapshot]:
    """The snapshots of windows and of states."""
    nodes = (node.data for node in r.prefix.tree.radix_tree if node.data is not None)
    held = (entry.snapshot for entry in nodes if entry.snapshot is not None)
    each = (one for some in held for one in (some.parts if isinstance(some, SnapshotChain) else (some,)))
    return [part for one in each for part in unwrapped_snapshot(one) if not part.divisible]


def in_turn(r: Rig, conversations: int, turns: int) -> list[int]:
    """How many tokens of the turns before each turn but the first computes again."""
    said: list[list[int]] = [line(1000 * i, 9) for i in range(conversations)]
    again = []
    for turn in range(turns):
        for tokens in said:
            before = len(tokens)
            tokens += line(tokens[-1] + 1, 4)
            again += [before - r.keep(tokens, 8)] if turn else [r.keep(tokens, 8)]
            r.check_books()
    return again[conversations:]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("cache", WINDOWS)
def test_conversations_in_turn_find_all_of_their_past(talk: Talk, cache: str, sequences: int) -> None:
    """More of them than the cells of a window have room for, and no more than full attention has for."""
    r = talk(cache, max_sequences=sequences, capacity=400, max_batch=8)
    assert in_turn(r, 7, 4) == [0] * 21


@pytest.mark.parametrize(("sequences", "tiers"), [(1, "host"), (2, "none")])
@pytest.mark.parametrize("cache", [*WINDOWS, "recurrent"])
def test_what_prompts_have_in_common_is_computed_once(
    talk: Talk, cache: str, sequences: int, tiers: str
) -> None:
    r = talk(
        cache, 1 << 20, [HostTier("1MiB")] if tiers == "host" else (),
        max_sequences=sequences, capacity=400, max_batch=8,
    )  # fmt: skip
    found = [read(r, [*line(0, 45), *line(1000 * (question + 1), 20)]) for question in range(6)]
    assert found == [0, 40, *[45] * 4]


@pytest.mark.parametrize("cache", BESIDE_ALL)
def test_a_prompt_that_parts_anywhere_finds_the_snapshot_before(talk: Talk, cache: str) -> None:
    r = talk(cache, max_sequences=1, capacity=200, max_batch=8)
    read(r, line(0, 60))
    assert [r.prefix.longest([*line(0, at), 9999]) for at in (8, 15, 16, 31, 47, 56)] == [
        8,
        8,
        16,
        24,
        40,
        56,
    ]


@pytest.mark.parametrize("cache", ["wrapper", *ALONE, "two windows", "recurrent", "recurrent and sliding"])
def test_without_a_budget_copies_keep_to_the_limit_that_is_stated(talk: Talk, cache: str) -> None:
    r = talk(cache, max_sequences=2, capacity=48, max_batch=8)
    most = 0
    for i in range(70):
        tokens = line(100 * i, 9 + i % 20)
        chat = r.chat(tokens, 8)
        limit = r.prefix.limits["copies"]
        assert limit is not None
        for done in (chat.session.keep, chat.close):
            copied = sum(each.nbytes for each in indivisible(r) if not each.holds_cells)
            assert copied <= limit
            most = max(most, copied)
            done()
        assert r.prefix.longest([*tokens, 1]) == len(tokens)
        r.check_books()
    assert most > 0
    if cache in ALONE:
        assert most > limit * 3 // 4


@pytest.mark.parametrize("cache", ALONE)
def test_without_a_budget_as_many_conversations_stay_as_attention_to_everything_keeps(
    talk: Talk, cache: str
) -> None:
    """Whose tokens fit in ``max_sequences * capacity``; or, of states, 16 copies for each sequence."""
    r = talk(cache, max_sequences=2, capacity=160, max_batch=8)
    assert in_turn(r, 12, 4) == [0] * 36


def test_a_budget_holds_for_what_was_copied_out_too(talk: Talk) -> None:
    r = talk("wrapper", 4000, max_sequences=2, capacity=200, max_batch=8)
    assert max(in_turn(r, 12, 2)) > 0
    assert r.prefix.nbytes["device"] <= 4000


@pytest.mark.parametrize("cache", ["wrapper", "sliding"])
def test_what_a_device_has_no_memory_for_goes(
    talk: Talk, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = talk(cache, 1 << 20, max_sequences=2, capacity=200, max_batch=8)
    detach = Mock(side_effect=MemoryError)
    with monkeypatch.context() as patched:
        patched.setattr(AttentionSnapshot, "detach", detach)
        for i in range(6):
            r.keep(line(100 * i, 20), 8)
            r.check_books()
    assert detach.called
    assert r.prefix.longest([*line(500, 20), 1]) == 20
    assert r.prefix.longest([*line(0, 20), 1]) == 0


@pytest.mark.parametrize("cache", ["wrapper", "recurrent"])
def test_what_is_left_of_a_long_prompt_lies_at_even_distances(talk: Talk, cache: str) -> None:
    r = talk(cache, max_sequences=1, capacity=500, max_batch=8)
    tree = r.prefix.tree
    chat, counts = r.begin(line(0, 400)), []
    for part in chat.session.chunks(8):
        chat._evaluate(part)
        chat.session.keep()
        while len(tree.radix_tree) > 12 and (node := r.prefix.evictor.interior.first()) is not None:
            assert tree.absorb(node)
        ends = sorted(node.end for node in tree.radix_tree)
        gaps = [later - end for end, later in itertools.pairwise([0, *ends[:-2]])]
        counts.append(max(gaps, default=8) / min(gaps, default=8))
    assert max(counts) <= 3


@pytest.mark.parametrize("cache", ["wrapper", "recurrent"])
def test_a_long_prompt_takes_few_snapshots_that_would_be_evicted_immediately(talk: Talk, cache: str) -> None:
    """Once space is short while it is computed; it has 200 snapshots at intervals, most of which must go."""
    r = talk(cache, 80_000, max_sequences=1, capacity=2000, max_batch=8)
    read(r, line(0, 1600))
    tree = r.prefix.tree
    assert tree.evicted <= 120
    ends = sorted(node.end for node in tree.radix_tree)
    gaps = [later - end for end, later in itertools.pairwise([0, *ends[:-2]])]
    assert max(gaps) <= 3 * min(gaps)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("cache", [*WHOLE, *MORE])
def test_one_state_is_restored_of_a_long_conversation(
    talk: Talk, cache: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many snapshots lie inside: one restore, and walks that grow with its length alone."""
    match, compared, restored = RadixTree.match, [0], [0]

    def counted(tree: Any, tokens: Any, above: Any = None) -> Any:
        compared[0] += tokens.size - (0 if above is None else above.end)
        return match(tree, tokens, above)

    def took(call: Callable[[], Any]) -> tuple[int, Any]:
        compared[0] = 0
        found = call()
        return compared[0], found

    monkeypatch.setattr(RadixTree, "match", counted)
    cost = []
    for count in (50, 100):
        r = talk(cache, 1 << 22, max_sequences=1, capacity=300, max_batch=8)
        restore = r.cache.restore
        reading, _ = took(lambda r=r, count=count: read(r, line(0, count), keep))
        monkeypatch.setattr(
            r.cache,
            "restore",
            lambda *given, by=restore: restored.__setitem__(0, restored[0] + 1) or by(*given),
        )
        beginning, chat = took(lambda r=r, count=count: r.begin([*line(0, count), 9999]))
        assert chat.cached == count
        chat.prefill()
        cost.append((reading, beginning))
    assert restored == [2]
    for small, large in zip(*cost, strict=True):
        assert large <= 2.2 * small + 16
