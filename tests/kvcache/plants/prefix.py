"""Of the prefix tree, sessions, branches, offload and read-ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvcache.prefix.tiers import LookUp

from ..planting import KEPT, NOTHING, Bug, Put, after, always, like, named, prop, without
from .several import one_more


def failures_not_caught(f: Any, self: Any, *args: Any) -> Any:
    return LookUp(max(named("prefix.tiers:_longest")(store, *args) for store in self.stores), 0)


def what_leads_there_not_used(f: Any, self: Any, last: Any, whole: bool = True) -> None:
    above, last.parent = last.parent, None
    f(self, last, whole)
    last.parent = above


def forked_one_by_one(f: Any, cache: Any, seq: int, into: Any, position: int | None = None) -> None:
    for branch in into:
        f(cache, seq, [branch], position)


def failures_passed_over(f: Any, jobs: Any) -> int:
    for job in jobs:
        with contextlib.suppress(Exception):
            job()
    return len(jobs)


def lent_twice(f: Any, self: Any, nbytes: int) -> Any:
    found = f(self, nbytes)
    self.put_back(found)
    return found


def all_looked_at(f: Any, self: Any, part: int) -> Any:
    freeing = (node for node in self._tree.device if named("prefix.eviction:_frees")(node, part))
    return min(freeing, key=named("prefix.prefix_tree:priority_of"), default=None)


def marked_as_checkpoint(f: Any, cache: Any, seq: int) -> Any:
    found = f(cache, seq)
    for part in cache.caches if found.position else ():
        if hasattr(part, "checkpoint"):
            part.checkpoint(seq)
    return found


def later_checkpoints_kept(f: Any, self: Any, seq: int, mark: Any, *target: int) -> Callable[[], None]:
    points, commit = self._states.rows[seq].checkpoints, f(self, seq, mark, *target)

    def keeping() -> None:
        commit()
        self._states.rows[seq].checkpoints = points

    return keeping


def halves_that_keep_the_whole(f: Any, *args: Any) -> Any:
    found = f(*args)
    positions = found.arrays["positions"]
    return replace(found, arrays={**found.arrays, "positions": np.tile(positions, 2)[: positions.size]})


def stored_content_forgotten(f: Any, self: Any) -> None:
    f(self)
    for node in self.radix_tree:
        if node.data is not None:
            node.data.stored = False


def copied_by_the_caller(f: Any, self: Any, snapshot: Any, owner: object) -> Any:
    transfer = named("prefix.worker:OffloadJob")(snapshot, owner)
    transfer.serialized = named("snapshots.serialize:serialize")(self._backend, snapshot)
    self._finished.append(transfer)
    return transfer


def one_by_one(f: Any, tree: Any, nodes: Any) -> Any:
    return f(tree, nodes[:1])


def parted_before_its_snapshot(f: Any, self: Any, node: Any, at: int) -> Any:
    self.radix_tree.split(node, at)
    return f(self, node, at + 1)


def another_sequences_tokens(f: Any, self: Any, seq: int) -> Any:
    low = f(self, seq)
    return None if low == named("snapshots.schedule:REPLACED") else low


BUGS: dict[str, list[Bug]] = {
    "tests/kvcache/prefix/test_branches.py": [
        ("caches.branches:_check_exact", "branches_agree_with[window", NOTHING),
        ("caches.branches:keep", "the_kept_branch",
         lambda f, cache, winner, seq, losers=(): f(cache, winner, seq)),
        ("caches.branches:_reached", "branches_agree_with[wrapper",
         lambda f, part, seq, at, to, i: f(part, seq, at, to, i) if i else at),
        ("caches.branches:fork", "what_means_nothing_is_refused", forked_one_by_one),
        ("caches.branches:_return", "branches_agree_with[wrapper",
         lambda f, part, to, i: (lambda: None) if i else f(part, to, i)),
        ("caches.causal:CausalCache.prepare_copy_prefix", "branches_agree_with",
         lambda f, self, src, dst, length: f(self, src, dst, length + (length > 0))),
        ("caches.branches:mark", "forks_and_marks", marked_as_checkpoint),
        ("caches.states:StateCache.prepare_restore_snapshot", "branches_agree_with[recurrent",
         later_checkpoints_kept),
        ("storage.state_table:StateTable._is_due", "branches_agree_with[recurrent",
         lambda f, self, row: row.slot is not None and f(self, row)),
        ("caches.windows:SlidingWindowCache.reach", "window_memory_is_enough",
         prop(lambda self: None if self._unlimited else self._kept - self.window + 1)),
    ],
    "tests/kvcache/prefix/test_conversations.py": [
        ("prefix.loading:_restore", "sessions_see",
         lambda f, tree, seq, nodes, *args: f(tree, seq, nodes, *args[:-1], nodes[-1].end)),
        ("prefix.radix_tree:common_length", "sessions_see",
         lambda f, one, other: min(f(one, other) + 1, one.size, other.size)),
        ("caches.causal:CausalCache.split", "sessions_see[causal", lambda f, *args: f(*args)[::-1]),
        ("prefix.alphabet:Alphabet._number", "sessions_see",
         lambda f, self, token: f(self, b"" if type(token) is bytes else token)),
    ],
    "tests/kvcache/prefix/test_finding.py": [
        ("prefix.prefix_tree:PrefixTree._send", "each_tier_gives_back_what_it[causal]", NOTHING),
        ("prefix.prefix_tree:chain_of", "a_conversation_is_not[wrapper]",
         lambda f, nodes, *at: f(nodes)[-1:]),
        ("stores.keys:Keys.__init__", "what_was_computed_otherwise",
         lambda f, self, given, size: f(self, {**given, "salt": ""}, size)),
        ("caches.causal:CausalCache.settings", "what_was_computed_otherwise",
         always({"kind": "CausalCache"})),
        ("caches.causal:CausalCache.snapshot", "sharing_moves_no_data[causal]",
         after(lambda found: found.detach())),
        ("prefix.session:OpenSessions._schedule", "what_diverges_shares_all_up_to", NOTHING),
        ("prefix.prefix_cache:PrefixStats.add", "each_tier_gives_back",
         lambda f, self, tokens, origins: f(self, tokens, {})),
        ("caches.encoder:EncoderCache.prepare_restore_snapshot", "an_encoders_output",
         always(lambda: None)),
    ],
    "tests/kvcache/prefix/test_sessions.py": [
        ("prefix.session:Session.computed", "what_is_kept_of_a_session",
         like("prefix.session:Session.encoded")),
        ("snapshots.schedule:SnapshotSchedule.lowest_cut", "what_was_removed_behind_its_back", NOTHING),
        ("prefix.session:OpenSessions._restore_nearest", "going_back_goes_to_the_nearest[sliding",
         lambda f, self, seq, *a: self._cache.remove(seq, 0) or 0),
        ("prefix.session:OpenSessions._restore_nearest", "going_back_goes_to_the_nearest[sliding",
         one_more),
        ("snapshots.snapshot:AttentionSnapshot.drop", "clear_forgets_all",
         lambda f, self: KEPT.append(self)),
        ("snapshots.schedule:SnapshotSchedule.replace", "nothing_is_kept_of_a_sequence",
         like("snapshots.schedule:SnapshotSchedule.drop")),
        ("prefix.session:OpenSessions.rolled_back", "nothing_is_kept_of_a_sequence",
         another_sequences_tokens),
        ("prefix.prefix_cache:check_unowned", "a_cache_takes_one_prefix_cache", NOTHING),
    ],
    "tests/kvcache/prefix/test_failed_passes.py": [
        ("attention.forward_pass:ForwardPass.end", "a_session_closed_after", NOTHING),
        ("attention.forward_pass:ForwardPass.whole", "what_an_open_session", Put(True)),
        ("storage.state_table:StateTable.is_whole", "a_session_closed_after[recurrent]", always(True)),
        ("storage.cell_storage:CellStorage.missing", "when_the_very_first_pass_failed", always(())),
        ("prefix.session:Session.__exit__", "when_the_very_first_pass_raises",
         lambda f, self, *error: self.close()),
    ],
    "tests/kvcache/prefix/test_retention.py": [
        ("prefix.prefix_tree:priority_of", "the_lowest_priority_goes_first",
         lambda f, n: (0, *f(n)[1:])),
        ("prefix.eviction:Retainer.expire", "after_its_duration", NOTHING),
        ("prefix.eviction:merged", "what_leads_to_a_range", lambda f, one, other: other),
    ],
    "tests/kvcache/prefix/test_eviction.py": [
        ("prefix.prefix_tree:PrefixTree.use", "what_leads_somewhere", what_leads_there_not_used),
    ],
    "tests/kvcache/prefix/test_tenant_budgets.py": [
        ("prefix.alphabet:Alphabet.tenant_of", "what_everyone_shares",
         lambda f, self, ids: (f(self, ids)[0], 0)),
        ("prefix.prefix_tree:tenant_of", "a_tenant_over_its_budget", always("")),
        ("prefix.eviction_queue:TenantQueue.over", "a_tenant_over_its_budget",
         lambda f, self: (found := f(self)) and (self.first(), found[1])),
        ("prefix.eviction_queue:TenantQueue.fits", "what_a_tenant_may_never_have", always(True)),
    ],
    "tests/kvcache/prefix/test_break_even.py": [
        ("prefix.break_even:LEAST", "short_passes", Put(1)),
        ("prefix.break_even:BreakEven.pays", "the_next_store_is_asked", always(True)),
        ("prefix.tiers:StoreTier._start_probe", "a_store_that_became_fast", NOTHING),
        ("prefix.break_even:BreakEven.sized", "over_a_slow_link[causal", NOTHING),
    ],
    "tests/kvcache/prefix/test_prefetch.py": [
        ("prefix.prefetch:Prefetcher.look_up", "a_session_begins_from_what[causal", NOTHING),
        ("prefix.prefetch:Prefetcher.page", "a_session_begins_from_what[wrapper", NOTHING),
        ("prefix.prefetch:Prefetcher._let_go", "a_session_begins_from_what[causal", NOTHING),
        ("prefix.prefetch:Prefetcher._reserve", "what_is_read_ahead_never_takes[causal", always(True)),
    ],
    "tests/kvcache/prefix/test_tiers.py": [
        ("prefix.tiers:Lender.take", "a_snapshot_that_is_read_later[recurrent]", lent_twice),
        ("prefix.matcher:PrefixMatcher.fill", "the_least_recently_used",
         without("prefix.prefix_tree:PrefixTree", "touch")),
        ("prefix.prefix_tree:priority_of", "of_one_conversation_the", lambda f, n: (*f(n)[:2], -f(n)[2])),
        ("prefix.eviction:Evictor.within_budgets", "budgets_are_kept_to_the_byte",
         lambda f, self: contextlib.nullcontext()),
        ("prefix.eviction_queue:EvictionQueue.excess", "budgets_are_kept_to_the_byte",
         prop(lambda self: 0 if self.budget is None else max(0, self.nbytes - self.budget - 1))),
        ("prefix.eviction_queue:EvictionQueue.discard", "budgets_are_kept_to_the_byte",
         lambda f, self, entry: self._sizes.pop(id(entry), None)),
        ("prefix.eviction:Evictor._end_of", "the_end_of_an_edge_goes", lambda f, self, node, tokens: node),
        ("prefix.eviction:_frees", "what_an_open_session_uses", like("prefix.eviction:_holds_cells")),
        ("prefix.eviction:Evictor._next_freeing", "what_an_eviction_costs", all_looked_at),
        ("prefix.eviction:_holds_cells", "what_was_copied_out_of_the_cache", always(True)),
        ("prefix.prefix_tree:PrefixTree.use", "the_end_of_an_edge_is_no_newer",
         lambda f, self, last, whole=True: f(self, last)),
        ("prefix.worker:serialize", "a_parted_edges_snapshots", halves_that_keep_the_whole),
        ("prefix.prefix_tree:PrefixTree.split", "an_edge_that_cannot_be_parted", parted_before_its_snapshot),
        ("prefix.prefix_tree:PrefixTree.settle", "writing_through_waits", stored_content_forgotten),
        ("prefix.tiers:StoreTier.__init__", "what_waits_to_be",
         lambda f, self, of, n, *to: f(self, of, 1 << 40)),
        ("prefix.tiers:StoreTier.look_up", "a_store_that_fails_costs", failures_not_caught),
        ("prefix.prefix_tree:TreeEntry.host", "what_waits_to_be_written_is_there[causal]",
         prop(lambda self: self.serialized)),
        ("prefix.store_writer:cut_serialized", "an_end_that_went_to_another_tier",
         lambda f, *args: f(*args)[::-1]),
    ],
    "tests/kvcache/prefix/test_interior.py": [
        ("prefix.eviction:Evictor._absorbed", "the_end_of_every[wrapper]", always(None)),
        ("prefix.eviction:InteriorSnapshots.note", "cells_for_others[sliding]", NOTHING),
        ("snapshots.states:StateSnapshots.join", "points_inside_go_first[recurrent]",
         lambda f, self, parts: parts[-1]),
    ],
    "tests/kvcache/prefix/test_windows.py": [
        ("prefix.eviction:WindowCells.copy_out", "conversations_in_turn[wrapper-1]", always(False)),
        ("prefix.eviction:WindowCells.copy_out", "a_prompt_that_parts[wrapper]", always(False)),
        ("prefix.eviction:Evictor._has_room", "without_a_budget[sliding]", always(True)),
        ("prefix.eviction:_span", "what_is_left_of[wrapper]",
         lambda f, node: None if f(node) is None else 0),
        ("prefix.loading:_sources", "one_state_is_restored[wrapper]", one_by_one),
        ("prefix.session:Session.above", "one_state_is_restored[recurrent-True]", NOTHING),
    ],
    "tests/kvcache/prefix/test_restoring.py": [
        ("prefix.loading:_sources", "a_chain_in_host_memory", one_by_one),
        ("prefix.prefix_tree:span_of", "a_chain_in_host_memory", always((0, 0))),
        ("prefix.loading:join_serialized", "a_chain_in_host_memory", lambda f, parts: parts[-1]),
    ],
    "tests/kvcache/prefix/test_paging.py": [
        ("storage.cell_table:CellTable.join_arrivals", "cells_are_not_used_before", NOTHING),
        ("storage.cell_table:CellTable.join_arrivals", "others_go_on_while",
         lambda f, self, cells=None: f(self)),
        ("storage.cell_table:CellTable.mark_lost", "a_copy_that_fails_late", NOTHING),
        ("storage.cell_table:Arrivals.add", "pages_come_straight", NOTHING),
        ("prefix.loading:_Approach._page_in", "pages_come_straight", always(False)),
    ],
    "tests/kvcache/prefix/test_offload.py": [
        ("prefix.prefix_tree:TreeEntry.present", "what_is_under_way_is_there_already[wrapper]",
         prop(lambda self: self.snapshot is not None or self.host is not None)),
        ("prefix.worker:OffloadWorker.send", "cells_are_free_while[recurrent]",
         without("snapshots.snapshot:StateSnapshot", "detach")),
        ("prefix.worker:OffloadWorker.send", "the_caller_copies_nothing", copied_by_the_caller),
        ("prefix.worker:wait_for", "a_device_with_streams", NOTHING),
        ("prefix.worker:OffloadWorker.__init__", "what_is_under_way_is_bounded",
         lambda f, self, of, n, *to: f(self, of, 1 << 40)),
        ("prefix.worker:OffloadWorker.finished", "what_the_device_does_not_give",
         lambda f, s: (t for t in f(s) if t.error is None)),
        ("prefix.worker:OffloadWorker.drain", "close_waits_for_what_is_under_way", NOTHING),
    ],
    "tests/kvcache/prefix/test_direct_load.py": [
        ("stores.streams:check_digest", "damage_costs_the_pages", NOTHING),
        ("snapshots.reservation:CellReservation._clear", "damage_costs",
         lambda f, self, start: setattr(self, "_places", {})),
        ("storage.cell_table:CellTable.hold", "an_interrupted", like("storage.cell_table:CellTable.pin")),
        ("prefix.loading:_Approach.discard", "an_interrupted_restore",
         lambda f, self: self.tracks.clear()),
        ("prefix.loading:_Approach._tracks_of", "a_stored_conversation", lambda f, self, *_: f(self, 0, 1)),
        ("prefix.loading:_run_together", "damage_costs_the_pages", failures_passed_over),
    ],
}  # fmt: skip
