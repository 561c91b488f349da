"""The traces of the wider family are themselves tested: every bug planted here has to make one fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import ml
from kvcache.cache import SupportsPrepare
from kvcache.caches import encoder, recurrent
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.storage import state_slots as states
from kvcache.storage import state_table
from kvcache.storage.buffer import Buffer
from kvcache.storage.cell_table import CellTable
from kvcache.storage.quantized import QuantizedBuffer
from kvcache.storage.state_table import StateTable
from kvcache.testing.family import run_family
from kvcache.testing.traces import run_trace
from ml import DType

from .suite_bugs import SLIPS

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {}
FLOATS = (DType.F32, DType.F16, DType.BF16)


def bug(cache: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[function.__name__] = cache, function
        return function

    return plant


@bug("recurrent")
def a_shared_state_written_in_place(patch: Patch) -> None:
    original = states.arrange
    patch.setattr(state_table, "arrange", lambda *args: replace(original(*args), moves=()))


@bug("recurrent")
def a_new_sequence_that_begins_with_an_old_state(patch: Patch) -> None:
    original = states.arrange
    patch.setattr(state_table, "arrange", lambda *args: replace(original(*args), loads=()))


@bug("recurrent")
def a_checkpoint_that_is_a_view(patch: Patch) -> None:
    patch.setattr(states.StateBuffers, "capture", states.StateBuffers.views)


@bug("recurrent")
def a_state_that_a_snapshot_holds_written_over(patch: Patch) -> None:
    patch.setattr(states.StateBuffers, "release", lambda self, ctx, slots: None)


@bug("recurrent")
def a_state_copied_out_after_it_was_written_over(patch: Patch) -> None:
    original = StateTable._carry_out

    def carry_out(self: StateTable, order: Any, plan: states.Arrangement) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(states.StateBuffers, "release", lambda self, ctx, slots: None)
            taken = original(self, order, plan)
        self.buffers.copy_out(plan.written)
        return taken

    patch.setattr(StateTable, "_carry_out", carry_out)


@bug("recurrent")
def a_slot_copied_out_where_states_move_from_and_not_where_they_go(patch: Patch) -> None:
    patch.setattr(
        states.Arrangement,
        "written",
        property(
            lambda self: {*range(self.start, self.start + self.count), *(slot for slot, _ in self.moves)}
        ),
    )


@bug("recurrent")
def a_view_to_write_into_what_a_snapshot_holds(patch: Patch) -> None:
    patch.setattr(states.StateBuffers, "copy_out", lambda self, slots: None)


@bug("recurrent")
def a_slot_taken_again_after_it_was_copied_out(patch: Patch) -> None:
    original = states.StateBuffers.hold
    slots: dict[int, tuple[Any, int]] = {}

    def hold(self: states.StateBuffers, slot: int) -> states.HeldStates:
        found = original(self, slot)
        slots[id(found)] = found, slot
        return found

    patch.setattr(states.StateBuffers, "hold", hold)
    patch.setattr(
        states.HeldStates, "slot_in", lambda self, buffers: slots[id(self)][1] if id(self) in slots else None
    )


@bug("recurrent")
def every_snapshot_copied_at_once(patch: Patch) -> None:
    original = RecurrentCache.snapshot

    def snapshot(self: RecurrentCache, *args: Any) -> Any:
        found = original(self, *args)
        found.state.detach()
        return found

    patch.setattr(RecurrentCache, "snapshot", snapshot)


@bug("recurrent")
def held_states_that_nobody_lets_go_of_at_the_end(patch: Patch) -> None:
    patch.setattr(states.HeldStates, "moved_out", lambda self, tensors: None)


@bug("recurrent")
def checkpoints_that_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(recurrent, "shifted", lambda row, begin, end: replace(row, offset=row.offset - end + begin))


@bug("recurrent")
def a_state_at_0_that_has_seen_what_was_removed(patch: Patch) -> None:
    original = recurrent.shifted
    patch.setattr(recurrent, "shifted", lambda row, begin, end: _too_many(original, row, begin, end))


def _too_many(original: Any, row: states.StateRow, begin: int, end: int) -> states.StateRow:
    wrong = tuple(replace(point, offset=begin) for point in row.checkpoints if point.offset == end)
    shifted: states.StateRow = original(row, begin, end)
    return replace(shifted, checkpoints=(*wrong, *shifted.checkpoints))


@bug("recurrent")
def one_checkpoint_too_many(patch: Patch) -> None:
    original = RecurrentCache.__init__

    def init(self: RecurrentCache, *args: Any) -> None:
        original(self, *args)
        self._checkpoints += 1

    patch.setattr(RecurrentCache, "__init__", init)


@bug("recurrent")
def a_state_restored_at_any_position(patch: Patch) -> None:
    original = RecurrentCache.restore
    patch.setattr(
        RecurrentCache, "restore", lambda self, seq, snapshot, target: original(self, seq, snapshot)
    )


@bug("recurrent")
def a_snapshot_restored_without_its_beginning(patch: Patch) -> None:
    original = AttentionSnapshots.prepare_restore_snapshot

    def prepare(self: Any, seq: int, snapshot: Any, target: int | None = None) -> Any:
        begin, snapshot.begin = snapshot.begin, 0
        try:
            return original(self, seq, snapshot, target)
        finally:
            snapshot.begin = begin

    patch.setattr(AttentionSnapshots, "prepare_restore_snapshot", prepare)


@bug("attention")
def a_snapshot_whose_keys_are_shifted(patch: Patch) -> None:
    patch.setattr(AttentionSnapshots, "detach_shared", lambda self, cells: None)


@bug("attention")
def a_snapshot_left_behind_by_defrag(patch: Patch) -> None:
    original = CellTable.move

    def move(self: CellTable, target: Any) -> None:
        held = {pin: pin.cells for pin in self.pins.values()}
        original(self, target)
        for pin, cells in held.items():
            pin.cells = cells

    patch.setattr(CellTable, "move", move)


@bug("attention")
def a_snapshot_that_holds_its_cells_for_ever(patch: Patch) -> None:
    patch.setattr(AttentionSnapshots, "reclaim", lambda self, count: None)


@bug("attention")
def a_target_one_token_too_far(patch: Patch) -> None:
    original = AttentionSnapshots._share
    patch.setattr(
        AttentionSnapshots, "_share", lambda self, seq, part, count: original(self, seq, part, count + 1)
    )


@bug("wrapper")
def a_snapshot_restored_in_the_first_cache_only(patch: Patch) -> None:
    def prepare(self: WrapperCache, seq: int, snapshot: Any, target: int | None = None) -> Any:
        cache: Any = self.caches[0]
        end = snapshot.end if target is None else target
        return cache.prepare_restore_snapshot(seq, snapshot.parts[0], end)

    patch.setattr(WrapperCache, "prepare_restore_snapshot", prepare)


@bug("encoder")
def another_sequences_output_visible(patch: Patch) -> None:
    original = EncoderCache._batch_mask

    def batch_mask(self: EncoderCache, ctx: ml.Context, current: Any, sizes: list[int]) -> Any:
        return original(self, ctx, replace(current, groups=current.groups[::-1]), sizes)

    patch.setattr(EncoderCache, "_batch_mask", batch_mask)


@bug("encoder")
def an_output_written_where_another_shares_it(patch: Patch) -> None:
    def store(self: Any, current: Any, seq: int, position: int, size: int, tensors: Any) -> None:
        entry = self._entries.setdefault(seq, encoder._Entry(position, size))
        entry.position, entry.length = position, size
        entry.layers[self._layer] = tensors

    patch.setattr(EncoderCache, "_store", store)


@bug("encoder")
def an_output_that_outlives_its_token(patch: Patch) -> None:
    original = EncoderCache.prepare_remove

    def prepare(self: Any, seq: int, begin: int, end: int | None = None) -> Any:
        return original(self, seq, begin + 1, end if end is None else max(end, begin + 1))

    patch.setattr(EncoderCache, "prepare_remove", prepare)


@bug("wrapper")
def starts_that_are_not_taken_back(patch: Patch) -> None:
    patch.setattr("kvcache.caches.causal.CausalCache.undo_forward", lambda self, resume=None: None)


@bug("wrapper")
def a_refused_start_that_ends_the_pass_before(patch: Patch) -> None:
    patch.setattr("kvcache.caches.causal.CausalCache.pass_under_way", lambda self: None)


@bug("recurrent")
def states_that_stay_where_a_refused_start_moved_them(patch: Patch) -> None:
    patch.setattr("kvcache.storage.state_table.StateTable._move", lambda self, *args: None)


@bug("wrapper")
def a_removal_from_the_first_cache_only(patch: Patch) -> None:
    original = WrapperCache.prepare_remove

    def prepare(self: WrapperCache, *args: Any) -> Any:
        first = self._order[0]
        return first.prepare_remove(*args) if isinstance(first, SupportsPrepare) else original(self, *args)

    patch.setattr(WrapperCache, "prepare_remove", prepare)


@bug("wrapper")
def one_that_can_resume_speaks_for_all(patch: Patch) -> None:
    patch.setattr(
        WrapperCache, "can_resume", lambda self, *args: any(cache.can_resume(*args) for cache in self.caches)
    )


@bug("quantized")
def scales_left_behind_by_defrag(patch: Patch) -> None:
    patch.setattr(
        QuantizedBuffer, "store", lambda self, ctx, cells, found: self.codes.store(ctx, cells, found[:1])
    )


@bug("quantized")
def halves_of_a_byte_swapped(patch: Patch) -> None:
    original = QuantizedBuffer._decode

    def decode(self: Any, ctx: ml.Context, codes: ml.Tensor, scales: ml.Tensor) -> ml.Tensor:
        found = original(self, ctx, codes, scales)
        half = found.shape[-1] // 2
        return found.slice(ctx, 2, half, 2 * half).concat(ctx, found.slice(ctx, 2, 0, half), 2)

    patch.setattr(QuantizedBuffer, "_decode", decode)


@bug("quantized")
def scattered_rows_written_in_a_run(patch: Patch) -> None:
    original = Buffer.write
    patch.setattr(
        Buffer,
        "write",
        lambda self, ctx, cells, source: original(self, ctx, cells if isinstance(cells, int) else 0, source),
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_trace_notices(name: str, monkeypatch: Patch, numpy_backend: ml.Backend) -> None:
    cache, plant = MUTATIONS[name]
    plant(monkeypatch)
    seeds = 500
    for seed in range(seeds):
        if cache in ("attention", "quantized"):
            failed = str(run_trace(numpy_backend, seed, cache=cache) or "")
        else:
            failed = run_family(cache, numpy_backend, seed, FLOATS, ml.Features()) or ""
        if failed:
            slips = [line for line in failed.splitlines() if line.startswith(SLIPS)]
            assert not slips, f"{name} does not fit the code that it is to break: {slips}"
            return
    pytest.fail(f"{name}: {seeds} traces of {cache}, and none failed")
