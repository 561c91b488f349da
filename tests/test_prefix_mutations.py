"""The tests of PrefixCache are themselves tested: every bug planted here has to make one fail."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache.caches.causal import CausalCache
from kvcache.caches.encoder import EncoderCache
from kvcache.offload import tiers
from kvcache.offload import worker as worker
from kvcache.offload.buffer_pool import Lender
from kvcache.offload.eviction import LRUQueue
from kvcache.offload.tiers import StoreTier
from kvcache.offload.worker import OffloadJob, OffloadWorker
from kvcache.prefix import evictor
from kvcache.prefix import prefix_cache as prefix
from kvcache.prefix import prefix_tree as tree
from kvcache.prefix import radix_tree as radix_tree
from kvcache.prefix.evictor import Evictor
from kvcache.prefix.matcher import PrefixMatcher
from kvcache.prefix.open_sessions import OpenSessions
from kvcache.prefix.prefix_tree import PrefixTree, TreeEntry
from kvcache.prefix.radix_tree import Alphabet
from kvcache.prefix.session import Session
from kvcache.snapshots import cut as cutting
from kvcache.snapshots import serialize as paging
from kvcache.snapshots.schedule import REPLACED, SnapshotSchedule
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.stores.entries import Entries
from kvcache.stores.keys import Chain, Keys

from .prefix import test_finding, test_offload, test_sessions, test_tiers
from .prefix.rigs.conversing import ConversationSetup, Rig
from .prefix.rigs.stores import Way
from .prefix.test_conversations import run_machine

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, tuple[Any, ...], Callable[[Patch], None]]] = {}
"""What is wrong -> (the test that has to notice, its arguments, how to plant it).

With "" random conversations have to, and the argument says what of their setups is fixed.
"""
TRACES = 150
KEPT: list[Any] = []
"""What a planted bug never lets go of."""


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
    original = PrefixTree.restore

    def restore(self: PrefixTree, seq: int, node: Any, target: int) -> str | None:
        return original(self, seq, node, node.end)

    patch.setattr(PrefixTree, "restore", restore)


@bug()
def tokens_that_were_never_evaluated_kept(patch: Patch) -> None:
    patch.setattr(Session, "computed", Session.encoded)


@bug()
def a_failed_pass_kept(patch: Patch) -> None:
    patch.setattr(Session, "__exit__", lambda self, *error: self.close())


@bug()
def two_prefixes_one_token_too_alike(patch: Patch) -> None:
    original = radix_tree.common_length

    def common_length(one: np.ndarray, other: np.ndarray) -> int:
        return min(original(one, other) + 1, one.size, other.size)

    patch.setattr(radix_tree, "common_length", common_length)


@bug()
def all_items_taken_for_one(patch: Patch) -> None:
    original = Alphabet._code
    patch.setattr(
        Alphabet, "_code", lambda self, token: original(self, b"" if type(token) is bytes else token)
    )


@bug()
def a_key_that_names_the_last_chunk_alone(patch: Patch) -> None:
    def at(self: Chain, position: int) -> str:
        rest = position % self.block_size
        digest = self._digests[(position - rest) // self.block_size][:1]
        return (digest + bytes([rest])).hex()

    patch.setattr(Chain, "at", at)
    patch.setattr(
        Chain,
        "aligned",
        property(lambda self: [self.at(i * self.block_size) for i in range(1, len(self._digests))]),
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
    original = Entries._load

    def load(self: Entries, key: str) -> Any:
        found = original(self, key)
        return None if found is None else replace(found, digest=_Anything(found.digest))

    patch.setattr(Entries, "_load", load)


class _Anything(str):
    """Equal to every digest."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


@bug("test_a_snapshot_that_is_read_later_changes_nothing_that_was_read", "recurrent")
def a_buffer_given_to_another_page_while_it_is_read(patch: Patch) -> None:
    original = Lender.take

    def take(self: Lender, nbytes: int) -> np.ndarray:
        found = original(self, nbytes)
        self.put_back(found)
        return found

    patch.setattr(Lender, "take", take)


@bug("test_what_waits_to_be_written_is_there_already", "causal")
def a_page_written_in_part_that_stands_for_the_whole(patch: Patch) -> None:
    patch.setattr(
        TreeEntry,
        "host",
        property(lambda self: self.serialized or (self.store_write and self.store_write.entries[0][1])),
    )


@bug("test_a_conversation_is_not_evaluated_twice", "wrapper")
def snapshots_of_whole_content_without_what_they_follow(patch: Patch) -> None:
    patch.setattr(tree, "_chain", lambda nodes: tuple(n for n in nodes if n.data and n.data.present)[-1:])


@bug()
def a_session_closed_that_leaves_its_tokens(patch: Patch) -> None:
    original = OpenSessions.end

    def end(self: OpenSessions, session: Session, *rest: Any) -> None:
        patch.setattr(self._cache, "remove", lambda *args: None)
        original(self, session, *rest)

    patch.setattr(OpenSessions, "end", end)


@bug()
def what_left_a_tier_still_counted(patch: Patch) -> None:
    def discard(self: LRUQueue[Any], entry: Any) -> None:
        self._sizes.pop(id(entry), None)

    patch.setattr(LRUQueue, "discard", discard)


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
    original = PrefixMatcher.best
    patch.setattr(PrefixMatcher, "best", lambda self, ids, limit: original(self, ids, limit + 1))


@bug("test_what_was_removed_behind_its_back_is_not_trusted", "causal")
def what_was_removed_still_trusted(patch: Patch) -> None:
    patch.setattr(SnapshotSchedule, "lowest_cut", lambda self, seq: None)


@bug("test_the_least_recently_used_goes_first_and_a_hit_refreshes")
def a_hit_that_refreshes_nothing(patch: Patch) -> None:
    original = PrefixMatcher.fill

    def fill(self: PrefixMatcher, *args: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixTree, "touch", lambda self, ids: None)
            return original(self, *args)

    patch.setattr(PrefixMatcher, "fill", fill)


@bug("test_of_one_conversation_the_deepest_goes_first")
def the_beginning_evicted_first(patch: Patch) -> None:
    original = tree._priority

    def priority(node: Any) -> Any:
        pinned, used, depth = original(node)
        return pinned, used, -depth

    patch.setattr(tree, "_priority", priority)


@bug("test_what_is_pinned_goes_last")
def pins_that_hold_nothing(patch: Patch) -> None:
    original = tree._priority
    patch.setattr(tree, "_priority", lambda node: (False, *original(node)[1:]))


@bug("test_budgets_are_kept_to_the_byte")
def a_budget_one_byte_too_large(patch: Patch) -> None:
    patch.setattr(
        LRUQueue,
        "excess",
        property(lambda self: 0 if self.budget is None else max(0, self.nbytes - self.budget - 1)),
    )


@bug()
def a_budget_that_a_refused_call_forgets(patch: Patch) -> None:
    patch.setattr(Evictor, "within_budgets", lambda self: contextlib.nullcontext())


@bug("test_the_end_of_an_edge_goes_first", "causal")
def an_edge_that_is_evicted_whole(patch: Patch) -> None:
    patch.setattr(Evictor, "_end_of", lambda self, node, tokens: node)


@bug("test_what_an_open_session_uses_goes_later_than_all_that_is_not_in_use")
def what_is_in_use_evicted_first(patch: Patch) -> None:
    patch.setattr(evictor, "_frees", evictor._holds_cells)


@bug("test_the_end_of_an_edge_is_no_newer_for_a_prompt_that_parted_before_it")
def an_end_as_new_as_its_beginning(patch: Patch) -> None:
    original = PrefixTree.use
    patch.setattr(PrefixTree, "use", lambda self, last, whole=True: original(self, last))


@bug("test_what_an_eviction_costs_does_not_grow_with_what_is_kept")
def every_snapshot_looked_at_for_each_eviction(patch: Patch) -> None:
    def next_freeing(self: Evictor) -> Any:
        found = [node for node in self._tree.device if evictor._frees(node)]
        return min(found, key=tree._priority, default=None)

    patch.setattr(Evictor, "_next_freeing", next_freeing)


@bug("test_what_was_copied_out_of_the_cache_goes_in_its_turn")
def what_takes_no_cells_kept_for_ever(patch: Patch) -> None:
    patch.setattr(evictor, "_holds_cells", lambda node: True)


@bug("test_a_parted_edges_snapshots_take_the_memory_that_they_count")
def halves_that_keep_the_whole(patch: Patch) -> None:
    original = paging.serialize

    def serialize(backend: Any, snapshot: Any) -> Any:
        page = original(backend, snapshot)
        positions = page.arrays["positions"]
        return replace(page, arrays={**page.arrays, "positions": np.tile(positions, 2)[: positions.size]})

    patch.setattr(worker, "serialize", serialize)


@bug("test_an_edge_that_cannot_be_parted_stays_as_it_is")
def an_edge_parted_before_its_snapshot(patch: Patch) -> None:
    original = PrefixTree.split

    def split(self: PrefixTree, node: Any, at: int) -> Any:
        self.radix_tree.split(node, at)
        return original(self, node, at + 1)

    patch.setattr(PrefixTree, "split", split)


@bug("test_each_tier_gives_back_what_it_was_given", "causal")
def what_is_evicted_dropped(patch: Patch) -> None:
    patch.setattr(PrefixTree, "_send", lambda self, worker, node, held: None)


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


@bug("test_a_store_that_fails_costs_a_recomputation_and_no_more", "prefix")
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
    patch.setattr(OpenSessions, "_schedule", lambda self, *args: None)


@bug()
def cells_held_after_all_is_forgotten(patch: Patch) -> None:
    patch.setattr(AttentionSnapshot, "drop", lambda self: KEPT.append(self))


@bug("", {"store": "memory", "cache": "causal"})
def what_is_stored_written_again(patch: Patch) -> None:
    original = PrefixTree.settle

    def settle(self: PrefixTree) -> None:
        original(self)
        for node in self.radix_tree:
            if node.data is not None:
                node.data.stored = False

    patch.setattr(PrefixTree, "settle", settle)


# What is done behind a session's back, and going back.


@bug()
def a_sequence_that_is_replaced_in_silence(patch: Patch) -> None:
    patch.setattr(SnapshotSchedule, "replace", SnapshotSchedule.drop)


@bug("test_nothing_is_kept_of_a_sequence_that_was_replaced", "recurrent")
def tokens_of_another_kept_under_the_sessions_own(patch: Patch) -> None:
    original = OpenSessions.rolled_back

    def rolled_back(self: OpenSessions, seq: int) -> int | None:
        low = original(self, seq)
        return None if low == REPLACED else low

    patch.setattr(OpenSessions, "rolled_back", rolled_back)


@bug("test_a_cache_takes_one_prefix_cache_at_a_time")
def two_that_use_the_same_sequences(patch: Patch) -> None:
    patch.setattr(prefix, "check_unowned", lambda cache: None)


@bug("test_going_back_goes_to_the_nearest_snapshot", "sliding")
def a_way_back_that_asks_the_cache_alone(patch: Patch) -> None:
    patch.setattr(OpenSessions, "_restore_nearest", lambda self, seq, *args: self._cache.remove(seq, 0) or 0)


@bug()
def a_way_back_to_a_snapshot_of_other_tokens(patch: Patch) -> None:
    original = OpenSessions._restore_nearest

    def restore_nearest(self: OpenSessions, seq: int, ids: np.ndarray, source: Any) -> int:
        return original(self, seq, ids, source) + 1

    patch.setattr(OpenSessions, "_restore_nearest", restore_nearest)


@bug("test_a_conversation_is_not_evaluated_twice", "encoder")
def an_encoders_output_that_stays_behind(patch: Patch) -> None:
    patch.setattr(EncoderCache, "prepare_restore_snapshot", lambda self, *args: lambda: None)


# What leaves the device.


@bug("test_cells_are_free_while_their_content_is_under_way", "recurrent")
def content_under_way_that_still_lies_in_the_cache(patch: Patch) -> None:
    original = OffloadWorker.send

    def send(self: OffloadWorker, snapshot: Any, owner: object) -> OffloadJob:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(snapshot), "detach", lambda self: None)
            return original(self, snapshot, owner)

    patch.setattr(OffloadWorker, "send", send)


@bug("test_a_device_with_streams_has_made_its_copies_before_another_thread_reads_them", "wrapper")
def a_copy_that_may_not_be_made_yet(patch: Patch) -> None:
    patch.setattr(worker, "wait_for", lambda backend, snapshot: None)


@bug("test_what_is_under_way_is_bounded", 1000)
def a_way_without_end(patch: Patch) -> None:
    original = OffloadWorker.__init__
    patch.setattr(OffloadWorker, "__init__", lambda self, backend, limit: original(self, backend, 1 << 40))


@bug("test_what_is_under_way_is_there_already", "wrapper")
def content_under_way_that_nobody_finds(patch: Patch) -> None:
    patch.setattr(
        TreeEntry, "present", property(lambda self: self.snapshot is not None or self.host is not None)
    )


@bug("test_what_the_device_does_not_give_is_counted_and_computed_again", "causal")
def a_failure_that_nobody_counts(patch: Patch) -> None:
    original = OffloadWorker.finished

    def finished(self: OffloadWorker) -> Iterator[OffloadJob]:
        return (transfer for transfer in original(self) if transfer.error is None)

    patch.setattr(OffloadWorker, "finished", finished)


@bug("test_close_waits_for_what_is_under_way", "causal")
def a_close_that_does_not_wait(patch: Patch) -> None:
    patch.setattr(OffloadWorker, "drain", lambda self: None)


@bug("test_the_caller_copies_nothing_to_host_memory_unless_told_to")
def a_caller_who_copies(patch: Patch) -> None:
    def send(self: OffloadWorker, snapshot: Any, owner: object) -> OffloadJob:
        transfer = OffloadJob(snapshot, owner)
        transfer.serialized = paging.serialize(self._backend, snapshot)
        self._finished.append(transfer)
        return transfer

    patch.setattr(OffloadWorker, "send", send)


@bug("", {"store": "memory", "budget": 0, "host": 0, "cache": "causal"})
def a_page_whose_halves_change_places(patch: Patch) -> None:
    original = cutting.cut_serialized

    def cut_serialized(page: Any, at: int, own: bool = False) -> Any:
        first, second = original(page, at, own)
        return second, first

    patch.setattr(tree, "cut_serialized", cut_serialized)


# The tests.


def notices(test: str, arguments: tuple[Any, ...], backend: ml.Backend, caplog: Any) -> bool:
    """Whether the test fails now."""

    def talk(cache: str = "causal", budget: int | None = None, where: Any = (), **changes: Any) -> Rig:
        where = changes.pop("tiers", where)
        names = ("salt", "identity", "backlog", "in_flight")
        options = {name: changes.pop(name) for name in names if name in changes}
        return Rig(replace(ConversationSetup(cache), **changes), backend, budget, where, **options)

    way = Way()
    fixtures = {"talk": talk, "backend": backend, "way": way, "caplog": caplog}
    modules = (test_finding, test_offload, test_sessions, test_tiers)
    (method,) = (getattr(module, test) for module in modules if hasattr(module, test))
    names = inspect.signature(method).parameters
    given = dict(zip((name for name in names if name not in fixtures), arguments, strict=True))
    try:
        method(**given, **{name: value for name, value in fixtures.items() if name in names})
    except (AssertionError, ml.MLError, OSError, pytest.fail.Exception):
        return True
    finally:
        way.gate.set()
    return False


def some_trace_fails(backend: ml.Backend, changes: dict[str, Any]) -> bool:
    try:
        run_machine(backend, TRACES, explain=False, **changes)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: Patch, backend: ml.Backend, caplog: Any) -> None:
    test, arguments, plant = MUTATIONS[name]
    if test:
        assert not notices(test, arguments, backend, caplog), f"{test} fails without a bug"
    plant(monkeypatch)
    if test:
        found = notices(test, arguments, backend, caplog)
    else:
        found = some_trace_fails(backend, *arguments or ({},))
    monkeypatch.undo()
    assert found, f"{name}: {test or f'{TRACES} traces'} passed"
