"""Of caches: cells, plans, snapshots, states, wrappers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcache.attention.history import LowerBound

from ..planting import NOTHING, Bug, Put, after, prop


def unchecked_keys_written(f: Any, self: Any, ctx: Any, key: Any, *args: Any, **options: Any) -> None:
    buffers, forward = self._buffers.get(self._layer), self._pass
    if buffers and forward and key.shape == (forward.tokens, buffers.key.heads, buffers.key.dim):
        buffers.key.write(ctx, forward.targets(ctx), key)
    f(self, ctx, key, *args, **options)


def evicting_reader(f: Any, self: Any, *args: Any, **options: Any) -> None:
    f(self, *args, **options)
    if options.get("read_only") and self._pass is not None:
        self._make_room(0, self._pass.groups)


def outputs_not_copied(f: Any, self: Any, seq: int, *args: Any) -> Any:
    found = f(self, seq, *args)
    return replace(found, layers=self._entries[seq].layers) if found.layers else found


def halves_of_a_byte_swapped(f: Any, self: Any, ctx: Any, *args: Any) -> Any:
    found = f(self, ctx, *args)
    half = found.shape[-1] // 2
    return found.slice(ctx, 2, half, 2 * half).concat(ctx, found.slice(ctx, 2, 0, half), 2)


BUGS: dict[str, list[Bug]] = {
    "tests/kvcache/test_cache_numpy.py::TestNumpy": [
        ("caches.causal:CausalCache.set_layer", "layers_keep_apart", NOTHING),
        ("caches.causal:CausalCache.put", "wrong_shapes_are_refused_and_leave_all", unchecked_keys_written),
        ("caches.causal:CausalCache.start_forward", "it_takes_no_cell_evicts_nothing", evicting_reader),
        ("storage.layer_buffers:LayerBuffers.stamp", "a_layer_that_was_not_put",
         Put(property(lambda self: 1 << 62, lambda *a: None))),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: LowerBound(lambda p: p - self.window + 1)),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: LowerBound(lambda p: p - self.window - 1)),
        ("caches.windows:ChunkedCache.lower_bound", "a_query",
         lambda f, self: LowerBound(lambda p: p - self.chunk + 1)),
        ("storage.cell_table:CellTable.drop_some", "evicted_tokens_leave_gaps",
         lambda f, self, seq, gone: self.drop(seq, int(gone.argmax()), int(gone.argmax()) + int(gone.sum()))),
        ("caches.windows:SlidingWindowCache.lower_bound", "a_query_sees",
         lambda f, self: replace(f(self), keep=max(0, self.keep - 1))),
        ("caches.states:StateCache.snapshot", "sharing_a_state_calls_no_backend",
         after(lambda found: found.state.detach())),
        ("snapshots.snapshot:InCache.nbytes", "a_snapshot_outlives",
         prop(lambda self: sum(buffers.nbytes for buffers in self.buffers.values()))),
        ("storage.quantized:QuantizedBuffer.decode", "what_is_read_back_lies", halves_of_a_byte_swapped),
    ],
    "tests/kvcache/caches/test_partial_passes.py": [
        ("storage.state_slots:StateBuffers.lose_all", "a_state_that_comes_later_lacks", NOTHING),
    ],
    "tests/kvcache/caches": [
        ("caches.undo_log:UndoLog.restore", "a_start_can_be_taken_back", NOTHING),
        ("snapshots.attention:AttentionSnapshots.reclaim", "the_oldest_are_copied_out",
         lambda f, self, count: self.detach_all()),
        ("snapshots.attention:AttentionSnapshots.reclaim", "the_oldest_are_copied_out", NOTHING),
        ("storage.cell_table:CellTable.unowned", "a_full_cache_copies", prop(lambda self: self.cells)),
        ("snapshots.snapshot:InCache.check", "a_defrag_that_fails_says", NOTHING),
        ("snapshots.snapshot:InCache.__init__", "a_prefill_of_several",
         lambda f, s, b, t, of, c: f(s, b, t, dict(of), c)),
        ("caches.wrapper:WrapperCache.mark_lost", "a_failing_backend_restores_none", NOTHING),
        ("caches.encoder:EncoderCache.snapshot", "an_output_is_restored_with", outputs_not_copied),
        ("caches.causal:CausalCache.pass_under_way", "the_pass_under_way_goes_on", NOTHING),
        ("storage.state_table:StateTable._move", "states_and_views_of_them_go_on", NOTHING),
    ],
}  # fmt: skip
