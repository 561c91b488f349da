"""The tests of PrefixCache are themselves tested: every bug planted here has to make one fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import paging, prefix, shelf, tiers, trie
from kvcache.causal import CausalCache
from kvcache.eviction import Ledger
from kvcache.prefix import PrefixCache, Session
from kvcache.scheduling import Schedule
from kvcache.shelf import Held, Shelf
from kvcache.stores.entries import Entries
from kvcache.stores.keys import Chain, Keys
from kvcache.testing.conversing import ConversationSetup, Rig
from kvcache.testing.prefix import PrefixTests
from kvcache.testing.prefix_traces import random_ops, random_prefix_setup, run_ops
from kvcache.tiers import StoreTier
from kvcache.trie import Alphabet
from ml import DType

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, tuple[Any, ...], Callable[[Patch], None]]] = {}
"""What is wrong -> (the test that has to notice, its arguments, how to plant it).

With "" random traces have to, and the argument says what of their setups is changed.
"""
TRACES = 400


@pytest.fixture(scope="module")
def backend() -> Iterator[ml.Backend]:
    with ml.open_backend("numpy") as backend:
        yield backend


def bug(test: str = "", *arguments: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[function.__name__] = test, arguments, function
        return function

    return plant


# What random conversations notice.


@bug()
def a_prefix_restored_whole_whatever_is_asked(patch: Patch) -> None:
    original = Shelf.restore

    def restore(self: Shelf, seq: int, node: Any, target: int) -> str | None:
        return original(self, seq, node, node.end)

    patch.setattr(Shelf, "restore", restore)


@bug()
def tokens_that_were_never_evaluated_kept(patch: Patch) -> None:
    patch.setattr(Session, "computed", Session.encoded)


@bug()
def a_failed_pass_kept(patch: Patch) -> None:
    patch.setattr(Session, "__exit__", lambda self, *error: self.close())


@bug()
def two_prefixes_one_token_too_alike(patch: Patch) -> None:
    original = trie.common_length

    def common_length(one: np.ndarray, other: np.ndarray) -> int:
        return min(original(one, other) + 1, one.size, other.size)

    patch.setattr(trie, "common_length", common_length)


@bug()
def all_items_taken_for_one(patch: Patch) -> None:
    original = Alphabet._code
    patch.setattr(
        Alphabet, "_code", lambda self, token: original(self, b"" if type(token) is bytes else token)
    )


@bug()
def a_key_that_names_the_last_chunk_alone(patch: Patch) -> None:
    def at(self: Chain, position: int) -> str:
        rest = position % self.chunk
        digest = self._digests[(position - rest) // self.chunk][:1]
        return (digest + bytes([rest])).hex()

    patch.setattr(Chain, "at", at)
    patch.setattr(
        Chain,
        "aligned",
        property(lambda self: [self.at(i * self.chunk) for i in range(1, len(self._digests))]),
    )


@bug()
def a_split_edge_that_keeps_its_content_above(patch: Patch) -> None:
    original = CausalCache.split

    def split(self: CausalCache, snapshot: Any, at: int) -> Any:
        first, second = original(self, snapshot, at)
        return (second, first) if first is not None and first.positions.size else (first, second)

    patch.setattr(CausalCache, "split", split)


@bug("", {"store": "file", "budget": 0, "host": 0, "cache": "causal"})
def damage_on_disk_that_is_served(patch: Patch) -> None:
    original = Entries.read

    def read(self: Entries, key: str, view: memoryview) -> bool:
        with suppress(Exception):
            return original(self, key, view)
        return True

    patch.setattr(Entries, "read", read)


@bug("test_a_page_that_is_read_later_changes_nothing_that_was_read", "recurrent")
def a_buffer_given_to_another_page_while_it_is_read(patch: Patch) -> None:
    patch.setattr(tiers, "_UNUSED", 100)


@bug("test_what_waits_to_be_written_is_there_already", "causal")
def a_page_written_in_part_that_stands_for_the_whole(patch: Patch) -> None:
    patch.setattr(Held, "host", property(lambda self: self.page or (self.parcel and self.parcel.pages[0][1])))


@bug("test_a_conversation_is_not_evaluated_twice", "wrapper")
def snapshots_of_whole_content_without_what_they_follow(patch: Patch) -> None:
    patch.setattr(shelf, "_chain", lambda nodes: tuple(n for n in nodes if n.data and n.data.present)[-1:])


@bug()
def a_session_closed_that_leaves_its_tokens(patch: Patch) -> None:
    original = PrefixCache._end

    def end(self: PrefixCache, session: Session, *rest: Any) -> None:
        patch.setattr(self.cache, "remove", lambda *args: None)
        original(self, session, *rest)

    patch.setattr(PrefixCache, "_end", end)


@bug()
def what_left_a_tier_still_counted(patch: Patch) -> None:
    def discard(self: Ledger[Any], entry: Any) -> None:
        self._sizes.pop(id(entry), None)

    patch.setattr(Ledger, "discard", discard)


@bug()
def a_page_whose_axes_are_put_back_in_another_order(patch: Patch) -> None:
    original = paging._Reader._tensor

    def tensor(self: Any, entry: Any) -> ml.Tensor:
        name, axes = entry
        return original(self, [name, [*range(len(axes))]])

    patch.setattr(paging._Reader, "_tensor", tensor)


# What a test of its own notices.


@bug("test_one_token_is_always_left")
def no_token_left_to_evaluate(patch: Patch) -> None:
    original = PrefixCache._best
    patch.setattr(PrefixCache, "_best", lambda self, ids, limit: original(self, ids, limit + 1))


@bug("test_what_was_removed_behind_its_back_is_not_trusted", "causal")
def what_was_removed_still_trusted(patch: Patch) -> None:
    patch.setattr(Schedule, "lowest_cut", lambda self, seq: None)


@bug("test_the_least_recently_used_goes_first_and_a_hit_refreshes")
def a_hit_that_refreshes_nothing(patch: Patch) -> None:
    original = PrefixCache._fill

    def fill(self: PrefixCache, *args: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Shelf, "touch", lambda self, ids: None)
            return original(self, *args)

    patch.setattr(PrefixCache, "_fill", fill)


@bug("test_of_one_conversation_the_deepest_goes_first")
def the_beginning_evicted_first(patch: Patch) -> None:
    original = shelf._priority

    def priority(node: Any) -> Any:
        pinned, used, depth = original(node)
        return pinned, used, -depth

    patch.setattr(shelf, "_priority", priority)


@bug("test_what_is_pinned_goes_last")
def pins_that_hold_nothing(patch: Patch) -> None:
    original = shelf._priority
    patch.setattr(shelf, "_priority", lambda node: (False, *original(node)[1:]))


@bug("test_budgets_are_kept_to_the_byte")
def a_budget_one_byte_too_large(patch: Patch) -> None:
    patch.setattr(
        Ledger,
        "excess",
        property(lambda self: 0 if self.budget is None else max(0, self.nbytes - self.budget - 1)),
    )


@bug("test_each_tier_gives_back_what_it_was_given", "causal")
def what_is_evicted_dropped(patch: Patch) -> None:
    patch.setattr(Shelf, "_copied_out", lambda self, held: None)


@bug("test_each_tier_gives_back_what_it_was_given", "wrapper")
def tokens_shared_and_not_counted(patch: Patch) -> None:
    original = prefix.PrefixStats.add
    patch.setattr(prefix.PrefixStats, "add", lambda self, tokens, origins: original(self, tokens, {}))


@bug("test_what_was_computed_otherwise_is_never_shared", "salt")
def a_salt_that_no_key_knows(patch: Patch) -> None:
    original = Keys.__init__
    patch.setattr(Keys, "__init__", lambda self, given, chunk: original(self, {**given, "salt": ""}, chunk))


@bug("test_what_was_computed_otherwise_is_never_shared", "dtype")
def a_dtype_that_no_key_knows(patch: Patch) -> None:
    patch.setattr(CausalCache, "settings", lambda self: {"kind": "CausalCache"})


@bug("test_what_waits_to_be_written_is_bounded")
def a_backlog_without_end(patch: Patch) -> None:
    original = StoreTier.__init__
    patch.setattr(StoreTier, "__init__", lambda self, stores, backlog: original(self, stores, 1 << 40))


@bug("test_a_store_that_fails_costs_a_recomputation_and_no_more", "prefix", OSError)
def a_store_whose_own_errors_get_through(patch: Patch) -> None:
    def longest(self: StoreTier, chain: Any, floor: int, limit: int, divisible: bool) -> int:
        return max(tiers._longest(store, chain, floor, limit, divisible) for store in self.stores)

    patch.setattr(StoreTier, "longest", longest)


@bug("test_sharing_moves_no_data", "causal")
def a_prefix_copied_to_be_shared(patch: Patch) -> None:
    original = CausalCache.snapshot

    def snapshot(self: CausalCache, *args: Any) -> Any:
        found = original(self, *args)
        found.detach()
        return found

    patch.setattr(CausalCache, "snapshot", snapshot)


@bug("test_what_diverges_shares_all_up_to_the_nearest_snapshot", "recurrent")
def no_snapshot_where_conversations_part(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_schedule", lambda self, *args: None)


@bug("test_clear_forgets_all_but_open_sessions_and_stores", "causal")
def cells_held_after_all_is_forgotten(patch: Patch) -> None:
    kept: list[Any] = []
    original = Shelf.clear

    def clear(self: Shelf) -> None:
        kept.extend(node.data.snapshot for node in self.trie if node.data is not None)
        original(self)

    patch.setattr(Shelf, "clear", clear)


@bug("test_flush_writes_all_and_what_is_written_is_not_written_again")
def what_is_stored_written_again(patch: Patch) -> None:
    original = Shelf.settle

    def settle(self: Shelf) -> None:
        original(self)
        for node in self.trie:
            if node.data is not None:
                node.data.stored = False

    patch.setattr(Shelf, "settle", settle)


# The tests.


def notices(test: str, arguments: tuple[Any, ...], backend: ml.Backend) -> bool:
    """Whether the test fails now."""

    def talk(cache: str = "causal", budget: int | None = None, where: Any = (), **changes: Any) -> Rig:
        where = changes.pop("tiers", where)
        options = {name: changes.pop(name) for name in ("salt", "identity", "backlog") if name in changes}
        return Rig(replace(ConversationSetup(cache), **changes), backend, budget, where, **options)

    first = backend if test == "test_sharing_moves_no_data" else talk
    try:
        getattr(PrefixTests(), test)(first, *arguments)
    except (AssertionError, ml.MLError, OSError, pytest.fail.Exception):
        return True
    return False


def some_trace_fails(backend: ml.Backend, changes: dict[str, Any]) -> bool:
    for seed in range(TRACES):
        rnd = random.Random(seed)
        setup = random_prefix_setup(rnd, (DType.F32, DType.F16, DType.BF16))
        if changes:
            others = {name: value for name, value in changes.items() if name != "cache"}
            setup = replace(setup, talk=replace(setup.talk, cache=changes["cache"]), **others)
        if run_ops(setup, backend, random_ops(rnd, rnd.randrange(5, 40))) is not None:
            return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: Patch, backend: ml.Backend) -> None:
    test, arguments, plant = MUTATIONS[name]
    if test:
        assert not notices(test, arguments, backend), f"{test} fails without a bug"
    plant(monkeypatch)
    found = notices(test, arguments, backend) if test else some_trace_fails(backend, *arguments or ({},))
    monkeypatch.undo()
    assert found, f"{name}: {test or f'{TRACES} traces'} passed"
