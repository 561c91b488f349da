"""Bugs that the mutation tool cannot plant (docs/mutation.md): each makes the test named beside it fail.

The tool changes an operator, a constant or an argument. Here stand the faults between functions: a step left
out, done for the wrong part or in the wrong order, a view where a copy belongs, a copy where nothing moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcache.attention.read_plan import LowerBound
from kvcache.cache import SupportsPrepare
from kvcache.caches.causal import CausalCache
from kvcache.offload.tiers import LookUp
from kvcache.stores import StoreUnavailable
from ml import DType

from .planting import (
    KEPT,
    NOTHING,
    UNUSED,
    Bug,
    Planter,
    Put,
    after,
    always,
    like,
    named,
    prop,
    without,
)  # fmt: skip


def first_layer_only(f: Any, storage: Any, *rest: Any) -> Any:
    return f(replace(storage, buffers=dict([*storage.buffers.items()][:1])), *rest)


def reversed_result(f: Any, *args: Any) -> Any:
    return (found for found in [*f(*args)][::-1])


# The replacements that need more than a line.


def failures_not_caught(f: Any, self: Any, *args: Any) -> Any:
    return LookUp(max(named("offload.tiers:_longest")(store, *args) for store in self.stores), 0)


def what_leads_there_not_used(f: Any, self: Any, last: Any, whole: bool = True, counts: bool = True) -> None:
    above, last.parent = last.parent, None
    f(self, last, whole, counts)
    last.parent = above


def all_rows_see_all(f: Any, self: Any, tokens: int, *args: Any) -> np.ndarray:
    found = f(self, tokens, *args)
    if len(self.groups) > 1:
        found[:tokens, (found[:tokens] == 0).any(axis=0)] = 0
    return found


def unchecked_keys_written(f: Any, self: Any, ctx: Any, key: Any, *args: Any, **options: Any) -> None:
    buffers, forward = self._buffers.get(self._layer), self._pass
    if buffers and forward and key.shape == (forward.tokens, buffers.key.heads, buffers.key.dim):
        buffers.key.write(ctx, forward.targets(ctx), key)
    f(self, ctx, key, *args, **options)


def cells_in_ascending_order(f: Any, self: Any, ctx: Any) -> Any:
    if not isinstance(self.cells, int):
        self.cells = np.sort(self.cells)
    return f(self, ctx)


def written_while_reserved(f: Any, self: Any, ctx: Any, key: Any, *args: Any, **options: Any) -> None:
    f(self, ctx, key, *args, **options)
    cells = self._pass.cells
    self._buffers[self._layer].write(ctx, 0 if cells is None else cells, [key])


def highest_position_only(f: Any, self: Any, groups: Any) -> Any:
    return f(self, [replace(group, positions=group.positions[-1:]) for group in groups])


def own_evictions_only(f: Any, self: Any, groups: Any) -> Any:
    return [pair for pair in f(self, groups) if pair[0] in {group.seq for group in groups}]


def evicting_reader(f: Any, self: Any, *args: Any, **options: Any) -> None:
    f(self, *args, **options)
    if options.get("read_only") and self._pass is not None:
        self._make_room(0, self._pass.groups)


def states_lent_to_readers(f: Any, self: Any, ctx: Any, key: Any, sequences: Any, *args: Any) -> Any:
    return self.point(self.rows[next(iter(sequences))]).state.read(ctx)[key]


def entry_written_in_place(
    f: Any, self: Any, current: Any, seq: int, position: int, size: int, tensors: Any
) -> None:
    f(self, current, seq, position, size, tensors) if seq not in self._entries else None
    entry = self._entries[seq]
    entry.position, entry.length = position, size
    entry.layers[self._layer] = tensors


def restored_in_the_first_cache(f: Any, self: Any, seq: int, snapshot: Any, target: int | None = None) -> Any:
    end = snapshot.end if target is None else target
    return self.caches[0].prepare_restore_snapshot(seq, snapshot.parts[0], end)


def outputs_not_copied(f: Any, self: Any, seq: int, *args: Any) -> Any:
    found = f(self, seq, *args)
    return replace(found, layers=self._entries[seq].layers) if found.layers else found


def prepared_for_the_first_cache(f: Any, self: Any, *args: Any) -> Any:
    first = self._order[0]
    return first.prepare_remove(*args) if isinstance(first, SupportsPrepare) else f(self, *args)


def where_the_batch_ends(f: Any, self: Any, seq: int, begin: int = 0, end: int | None = None) -> Any:
    found = f(self, seq, begin)
    found.end = found.end if end is None else end
    return found


def taken_by_some_thrown_away(f: Any, self: Any, seq: int, upto: int | None = None) -> Any:
    found = f(self, seq, upto)
    for cache in self.caches:
        if isinstance(cache, CausalCache):
            cache.take_snapshots(seq)
    return found


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


def all_looked_at(f: Any, self: Any) -> Any:
    freeing = filter(named("prefix.evictor:_frees"), self._tree.device)
    return min(freeing, key=named("prefix.prefix_tree:priority_of"), default=None)


def marked_as_checkpoint(f: Any, self: Any, seq: int, *op: str) -> Any:
    taken = f(self, seq, *op)
    if taken.offset:
        self._states.keep(self._states.rows[seq], taken)
    return taken


def later_checkpoints_kept(f: Any, self: Any, seq: int, mark: Any) -> Callable[[], None]:
    points, commit = self._states.rows[seq].checkpoints, f(self, seq, mark)

    def keeping() -> None:
        commit()
        self._states.rows[seq].checkpoints = points

    return keeping


def drafts_believed(f: Any, run: Any, chosen: Any, tried: Any, *rest: Any) -> Any:
    for branch, row in tried:
        chosen._rows[row : row + len(branch.draft)] = [[token, 0.0] for token in branch.draft]
    return f(run, chosen, tried, *rest)


def first_branch_wins(f: Any, run: Any, chosen: Any, tried: Any, *rest: Any) -> Any:
    f(run, chosen, tried, *rest)
    return tried[0][0]


def each_block_alone(f: Any, self: Any, root: bytes, size: int, items: Any) -> None:
    f(self, root, size, items)
    for i in range(1, len(self._digests)):
        self._digests[i] = named("stores.keys:_link")(root, items.encoded((i - 1) * size, i * size))


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
    transfer = named("offload.worker:OffloadJob")(snapshot, owner)
    transfer.serialized = named("snapshots.serialize:serialize")(self._backend, snapshot)
    self._finished.append(transfer)
    return transfer


def parted_before_its_snapshot(f: Any, self: Any, node: Any, at: int) -> Any:
    self.radix_tree.split(node, at)
    return f(self, node, at + 1)


def another_sequences_tokens(f: Any, self: Any, seq: int) -> Any:
    low = f(self, seq)
    return None if low == named("snapshots.schedule:REPLACED") else low


class Agreeing(str):
    """Differs from no digest."""

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return False


class Agreed:
    """A digest that nobody compares."""

    def __init__(self, digest: Any) -> None:
        self.update = digest.update

    def hexdigest(self) -> str:
        return Agreeing("0" * 32)


def lengths_of_the_manifest(f: Any, self: Any, manifest: Any, start: int, stop: int) -> Any:
    command, stated = named("stores.valkey.link:Command"), named("stores.valkey.replies:value")(20)
    sizes = [*manifest.sizes][start:stop]
    return [command(["ECHO", size], lambda replies: int(replies.read(stated))) for size in sizes]


def written_over(f: Any, self: Any, first: Any, *rest: Any) -> Any:
    words = [word for word in first.words if word != "NX"]
    return f(self, first._replace(words=words), *rest)


def halves_of_a_byte_swapped(f: Any, self: Any, ctx: Any, *args: Any) -> Any:
    found = f(self, ctx, *args)
    half = found.shape[-1] // 2
    return found.slice(ctx, 2, half, 2 * half).concat(ctx, found.slice(ctx, 2, 0, half), 2)


def one_more(f: Any, *args: Any) -> Any:
    return f(*args) + 1


def row_of(table: Any, seq: int) -> Any:
    return table.rows[seq].positions, table.rows[seq].cells


def one_later(f: Any, *args: Any) -> Any:
    return [(seq, begin, end + 1) for seq, begin, end in f(*args)]


def put_over(f: Any, self: Any, key: str, *rest: Any) -> Any:
    self.delete(key)
    return f(self, key, *rest)


# fmt: off
BUGS: dict[str, list[Bug]] = {
    "tests/test_cache_numpy.py::TestNumpy": [
        ("attention.read_plan:ReadPlan.mask", "a_query_sees_exactly", all_rows_see_all),
        ("attention.forward_pass:ForwardPass.lift", "a_query_sees",
         lambda f, self, to: setattr(self, "lifted", to)),
        ("attention.forward_pass:ForwardPass.targets", "strided_views_are_put", cells_in_ascending_order),
        ("attention.forward_pass:ForwardPass.shared", "several_sequences_in", lambda f, *a: (f(*a)[0], None)),
        ("attention.forward_pass:ForwardPass._blank", "columns_of_padding_do_no_harm", NOTHING),
        ("attention.segments:KeptSegments.next", "sequences_with_one_prefix", lambda f, self, *a: self),
        ("attention.segments:_Reader.within", "random_traces_agree",
         lambda f, self, entries: (f(self, entries)[0], f(self, entries)[1] * 0 + 1)),
        ("attention.calls:_seen", "several_sequences_in_any", lambda f, *a: None),
        ("attention.segments:Segment.each", "sequences_with_one_prefix", lambda f, segment: f(segment)[:1]),
        ("attention.planned:PlannedLevel.partial", "sequences_with_one_prefix",
         lambda f, self, *a: (f(self, *a)[0], f(self, *a)[1].scale(a[0], 0.5))),
        ("caches.causal:CausalCache.set_layer", "layers_keep_apart", NOTHING),
        ("caches.causal:CausalCache.put", "wrong_shapes_are_refused_and_leave_all", unchecked_keys_written),
        ("caches.causal:CausalCache.put", "a_reserved_pass_spans", written_while_reserved),
        ("caches.causal:CausalCache.start_forward", "it_takes_no_cell_evicts_nothing", evicting_reader),
        ("storage.relocation:prepare_shift", "what_follows_moves_down", first_layer_only),
        ("storage.relocation:_Piece.computed", "a_long_sequence_moves_in_pieces",
         lambda f, self, offset, *a: f(self, offset if self._cells.size == 40 else 0, *a)),
        ("storage.cell_table:CellTable.mark_lost", "a_shift_function_that_raises_after", NOTHING),
        ("caches.sequences:SequenceEditor._check_shift", "random_traces_agree", NOTHING),
        ("storage.relocation:_shifted_extra", "what_follows_moves_down", lambda f, *a: {}),
        ("storage.layer_buffers:LayerBuffers.read_extra", "extras_keep_their",
         lambda f, self, ctx, name, cells, n: f(self, ctx, sorted(self.extra)[0], cells, n)),
        ("storage.buffer:Buffer.narrowed", "several_sequences_in_any_order", lambda f, self, dim: self),
        ("attention.forward_pass:rows_seen", "a_query_attends_to_the_chosen",
         lambda f, *a: (f(*a)[0], f(*a)[0] + 99)),
        ("attention.forward_pass:rows_seen", "a_query_attends_to_the_chosen",
         lambda f, r, n, lower, *a: f(r, n, None, *a)),
        ("attention.selected:_shown", "a_query_attends_to_the_chosen",
         lambda f, ctx, mask, rows: ctx.zeros(rows.shape, DType.F32)),
        ("attention.forward_pass:ForwardPass.read_rows", "a_query_attends_to_the_chosen",
         lambda f, self, ctx, buffers, rows: buffers.read(ctx, rows, rows.shape[0])),
        ("snapshots.serialize:described", "a_snapshot_on_the_host_is_the_snapshot", always({})),
        ("storage.relocation:defragment", "every_token_is",
         lambda f, storage: storage.table.move(storage.table.spread())),
        ("storage.cell_table:CellTable.move", "every_token_is_found_again", NOTHING),
        ("storage.cell_table:CellTable.mark_lost", "a_lost_sequence_says_so", NOTHING),
        ("storage.layer_buffers:LayerBuffers.stamp", "a_layer_that_was_not_put",
         Put(property(lambda self: 1 << 62, lambda *a: None))),
        ("caches.windows:SlidingWindowCache._evictions", "a_token_leaves_when", highest_position_only),
        ("caches.windows:SlidingWindowCache._evictions", "a_token_leaves_when", own_evictions_only),
        ("caches.windows:SlidingWindowCache._evictions", "a_token_leaves_when", one_later),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: LowerBound(lambda p: p - self.window + 1)),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: LowerBound(lambda p: p - self.window - 1)),
        ("caches.windows:SlidingWindowCache._window", "a_sequence_resumed_where",
         lambda f, self: replace(f(self), size=max(0, self.window - 1))),
        ("caches.windows:ChunkedCache.lower_bound", "a_query",
         lambda f, self: LowerBound(lambda p: p - self.chunk + 1)),
        ("storage.cell_table:CellTable.drop_some", "evicted_tokens_leave_gaps",
         lambda f, self, seq, gone: self.drop(seq, int(gone.argmax()), int(gone.argmax()) + int(gone.sum()))),
        ("storage.cell_table:CellTable.drop_some", "random_traces_agree",
         lambda f, self, seq, gone: self.rows[seq].assign(*(x[~gone] for x in row_of(self, seq)))),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: replace(f(self), keep=max(0, self.keep - 1))),
        ("caches.windows:SlidingWindowCache._evictions", "the_first_tokens_stay",
         lambda f, self, groups: [(seq, 0, end) for seq, _, end in f(self, groups)]),
        ("caches.windows:SlidingWindowCache._window", "random_traces",
         lambda f, self: replace(f(self), keep=0)),
        ("snapshots.attention:Window.held", "the_first_tokens_stay",
         lambda f, self, stored, end: f(replace(self, keep=0), stored, end)),
        ("snapshots.attention:Window.reaches", "a_window_gets_of_another",
         lambda f, self, stored, position, kept=None: f(self, stored, position)),
        ("snapshots.attention:Window.held", "a_window_gets_of_another",
         lambda f, self, stored, end: np.arange(np.searchsorted(stored, end))),
        ("snapshots.attention:entries", "a_window_gets_of_another",
         lambda f, ctx, tensor, some: tensor.slice(ctx, 0, 0, some.size)),
        ("storage.cell_table:Row.save_copy", "the_first_tokens_stay", lambda f, self: self.save()),
        ("attention.segments:_Reader.parted", "random_traces_agree", lambda f, self, pieces: pieces),
        ("attention.forward_pass:rows_seen", "a_query_attends_to_the_chosen",
         lambda f, reading, tokens, lower, *a: f(reading, tokens, lower and replace(lower, keep=0), *a)),
        ("storage.state_table:StateTable.read", "states_are_read_as_they_stand", states_lent_to_readers),
        ("storage.state_table:StateTable.deliver", "a_sequence_goes_back_to_any_position",
         lambda f, self, ctx, key, current, at, states: f(self, ctx, key, current, at[::-1], states)),
        ("storage.state_table:StateTable.copied", "scheduled_states_are_taken_inside",
         lambda f, self, states: f(self, {key: x for key, x in states.items() if key[1]})),
        ("storage.state_specs:StateSpecs.get", "layers_have_any_states",
         lambda f, self, name, layer: f(self, name, 0)),
        ("storage.state_table:arrange", "sequences_of_a_pass", lambda f, *a: replace(f(*a), moves=())),
        ("storage.state_slots:StateBuffers.release", "a_snapshots_state_lives_through", NOTHING),
        ("storage.state_slots:StateBuffers.copy_out", "a_snapshots_state_lives_through", NOTHING),
        ("storage.state_slots:HeldStates.moved_out", "states_and_outputs_follow", NOTHING),
        ("caches.recurrent:RecurrentCache.snapshot", "sharing_a_state_calls_no_backend",
         after(lambda found: found.state.detach())),
        ("snapshots.attention:AttentionSnapshots.detach_shared", "a_snapshots_state_lives[shift", NOTHING),
        ("snapshots.snapshot:InCache.nbytes", "a_snapshot_outlives",
         prop(lambda self: sum(buffers.nbytes for buffers in self.buffers.values()))),
        ("caches.encoder:EncoderCache._batch_mask", "rows_see_their_own",
         lambda f, self, ctx, now, n: f(self, ctx, replace(now, groups=now.groups[::-1]), n)),
        ("storage.quantized:QuantizedBuffer.store", "quantized_tokens_agree",
         lambda f, self, ctx, cells, found: self.parts[0].store(ctx, cells, found[:1])),
        ("storage.quantized:QuantizedBuffer.decode", "what_is_read_back_lies", halves_of_a_byte_swapped),
        ("storage.layer_buffers:LayerBuffers.write_stored", "a_snapshot_is_restored_at",
         lambda f, self, ctx, cells, found: self.key.write_stored(ctx, cells, found[: len(found) // 2])),
        ("storage.formats.cache_format:CacheFormat.check", "a_head_that_does_not_divide", NOTHING),
        ("storage.buffer:Buffer.write", "quantized_tokens_agree",
         lambda f, self, ctx, cells, *a: f(self, ctx, cells if isinstance(cells, int) else 0, *a)),
    ],
    "tests/test_eviction.py": [
        ("attention.observed:AttentionMass.moved", "attention_mass_follows", NOTHING),
        ("storage.cell_table:CellTable._number", "attention_mass_follows", NOTHING),
        ("storage.cell_table:CellTable._number", "what_a_snapshot_brings_back", NOTHING),
        ("attention.observed:ObservedRows.last", "attention_mass_follows",
         lambda f, self, count: f(self, None)),
        ("attention.observed:Attended._weights", "attention_mass_follows",
         lambda f, self, *a: f(replace(self, sinks=None), *a)),
        ("snapshots.schedule:SnapshotSchedule.cut", "a_prefix_cache_keeps", NOTHING),
    ],
    "tests/test_cache_numpy.py::TestStorageOnly": [
        ("storage.state_table:arrange", "states_and_outputs_follow", lambda f, *a: replace(f(*a), loads=())),
        ("storage.state_slots:StateBuffers.capture", "states_and_outputs_follow",
         like("storage.state_slots:StateBuffers.views")),
        ("caches.encoder:EncoderCache._store", "states_and_outputs_follow[encoder", entry_written_in_place),
    ],
    "tests/caches": [
        ("caches.causal:CausalCache._restore", "a_start_can_be_taken_back", NOTHING),
        ("snapshots.attention:AttentionSnapshots.snapshot", "taking_cutting_joining",
         after(lambda found: found.detach())),
        ("snapshots.attention:AttentionSnapshots._in_cache", "the_oldest_are_copied_out", reversed_result),
        ("snapshots.attention:AttentionSnapshots.reclaim", "the_oldest_are_copied_out",
         lambda f, self, count: self.detach_all()),
        ("snapshots.attention:AttentionSnapshots.reclaim", "the_oldest_are_copied_out", NOTHING),
        ("storage.cell_table:CellTable.unowned", "a_full_cache_copies", prop(lambda self: self.cells)),
        ("storage.cell_table:CellTable.drop_pin", "the_last_one_to_forget", NOTHING),
        ("snapshots.snapshot:InCache.check", "a_defrag_that_fails_says", NOTHING),
        ("snapshots.snapshot:InCache.__init__", "a_prefill_of_several",
         lambda f, s, b, t, of, c: f(s, b, t, dict(of), c)),
        ("snapshots.attention:AttentionSnapshots.snapshot", "what_is_taken_inside_a", where_the_batch_ends),
        ("snapshots.schedule:SnapshotSchedule.cut", "what_is_taken_back_is_taken_anew", NOTHING),
        ("caches.wrapper:WrapperCache.take_snapshots", "what_one_took_where", taken_by_some_thrown_away),
        ("caches.causal:CausalCache.prepare_restore_snapshot", "one_that_cannot",
         lambda f, *a: f(*a) or (lambda: None)),
        ("caches.wrapper:WrapperCache.mark_lost", "a_failing_backend_restores_none", NOTHING),
        ("caches.wrapper:WrapperCache.prepare_restore_snapshot", "all_caches_are_restored_together",
         restored_in_the_first_cache),
        ("caches.encoder:EncoderCache.snapshot", "an_output_is_restored_with", outputs_not_copied),
        ("caches.encoder:_Pass.rows", "a_shared_output_is_read_once",
         lambda f, self, some: f(self, some[:1])),
        ("caches.causal:CausalCache.undo_forward", "the_pass_under_way_goes_on", NOTHING),
        ("caches.causal:CausalCache.pass_under_way", "the_pass_under_way_goes_on", NOTHING),
        ("storage.state_table:StateTable._move", "states_and_views_of_them_go_on", NOTHING),
        ("storage.state_table:StateTable.inside", "what_a_model_does_not_deliver",
         lambda f, self, row: {at: states for at, states in row.inside.items() if states}),
        ("caches.wrapper:WrapperCache.prepare_remove", "a_context_shift_moves", prepared_for_the_first_cache),
        ("caches.wrapper:WrapperCache.can_resume", "a_wrapper_follows_all_its_models",
         lambda f, self, *a: any(c.can_resume(*a) for c in self.caches)),
    ],
    "tests/prefix/test_branches.py": [
        ("caches.branches:_check_exact", "a_window_goes_back_by_its_memory", NOTHING),
        ("caches.branches:keep", "the_kept_branch",
         lambda f, cache, winner, seq, losers=(): f(cache, winner, seq)),
        ("caches.branches:_reached", "a_wrapper_goes_where_all",
         lambda f, part, seq, at, to, i: f(part, seq, at, to, i) if i else at),
        ("caches.branches:fork", "what_means_nothing_is_refused", forked_one_by_one),
        ("caches.branches:_return", "tokens_of_one_pass",
         lambda f, part, to, i: (lambda: None) if i else f(part, to, i)),
        ("caches.causal:CausalCache.prepare_copy_prefix", "branches_agree_with",
         lambda f, self, src, dst, length: f(self, src, dst, length + (length > 0))),
        ("caches.recurrent:RecurrentCache.mark", "forks_and_marks", marked_as_checkpoint),
        ("caches.recurrent:RecurrentCache.prepare_return", "branches_agree_with[recurrent",
         later_checkpoints_kept),
        ("storage.state_table:StateTable._is_due", "branches_agree_with[recurrent",
         lambda f, self, row: row.slot is not None and f(self, row)),
        ("caches.windows:SlidingWindowCache.reach", "window_memory_is_enough",
         prop(lambda self: None if self._unlimited else self._kept - self.window + 1)),
    ],
    "tests/prefix/test_conversations.py": [
        ("prefix.prefix_tree:PrefixTree.restore", "sessions_see",
         lambda f, self, seq, node, target: f(self, seq, node, node.end)),
        ("prefix.radix_tree:common_length", "sessions_see",
         lambda f, one, other: min(f(one, other) + 1, one.size, other.size)),
        ("prefix.alphabet:Alphabet._number", "sessions_see",
         lambda f, self, token: f(self, b"" if type(token) is bytes else token)),
    ],
    "tests/prefix/test_finding.py": [
        ("prefix.prefix_tree:PrefixTree._send", "each_tier_gives_back_what_it[causal]", NOTHING),
        ("prefix.prefix_tree:chain_of", "a_conversation_is_not[wrapper]",
         lambda f, nodes, *at: f(nodes)[-1:]),
        ("stores.keys:Keys.__init__", "what_was_computed_otherwise",
         lambda f, self, given, size: f(self, {**given, "salt": ""}, size)),
        ("caches.causal:CausalCache.settings", "what_was_computed_otherwise",
         always({"kind": "CausalCache"})),
        ("caches.causal:CausalCache.snapshot", "sharing_moves_no_data[causal]",
         after(lambda found: found.detach())),
        ("prefix.open_sessions:OpenSessions._schedule", "what_diverges_shares_all_up_to", NOTHING),
        ("caches.causal:CausalCache.split", "what_diverges_shares_all_before",
         lambda f, *args: f(*args)[::-1]),
        ("prefix.prefix_cache:PrefixStats.add", "each_tier_gives_back",
         lambda f, self, tokens, origins: f(self, tokens, {})),
        ("caches.encoder:EncoderCache.prepare_restore_snapshot", "an_encoders_output",
         always(lambda: None)),
    ],
    "tests/prefix/test_sessions.py": [
        ("prefix.session:Session.computed", "what_is_kept_of_a_session",
         like("prefix.session:Session.encoded")),
        ("prefix.session:Session.__exit__", "what_is_kept_of_a_session",
         lambda f, self, *error: self.close()),
        ("snapshots.schedule:SnapshotSchedule.lowest_cut", "what_was_removed_behind_its_back", NOTHING),
        ("prefix.open_sessions:OpenSessions._restore_nearest", "going_back_goes_to_the_nearest[sliding",
         lambda f, self, seq, *a: self._cache.remove(seq, 0) or 0),
        ("prefix.open_sessions:OpenSessions._restore_nearest", "going_back_goes_to_the_nearest[sliding",
         one_more),
        ("snapshots.snapshot:AttentionSnapshot.drop", "clear_forgets_all",
         lambda f, self: KEPT.append(self)),
        ("snapshots.schedule:SnapshotSchedule.replace", "nothing_is_kept_of_a_sequence",
         like("snapshots.schedule:SnapshotSchedule.drop")),
        ("prefix.open_sessions:OpenSessions.rolled_back", "nothing_is_kept_of_a_sequence",
         another_sequences_tokens),
        ("prefix.prefix_cache:check_unowned", "a_cache_takes_one_prefix_cache", NOTHING),
    ],
    "tests/prefix/test_retention.py": [
        ("prefix.prefix_tree:priority_of", "the_lowest_priority_goes_first",
         lambda f, n: (f(n)[0], 0, *f(n)[2:])),
        ("prefix.retainer:Retainer.expire", "after_its_duration", NOTHING),
        ("prefix.retainer:merged", "what_leads_to_a_range", lambda f, one, other: other),
    ],
    "tests/prefix/test_eviction_policies.py": [
        ("prefix.prefix_tree:PrefixTree.use", "whatever_the_policy_says", what_leads_there_not_used),
        ("prefix.prefix_tree:_age", "what_was_used_often_long_ago", NOTHING),
        ("prefix.eviction_policy:GDSF.score", "what_is_dear_to_compute",
         lambda f, self, use: f(self, replace(use, begin=0, end=use.end - use.begin))),
        ("prefix.prefix_tree:PrefixTree.use", "a_use_tells_where",
         lambda f, self, last, whole=True, counts=True: f(self, last, whole, False)),
        ("prefix.alphabet:Alphabet.tenant_of", "what_everyone_shares",
         lambda f, self, ids: (f(self, ids)[0], 0)),
        ("prefix.prefix_tree:_tenant", "a_tenant_over_its_budget", always("")),
        ("prefix.tenant_budget:TenantQueue.over", "a_tenant_over_its_budget",
         lambda f, self: (found := f(self)) and (self.first(), found[1])),
        ("prefix.tenant_budget:TenantQueue.fits", "what_a_tenant_may_never_have", always(True)),
    ],
    "tests/prefix/test_break_even.py": [
        ("offload.break_even:LEAST", "short_passes", Put(1)),
        ("offload.break_even:BreakEven.pays", "the_next_store_is_asked", always(True)),
        ("offload.tiers:StoreTier._start_probe", "a_store_that_became_fast", NOTHING),
        ("offload.break_even:BreakEven.sized", "over_a_slow_link[causal", NOTHING),
    ],
    "tests/prefix/test_prefetch.py": [
        ("offload.prefetch:Prefetcher.look_up", "a_session_begins_from_what[causal", NOTHING),
        ("offload.prefetch:Prefetcher.page", "a_session_begins_from_what[wrapper", NOTHING),
        ("offload.prefetch:Prefetcher._let_go", "a_session_begins_from_what[causal", NOTHING),
        ("offload.prefetch:Prefetcher._reserve", "what_is_read_ahead_never_takes[causal", always(True)),
    ],
    "tests/prefix/test_tiers.py": [
        ("offload.buffer_pool:Lender.take", "a_snapshot_that_is_read_later[recurrent]", lent_twice),
        ("prefix.matcher:PrefixMatcher.fill", "the_least_recently_used",
         without("prefix.prefix_tree:PrefixTree", "touch")),
        ("prefix.prefix_tree:priority_of", "of_one_conversation_the", lambda f, n: (*f(n)[:3], -f(n)[3])),
        ("prefix.prefix_tree:priority_of", "what_is_pinned_goes_last", lambda f, node: (False, *f(node)[1:])),
        ("prefix.evictor:Evictor.within_budgets", "budgets_are_kept_to_the_byte",
         lambda f, self: contextlib.nullcontext()),
        ("offload.eviction:EvictionQueue.excess", "budgets_are_kept_to_the_byte",
         prop(lambda self: 0 if self.budget is None else max(0, self.nbytes - self.budget - 1))),
        ("offload.eviction:EvictionQueue.discard", "budgets_are_kept_to_the_byte",
         lambda f, self, entry: self._sizes.pop(id(entry), None)),
        ("prefix.evictor:Evictor._end_of", "the_end_of_an_edge_goes", lambda f, self, node, tokens: node),
        ("prefix.evictor:_frees", "what_an_open_session_uses", like("prefix.evictor:_holds_cells")),
        ("prefix.evictor:Evictor._next_freeing", "what_an_eviction_costs", all_looked_at),
        ("prefix.evictor:_holds_cells", "what_was_copied_out_of_the_cache", always(True)),
        ("prefix.prefix_tree:PrefixTree.use", "the_end_of_an_edge_is_no_newer",
         lambda f, self, last, whole=True, counts=True: f(self, last)),
        ("offload.worker:serialize", "a_parted_edges_snapshots", halves_that_keep_the_whole),
        ("prefix.prefix_tree:PrefixTree.split", "an_edge_that_cannot_be_parted", parted_before_its_snapshot),
        ("prefix.prefix_tree:PrefixTree.settle", "writing_through_waits", stored_content_forgotten),
        ("offload.tiers:StoreTier.__init__", "what_waits_to_be",
         lambda f, self, of, n, *to: f(self, of, 1 << 40)),
        ("offload.tiers:StoreTier.look_up", "a_store_that_fails_costs", failures_not_caught),
        ("prefix.prefix_tree:TreeEntry.host", "what_waits_to_be_written_is_there[causal]",
         prop(lambda self: self.serialized or (self.store_write and self.store_write.entries[0][1]))),
        ("prefix.prefix_tree:cut_serialized", "an_end_that_went_to_another_tier",
         lambda f, *args: f(*args)[::-1]),
    ],
    "tests/prefix/test_paging.py": [
        ("storage.cell_table:CellTable.join_arrivals", "cells_are_not_used_before", NOTHING),
        ("storage.cell_table:CellTable.join_arrivals", "others_go_on_while",
         lambda f, self, cells=None: f(self)),
        ("storage.cell_table:CellTable.mark_lost", "a_copy_that_fails_late", NOTHING),
        ("storage.arrivals:Arrivals.add", "pages_come_straight", NOTHING),
        ("offload.direct_load:_Approach._page_in", "pages_come_straight", always(False)),
    ],
    "tests/prefix/test_offload.py": [
        ("prefix.prefix_tree:TreeEntry.present", "what_is_under_way_is_there_already[wrapper]",
         prop(lambda self: self.snapshot is not None or self.host is not None)),
        ("offload.worker:OffloadWorker.send", "cells_are_free_while[recurrent]",
         without("snapshots.snapshot:RecurrentSnapshot", "detach")),
        ("offload.worker:OffloadWorker.send", "the_caller_copies_nothing", copied_by_the_caller),
        ("offload.worker:wait_for", "a_device_with_streams", NOTHING),
        ("offload.worker:OffloadWorker.__init__", "what_is_under_way_is_bounded",
         lambda f, self, of, n, *to: f(self, of, 1 << 40)),
        ("offload.worker:OffloadWorker.finished", "what_the_device_does_not_give",
         lambda f, s: (t for t in f(s) if t.error is None)),
        ("offload.worker:OffloadWorker.drain", "close_waits_for_what_is_under_way", NOTHING),
    ],
    "tests/prefix/test_direct_load.py": [
        ("stores.reading:FileReader._check", "damage_costs_the_pages", NOTHING),
        ("snapshots.reservation:CellReservation._clear", "damage_costs",
         lambda f, self, start: setattr(self, "_places", {})),
        ("storage.cell_table:CellTable.hold", "an_interrupted", like("storage.cell_table:CellTable.pin")),
        ("offload.direct_load:_Approach.discard", "an_interrupted_restore",
         lambda f, self: self.tracks.clear()),
        ("offload.direct_load:_Approach._tracks_of", "a_stored_conversation", lambda f, self, i: f(self, 0)),
        ("offload.direct_load:_run_together", "damage_costs_the_pages", failures_passed_over),
    ],
    "tests/test_layer_shapes.py": [
        ("snapshots.layer_shapes:layers_of_serialized", "a_page_of_other_layers", always({})),
    ],
    "tests/test_speculative.py": [
        ("runner.verification:Verifier.settle", "the_bundled_model",
         lambda f, self, part, winner, known, right: right),
        ("runner.engine:accept", "the_bundled_model", drafts_believed),
        ("runner.engine:accept", "the_bundled_model", first_branch_wins),
        ("caches.branches:resume_point", "the_bundled_model", one_more),
        ("runner.verification:Verifier.clear", "a_pass_that_fails_leaves", NOTHING),
    ],
    "tests/test_mtp.py": [
        ("runner.models.mtp:_Tail.slot", "guesses_are_those", lambda f, self, seq, at: f(self, seq, at - 1)),
        ("runner.models.mtp:_Tail.slot", "guesses_are_those", lambda f, self, seq, at: f(self, 0, at)),
        ("runner.models.mtp:HiddenStates.before", "guesses_are_those",
         lambda f, self, ctx, batch, cache, hidden: (f(self, ctx, batch, cache, hidden), hidden)[1]),
        ("runner.models.mtp:_Tail.keep", "without_the_hidden_state",
         lambda f, self, *a: (f(self, *a), self._positions.__setitem__(slice(None), -1))),
        ("runner.mtp:branches.rollback", "what_is_drawn_is_drawn", NOTHING),
    ],
    "tests/test_rejection_sampling.py": [
        ("runner.sampling:nn.RejectionSampler.__call__", "what_cannot_come[numpy",
         lambda f, self, ctx, logits: self._tokens),
        ("runner.sampling:nn.RejectionSampler.__init__", "what_cannot_come[numpy",
         lambda f, self, ctx, draws, drafted, size: f(
             self, ctx, draws, replace(drafted, uniform=0 * drafted.uniform + 2**-24), size)),
        ("runner.sampling:nn.RejectionSampler.__init__", "a_token_is_distributed[numpy",
         lambda f, self, ctx, draws, drafted, size: f(
             self, ctx, replace(draws, uniform=drafted.uniform), drafted, size)),
        ("runner.engine:proposed_in", "as_many_are_accepted[whole", always([])),
        ("runner.engine:proposed_in", "as_many_are_accepted[whole",
         lambda f, parts: [replace(p, probabilities=np.roll(p.probabilities, 1)) for p in f(parts)]),
    ],
    "tests/test_stores_keys.py": [
        ("stores.keys:Chain.__init__", "one_changed_token_changes_every_key", each_block_alone),
    ],
    "tests/test_stores_suite.py::TestMemoryStore": [
        ("stores.memory:MemoryStore._touch", "eviction[reading", NOTHING),
        ("stores.memory:_joined", "what_was_put_and_what_was_read_are_copies",
         lambda f, views, size: np.frombuffer(views[0], np.uint8) if len(views) == 1 else f(views, size)),
        ("stores.memory:MemoryStore.close", "every_call_after_close_says_so", NOTHING),
        ("stores.memory:check_key", "what_is_no_key_is_refused", lambda f, key: key),
        ("stores.memory:MemoryStore.stat", "eviction[stat is",
         lambda f, self, keys: [self.prefix(keys), f(self, keys)][1]),
        ("stores.memory:MemoryStore.put", "a_key_is_written_once", put_over),
    ],
    "tests/test_stores_suite.py::TestFileStore": [
        ("stores.entries:_check_digest", "a_damaged_entry_is_reported", NOTHING),
        ("stores.file:FileStore._drop", "a_damaged_entry_is_reported", NOTHING),
        ("stores.folder:Folder.touch", "bytes_and_recency_are_known", NOTHING),
        ("stores.index:Index.by_use", "eviction[the first byte", reversed_result),
        ("stores.catalog:Catalog._last_used", "eviction[reading", always(0)),
        ("stores.file:FileStore._used", "eviction[of a chain", lambda f, self, keys: f(self, [*keys][::-1])),
    ],
    "tests/test_runner_prefetch.py": [
        ("runner.scheduler:Request.release", "what_was_read_for_a_request_that", NOTHING),
    ],
    "tests/test_stores_faults.py": [
        ("stores.digests:Digests.start", "the_data_of_one_key_are_not[valkey-xxh3",
         lambda f, self, *of: self._new()),
        ("stores.digests:Digests.start", "damaged_data[valkey-one bit",
         lambda f, *args: Agreed(f(*args))),
        ("stores.valkey.entries:Entries._lengths", "an_entry_of_which_a_part_is_gone[valkey",
         lengths_of_the_manifest),
    ],
    "tests/test_stores_valkey.py": [
        ("stores.valkey.link:Wire.transaction", "a_put_that_is_late", written_over),
        ("stores.valkey.entries:Entries.discard", "a_put_that_is_late", NOTHING),
        ("stores.valkey.entries:Entries.discard", "a_manifest_that_the_server_has_no_room_for", NOTHING),
        ("stores.valkey.entries:_REMOVE", "nothing_is_removed_that",
         Put("return redis.call('UNLINK', KEYS[1])")),
        ("stores.valkey.store:_UNFINISHED", "chunks_that_nobody_published_expire", Put(1 << 40)),
        ("stores.valkey.entries:SLACK", "a_hit_starts_the_time_anew", Put(0)),
        ("stores.valkey.entries:Entries._refreshing", "a_hit_starts_the_time_anew",
         lambda f, *args: [*f(*args)][-1:]),
        ("stores.valkey.entries:Entries.read", "an_entry_that_was_replaced_after",
         lambda f, self, wire, manifest, *a: (manifest.encoded(), f(self, wire, manifest, *a)[1])),
        ("stores.valkey.entries:Entries.name", "every_name_begins",
         lambda f, self, key: f"kvcache:xxh3:m:{key}".encode()),
        ("stores.valkey.link:Link._translated", "a_server_that_quotes",
         lambda f, self, op, e: StoreUnavailable(f"{op}: {e}")),
    ],
}
# fmt: on
@pytest.mark.parametrize("file", BUGS)
def test_each_planted_bug_is_noticed(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ML_UNSHRUNK", "1")  # that a test fails is enough
    planter = Planter(BUGS[file])
    options = ["-q", "--tb=no", *(f"-pno:{plugin}" for plugin in UNUSED)]
    pytest.main([file, *options], plugins=[planter])
    assert not planter.unnoticed, "\n".join(planter.unnoticed)
