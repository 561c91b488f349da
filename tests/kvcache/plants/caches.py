"""Of caches: cells, plans, snapshots, states, wrappers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvcache.attention.history import LowerBound
from kvcache.caches.causal import CausalCache
from ml import DType

from ..planting import NOTHING, Bug, Put, after, always, like, prop
from .several import reversed_result


def first_layer_only(f: Any, storage: Any, *rest: Any) -> Any:
    return f(replace(storage, buffers=dict([*storage.buffers.items()][:1])), *rest)


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
    cells = f(self, ctx)
    return cells if isinstance(cells, int) else ctx.from_numpy(np.sort(cells.to_numpy()))


def written_while_reserved(f: Any, self: Any, ctx: Any, key: Any, *args: Any, **options: Any) -> None:
    f(self, ctx, key, *args, **options)
    cells = self._pass.cells
    self._buffers[self._layer].write(ctx, 0 if cells is None else cells, [key])


def highest_position_only(f: Any, self: Any, groups: Any) -> Any:
    return f(self, [replace(group, lowest=int(group.positions[-1])) for group in groups])


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
    return self._prepared[0].prepare_remove(*args) if self._prepared else f(self, *args)


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


def halves_of_a_byte_swapped(f: Any, self: Any, ctx: Any, *args: Any) -> Any:
    found = f(self, ctx, *args)
    half = found.shape[-1] // 2
    return found.slice(ctx, 2, half, 2 * half).concat(ctx, found.slice(ctx, 2, 0, half), 2)


def row_of(table: Any, seq: int) -> Any:
    return table.rows[seq].positions, table.rows[seq].cells


def one_later(f: Any, *args: Any) -> Any:
    return [(seq, begin, end + 1) for seq, begin, end in f(*args)]


BUGS: dict[str, list[Bug]] = {
    "tests/kvcache/test_cache_numpy.py::TestNumpy": [
        ("attention.history:History.mask", "a_query_sees_exactly", all_rows_see_all),
        ("attention.plan:read_own", "several_sequences_in_any[of fixed shapes",
         lambda f, *a: (f(*a)[0], f(*a)[1][:, ::-1])),
        ("attention.forward_pass:ForwardPass.targets", "strided_views_are_put", cells_in_ascending_order),
        ("attention.plan:ReadPlan._blank", "columns_of_padding_do_no_harm", NOTHING),
        ("attention.segments:KeptSegments.next", "sequences_with_one_prefix", lambda f, self, *a: self),
        ("attention.segments:_Reader.within", "random_traces_agree",
         lambda f, self, entries: (f(self, entries)[0], f(self, entries)[1] * 0 + 1)),
        ("attention.calls:_seen", "several_sequences_in_any", lambda f, *a: None),
        ("attention.segments:Segment.each", "sequences_with_one_prefix", lambda f, segment: f(segment)[:1]),
        ("attention.attend:_part", "sequences_with_one_prefix",
         lambda f, ctx, *a: (f(ctx, *a)[0], f(ctx, *a)[1].scale(ctx, 0.5))),
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
        ("attention.plan:rows_seen", "a_query_attends_to_the_chosen",
         lambda f, *a: (f(*a)[0], f(*a)[0] + 99)),
        ("attention.plan:rows_seen", "a_query_attends_to_the_chosen",
         lambda f, r, n, lower, *a: f(r, n, None, *a)),
        ("attention.attend:_shown", "a_query_attends_to_the_chosen",
         lambda f, ctx, mask, rows: ctx.zeros(rows.shape, DType.F32)),
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
        ("attention.plan:rows_seen", "a_query_attends_to_the_chosen",
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
        ("caches.states:StateCache.snapshot", "sharing_a_state_calls_no_backend",
         after(lambda found: found.state.detach())),
        ("snapshots.attention:AttentionSnapshots.detach_shared", "a_snapshots_state_lives[shift", NOTHING),
        ("snapshots.snapshot:InCache.nbytes", "a_snapshot_outlives",
         prop(lambda self: sum(buffers.nbytes for buffers in self.buffers.values()))),
        ("caches.encoder:EncoderCache._batch_mask", "rows_see_their_own",
         lambda f, self, ctx, now, n: f(self, ctx, replace(now, groups=now.groups[::-1]), n)),
        ("storage.quantized:QuantizedBuffer.write_stored", "quantized_tokens_agree",
         lambda f, self, ctx, cells, found: self.parts[0].write_stored(ctx, cells, found[:1])),
        ("storage.quantized:QuantizedBuffer.decode", "what_is_read_back_lies", halves_of_a_byte_swapped),
        ("storage.layer_buffers:LayerBuffers.write_stored", "a_snapshot_is_restored_at",
         lambda f, self, ctx, cells, found: self.key.write_stored(ctx, cells, found[: len(found) // 2])),
        ("storage.formats.cache_format:CacheFormat.check", "a_head_that_does_not_divide", NOTHING),
        ("storage.buffer:Buffer.write", "quantized_tokens_agree",
         lambda f, self, ctx, cells, *a: f(self, ctx, cells if isinstance(cells, int) else 0, *a)),
    ],
    "tests/kvcache/test_cache_numpy.py::TestStorageOnly": [
        ("storage.state_table:arrange", "states_and_outputs_follow", lambda f, *a: replace(f(*a), loads=())),
        ("storage.state_slots:StateBuffers.capture", "states_and_outputs_follow",
         like("storage.state_slots:StateBuffers.views")),
    ],
    "tests/kvcache/caches/test_partial_passes.py": [
        ("attention.forward_pass:ForwardPass._check_present", "a_layer_that_was_skipped", NOTHING),
        ("attention.forward_pass:ForwardPass.end", "a_layer_that_was_skipped", NOTHING),
        ("storage.state_table:StateTable.end", "states_that_a_pass", NOTHING),
        ("storage.layer_buffers:LayerBuffers.lack", "a_layer_that_comes_later", NOTHING),
        ("storage.state_slots:StateBuffers.lose_all", "a_state_that_comes_later_lacks", NOTHING),
        ("caches.encoder:EncoderCache.lacking", "tokens_of_an_item", NOTHING),
    ],
    "tests/kvcache/caches": [
        ("caches.undo_log:UndoLog.restore", "a_start_can_be_taken_back", NOTHING),
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
        ("caches.states:StateCache.prepare_restore_snapshot", "one_that_cannot",
         lambda f, *a: f(*a) or (lambda: None)),
        ("caches.wrapper:WrapperCache.mark_lost", "a_failing_backend_restores_none", NOTHING),
        ("caches.wrapper:WrapperCache.prepare_restore_snapshot", "all_caches_are_restored_together",
         restored_in_the_first_cache),
        ("caches.encoder:EncoderCache.snapshot", "an_output_is_restored_with", outputs_not_copied),
        ("caches.encoder:EncoderCache._store", "a_new_output_leaves", entry_written_in_place),
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
    "tests/kvcache/snapshots/test_layer_shapes.py": [
        ("snapshots.layer_shapes:layers_of_serialized", "a_page_of_other_layers", always({})),
    ],
}  # fmt: skip
