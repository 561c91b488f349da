"""Of the prefix tree, sessions, branches, offload and read-ahead."""

from __future__ import annotations

import contextlib
from typing import Any

from ..planting import KEPT, NOTHING, Bug, Put, after, always, like, named, prop


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


def all_looked_at(f: Any, self: Any, part: int) -> Any:
    freeing = (node for node in self._tree.device if named("prefix.eviction:_frees")(node, part))
    return min(freeing, key=named("prefix.prefix_tree:priority_of"), default=None)


def marked_as_checkpoint(f: Any, cache: Any, seq: int) -> Any:
    found = f(cache, seq)
    for part in cache.caches if found.position else ():
        if hasattr(part, "checkpoint"):
            part.checkpoint(seq)
    return found


def stored_content_forgotten(f: Any, self: Any) -> None:
    f(self)
    for node in self.radix_tree:
        if node.data is not None:
            node.data.stored = False


def parted_before_its_snapshot(f: Any, self: Any, node: Any, at: int) -> Any:
    self.radix_tree.split(node, at)
    return f(self, node, at + 1)


BUGS: dict[str, list[Bug]] = {
    "tests/kvcache/prefix/test_branches.py": [
        ("caches.branches:keep", "the_kept_branch",
         lambda f, cache, winner, seq, losers=(): f(cache, winner, seq)),
        ("caches.branches:fork", "what_means_nothing_is_refused", forked_one_by_one),
        ("caches.branches:mark", "forks_and_marks", marked_as_checkpoint),
        ("caches.windows:SlidingWindowCache.reach", "window_memory_is_enough",
         prop(lambda self: None if self._unlimited else self._kept - self.window + 1)),
    ],
    "tests/kvcache/prefix/test_conversations.py": [
        ("prefix.radix_tree:common_length", "sessions_see",
         lambda f, one, other: min(f(one, other) + 1, one.size, other.size)),
        ("prefix.alphabet:Alphabet._number", "sessions_see",
         lambda f, self, token, op: f(self, b"" if type(token) is bytes else token, op)),
    ],
    "tests/kvcache/prefix/test_finding.py": [
        ("prefix.prefix_tree:PrefixTree._send", "each_tier_gives_back_what_it[causal]", NOTHING),
        ("caches.causal:CausalCache.settings", "what_was_computed_otherwise",
         always({"kind": "CausalCache"})),
        ("caches.causal:CausalCache.snapshot", "sharing_moves_no_data[causal]",
         after(lambda found: found.detach())),
    ],
    "tests/kvcache/prefix/test_sessions.py": [
        ("snapshots.snapshot:AttentionSnapshot.drop", "clear_forgets_all",
         lambda f, self: KEPT.append(self)),
    ],
    "tests/kvcache/prefix/test_failed_passes.py": [
        ("attention.forward_pass:ForwardPass.whole", "what_an_open_session", Put(True)),
    ],
    "tests/kvcache/prefix/test_retention.py": [
        ("prefix.eviction:Retainer.expire", "after_its_duration", NOTHING),
    ],
    "tests/kvcache/prefix/test_eviction.py": [
        ("prefix.prefix_tree:PrefixTree.use", "what_leads_somewhere", what_leads_there_not_used),
    ],
    "tests/kvcache/prefix/test_tenant_budgets.py": [
        ("prefix.alphabet:Alphabet.tenant_of", "what_everyone_shares",
         lambda f, self, ids: (f(self, ids)[0], 0)),
        ("prefix.eviction_queue:TenantQueue.over", "a_tenant_over_its_budget",
         lambda f, self: (found := f(self)) and (self.first(), found[1])),
        ("prefix.eviction_queue:TenantQueue.fits", "what_a_tenant_may_never_have", always(True)),
    ],
    "tests/kvcache/prefix/test_break_even.py": [
        ("prefix.break_even:LEAST", "short_passes", Put(1)),
    ],
    "tests/kvcache/prefix/test_tiers.py": [
        ("prefix.eviction:Evictor.within_budgets", "budgets_are_kept_to_the_byte",
         lambda f, self: contextlib.nullcontext()),
        ("prefix.eviction_queue:EvictionQueue.excess", "budgets_are_kept_to_the_byte",
         prop(lambda self: 0 if self.budget is None else max(0, self.nbytes - self.budget - 1))),
        ("prefix.eviction:Evictor._end_of", "the_end_of_an_edge_goes", lambda f, self, node, tokens: node),
        ("prefix.eviction:_frees", "what_an_open_session_uses", like("prefix.eviction:_holds_cells")),
        ("prefix.eviction:Evictor._next_freeing", "what_an_eviction_costs", all_looked_at),
        ("prefix.eviction:_holds_cells", "what_was_copied_out_of_the_cache", always(True)),
        ("prefix.prefix_tree:PrefixTree.use", "the_end_of_an_edge_is_no_newer",
         lambda f, self, last, whole=True: f(self, last)),
        ("prefix.prefix_tree:PrefixTree.split", "an_edge_that_cannot_be_parted", parted_before_its_snapshot),
        ("prefix.prefix_tree:PrefixTree.settle", "writing_through_waits", stored_content_forgotten),
        ("prefix.prefix_tree:TreeEntry.host", "what_waits_to_be_written_is_there[causal]",
         prop(lambda self: self.serialized)),
    ],
    "tests/kvcache/prefix/test_interior.py": [
        ("prefix.eviction:Evictor._absorbed", "points_inside_go_first[wrapper]", always(None)),
        ("prefix.eviction:InteriorSnapshots.note", "cells_for_others[sliding-12]", NOTHING),
    ],
    "tests/kvcache/prefix/test_windows.py": [
        ("prefix.eviction:Copies.copy_out", "conversations_in_turn[wrapper-1]", always(False)),
        ("prefix.eviction:Copies.copy_out", "a_prompt_that_parts[wrapper]", always(False)),
        ("prefix.eviction:Evictor._has_room", "without_a_budget[sliding]", always(True)),
        ("prefix.eviction:_saved", "what_is_left_of[wrapper]",
         lambda f, node: None if f(node) is None else 0),
    ],
    "tests/kvcache/prefix/test_paging.py": [
        ("storage.cell_table:CellTable.join_arrivals", "cells_are_not_used_before", NOTHING),
        ("storage.cell_table:CellTable.join_arrivals", "others_go_on_while",
         lambda f, self, cells=None: f(self)),
        ("storage.cell_table:CellTable.mark_lost", "a_copy_that_fails_late", NOTHING),
        ("storage.cell_table:Arrivals.add", "pages_come_straight", NOTHING),
    ],
    "tests/kvcache/prefix/test_offload.py": [
        ("prefix.prefix_tree:TreeEntry.present", "what_is_under_way_is_there_already[wrapper]",
         prop(lambda self: self.snapshot is not None or self.host is not None)),
        ("prefix.worker:OffloadWorker.finished", "what_the_device_does_not_give",
         lambda f, s: (t for t in f(s) if t.error is None)),
    ],
    "tests/kvcache/prefix/test_direct_load.py": [
        ("storage.cell_table:CellTable.hold", "an_interrupted", like("storage.cell_table:CellTable.pin")),
        ("prefix.loading:_Approach.discard", "an_interrupted_restore",
         lambda f, self: self.tracks.clear()),
        ("prefix.loading:_run_together", "damage_costs_the_pages", failures_passed_over),
    ],
}  # fmt: skip
