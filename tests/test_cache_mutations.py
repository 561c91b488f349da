"""The cache suite is itself tested: every bug planted in the caches here has to make it fail."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import cache as errors
from kvcache.attention import forward_pass as forward
from kvcache.attention import read_plan as reading
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.read_plan import ReadPlan
from kvcache.caches import causal as full
from kvcache.caches.causal import CausalCache
from kvcache.caches.sequences import SequenceEditor
from kvcache.caches.windows import ChunkedCache, SlidingWindowCache
from kvcache.storage import buffer as plain
from kvcache.storage import relocation as moving
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.state_table import StateTable
from kvcache.testing import CacheTests

from .suite_bugs import Bugs, Patch, check_noticed

BUGS = Bugs()
bug = BUGS.bug


# Who sees whom.


@bug("Mask")
def a_window_one_too_narrow(patch: Patch) -> None:
    patch.setattr(SlidingWindowCache, "lower_bound", lambda self: lambda p: p - max(0, self.window - 1))


@bug("Mask")
def a_window_one_too_wide(patch: Patch) -> None:
    patch.setattr(SlidingWindowCache, "lower_bound", lambda self: lambda p: p - self.window - 1)


@bug("Mask")
def a_chunk_that_slides(patch: Patch) -> None:
    patch.setattr(ChunkedCache, "lower_bound", lambda self: lambda p: p - self.chunk + 1)


@bug("Mask")
def a_token_that_does_not_see_itself(patch: Patch) -> None:
    original = reading.visible

    def visible(*args: Any) -> Any:
        first, stop = original(*args)
        return first, stop - 1

    patch.setattr(reading, "visible", visible)


@bug("Mask")
def another_sequence_visible(patch: Patch) -> None:
    original = ReadPlan.mask

    def mask(self: ReadPlan, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        found[:tokens, (found[:tokens] == 0).any(axis=0)] = 0
        return found if len(self.groups) > 1 else original(self, tokens, *args)

    patch.setattr(ReadPlan, "mask", mask)


@bug("Mask")
def a_column_of_padding_visible(patch: Patch) -> None:
    original = ReadPlan.mask

    def mask(self: ReadPlan, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        if self.length > sum(len(row) for row in self.rows):
            found[:tokens, np.flatnonzero((found == -np.inf).all(axis=0))] = 0
        return found

    patch.setattr(ReadPlan, "mask", mask)


@bug("Mask")
def a_row_of_padding_visible(patch: Patch) -> None:
    original = ReadPlan.mask

    def mask(self: ReadPlan, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        found[tokens:] = 0
        return found

    patch.setattr(ReadPlan, "mask", mask)


@bug("Mask")
def a_stale_mask_after_set_causal(patch: Patch) -> None:
    patch.setattr(ForwardPass, "lift", lambda self, indices: setattr(self, "lifted", indices))


@bug("Mask")
def an_except_list_that_outlives_its_pass(patch: Patch) -> None:
    lifted: list[frozenset[int]] = []
    original, start = ForwardPass.lift, CausalCache.start_forward

    def lift(self: ForwardPass, indices: frozenset[int]) -> None:
        lifted[:] = [indices]
        original(self, indices)

    def start_forward(self: CausalCache, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if lifted and self._pass is not None:
            original(self._pass, lifted[0])

    patch.setattr(ForwardPass, "lift", lift)
    patch.setattr(CausalCache, "start_forward", start_forward)


@bug("Mask")
def a_mask_elided_for_an_unordered_batch(patch: Patch) -> None:
    original = ReadPlan.elided

    def elided(self: ReadPlan, *args: Any) -> Any:
        found = original(self, *args)
        return ml.CAUSAL if found is False and len(self.groups) == 1 else found

    patch.setattr(ReadPlan, "elided", elided)


# Where data lies.


@bug("Storing")
def values_read_in_the_wrong_layout(patch: Patch) -> None:
    def read_permuted(self: plain.Buffer, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        flat = self.tensor.view(ctx, start * self.strides[0], (count, self.heads, self.dim))
        return flat.permute(ctx, 1, 2, 0)

    patch.setattr(plain.Buffer, "read_permuted", read_permuted)


@bug("Storing")
def scattered_cells_written_in_ascending_order(patch: Patch) -> None:
    original = ForwardPass.targets

    def targets(self: ForwardPass, ctx: ml.Context) -> int | ml.Tensor:
        if not isinstance(self.cells, int):
            self.cells = np.sort(self.cells)
        return original(self, ctx)

    patch.setattr(ForwardPass, "targets", targets)


@bug("Storing")
def every_layer_in_one_buffer(patch: Patch) -> None:
    patch.setattr(CausalCache, "set_layer", lambda self, layer: None)


@bug("Storing")
def keys_written_before_the_shapes_are_checked(patch: Patch) -> None:
    original = CausalCache.put

    def put(self: CausalCache, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        buffers = self._buffers.get(self._layer)
        forward = self._pass
        if buffers and forward and key.shape == (forward.tokens, buffers.key.heads, buffers.key.dim):
            buffers.key.write(ctx, forward.targets(ctx), key)
        original(self, ctx, key, value)

    patch.setattr(CausalCache, "put", put)


@bug("Reserving")
def a_reserved_pass_that_writes(patch: Patch) -> None:
    original = CausalCache.put

    def put(self: CausalCache, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        original(self, ctx, key, value)
        assert self._pass is not None
        self._buffers[self._layer].write(ctx, self._pass.cells or 0, key, value)

    patch.setattr(CausalCache, "put", put)


# Sharing.


@bug("Sharing")
def a_reference_not_counted_on_sharing(patch: Patch) -> None:
    original = CellTable.share

    def share(self: CellTable, src: int, dst: int, count: int) -> None:
        original(self, src, dst, count)
        self.references[self.rows[dst].cells] -= 1

    patch.setattr(CellTable, "share", share)


@bug("Sharing")
def a_prefix_one_token_too_long(patch: Patch) -> None:
    original = CellTable.share
    patch.setattr(CellTable, "share", lambda self, src, dst, count: original(self, src, dst, count + 1))


@bug("Sharing")
def a_cell_freed_by_the_first_owner_that_lets_go(patch: Patch) -> None:
    original = CellTable._release

    def release(self: CellTable, cells: np.ndarray) -> None:
        self.free += int((self.references[cells] > 1).sum())
        self.references[cells] = 1
        original(self, cells)

    patch.setattr(CellTable, "_release", release)


# Removal and moving.


@bug("Removal")
def keys_shifted_of_tokens_that_stay(patch: Patch) -> None:
    original = moving.prepare_shift

    def prepare(backend: Any, buffers: Any, table: Any, seq: int, start: int, *rest: Any) -> Any:
        return original(backend, buffers, table, seq, 0, *rest)

    patch.setattr(moving, "prepare_shift", prepare)


@bug("Removal")
def keys_shifted_the_wrong_way(patch: Patch) -> None:
    original = moving.prepare_shift

    def prepare(backend: Any, buffers: Any, table: Any, seq: int, start: int, by: int, shift: Any) -> Any:
        return original(backend, buffers, table, seq, start, -by, shift)

    patch.setattr(moving, "prepare_shift", prepare)


@bug("Removal")
def keys_shifted_in_the_first_layer_only(patch: Patch) -> None:
    original = moving.prepare_shift

    def prepare(backend: Any, buffers: dict[int, Any], *rest: Any) -> Any:
        return original(backend, dict(list(buffers.items())[:1]), *rest)

    patch.setattr(moving, "prepare_shift", prepare)


@bug("Removal")
def shared_tokens_moved_under_their_other_owner(patch: Patch) -> None:
    patch.setattr(SequenceEditor, "_check_shift", lambda self, *args: None)


@bug("Defrag")
def defrag_that_moves_metadata_only(patch: Patch) -> None:
    patch.setattr(moving, "defragment", lambda backend, buffers, table: table.move(table.spread()))


@bug("Defrag")
def defrag_that_moves_data_only(patch: Patch) -> None:
    patch.setattr(CellTable, "move", lambda self, target: None)


@bug("Defrag")
def defrag_that_forgets_the_values(patch: Patch) -> None:
    original = plain.Buffer.store

    def store(self: plain.Buffer, ctx: ml.Context, cells: ml.Tensor, found: Any) -> None:
        if self.dim % 8 == 0:  # keys
            original(self, ctx, cells, found)

    patch.setattr(plain.Buffer, "store", store)


# Capacity and windows.


@bug("Capacity")
def an_eviction_not_undone_when_the_cache_is_full(patch: Patch) -> None:
    patch.setattr(CausalCache, "_restore", lambda self, saved: None)


@bug("Capacity")
def a_capacity_not_rounded_up(patch: Patch) -> None:
    def make_table(self: CausalCache) -> None:
        self._active = self.config
        table = CellTable(self._cells(), self._max_sequences)
        storage = CellStorage(self.backend, self._dtype, self._active, table)
        self._table, self._buffers = storage.table, storage.buffers
        self.snapshots.bind(storage, self._window())

    patch.setattr(CausalCache, "_make_table", make_table)


@bug("Capacity")
def an_overflow_that_blames_nobody(patch: Patch) -> None:
    class Silent(errors.CacheFullError):
        def __init__(self, asked: int, free: int, held: dict[int, int]) -> None:
            super().__init__(asked, free, {})

    patch.setattr(full, "CacheFullError", Silent)


@bug("Window")
def eviction_by_the_highest_position_of_the_batch(patch: Patch) -> None:
    original = SlidingWindowCache._evictions

    def evictions(self: SlidingWindowCache, groups: Any) -> Any:
        return original(self, [dataclasses.replace(g, positions=g.positions[-1:]) for g in groups])

    patch.setattr(SlidingWindowCache, "_evictions", evictions)


@bug("Window")
def no_eviction_out_of_the_batch(patch: Patch) -> None:
    original = SlidingWindowCache._evictions

    def evictions(self: SlidingWindowCache, groups: Any) -> Any:
        mine = {group.seq for group in groups}
        return [pair for pair in original(self, groups) if pair[0] in mine]

    patch.setattr(SlidingWindowCache, "_evictions", evictions)


@bug("Window")
def a_resume_one_token_too_early(patch: Patch) -> None:
    original = SlidingWindowCache.can_resume
    patch.setattr(
        SlidingWindowCache,
        "can_resume",
        lambda self, seq, position: original(self, seq, position) or original(self, seq, position + 1),
    )


@bug("Window")
def a_resume_beyond_the_end(patch: Patch) -> None:
    original = SlidingWindowCache.can_resume
    patch.setattr(
        SlidingWindowCache,
        "can_resume",
        lambda self, seq, position: (
            original(self, seq, max(0, position - 1)) or original(self, seq, position)
        ),
    )


# Refusals, failures, attention.


@bug("Batch")
def a_stored_pair_taken_again(patch: Patch) -> None:
    patch.setattr("kvcache.storage.cell_table.Row.holds_any", lambda self, positions: False)


@bug("Fault")
def a_lost_sequence_that_keeps_silent(patch: Patch) -> None:
    patch.setattr(moving, "_mark_lost", lambda table, *touched: None)


@bug("Fault")
def everything_marked_lost(patch: Patch) -> None:
    original = moving._mark_lost
    patch.setattr(moving, "_mark_lost", lambda table, *touched: original(table, range(table.cells)))


@bug("Attending")
def attention_merged_without_its_mask(patch: Patch) -> None:
    original = forward.ForwardPass.shared
    patch.setattr(forward.ForwardPass, "shared", lambda self, ctx: (original(self, ctx)[0], None))


@bug("Attending")
def rows_of_an_unordered_batch_mixed_up(patch: Patch) -> None:
    original = ReadPlan.own_mask
    patch.setattr(ReadPlan, "own_mask", lambda self, *args: original(self, *args)[::-1])


@bug("Attending")
def a_history_that_is_not_padded(patch: Patch) -> None:
    patch.setattr(forward, "plan_own", lambda table, group, padding: reading.plan_read(table, [group]))


@bug("Attending")
def a_neighbour_in_the_columns_of_padding(patch: Patch) -> None:
    patch.setattr(forward, "plan_own", lambda table, group, pad: reading.plan_read(table, [group], pad))


@bug("Attending")
def columns_of_padding_as_they_were_left(patch: Patch) -> None:
    patch.setattr(ForwardPass, "_blank", lambda *args: None)


@bug("Attending")
def cells_that_are_blank_for_ever(patch: Patch) -> None:
    original = CellTable._release

    def release(self: CellTable, cells: np.ndarray) -> None:
        before = None if self.blank is None else self.blank.copy()
        original(self, cells)
        self.blank = before

    patch.setattr(CellTable, "_release", release)


@bug("Reading")
def a_layer_read_that_was_not_put(patch: Patch) -> None:
    patch.setattr(LayerBuffers, "stamp", property(lambda self: 1 << 62, lambda self, stamp: None))


@bug("Reading")
def queries_that_evict(patch: Patch) -> None:
    original = CausalCache.start_forward

    def start_forward(self: CausalCache, ctx: Any, batch: Any, *args: Any, **options: Any) -> None:
        original(self, ctx, batch, *args, **options)
        if options.get("read_only") and self._pass is not None:
            self._make_room(0, self._pass.groups)

    patch.setattr(CausalCache, "start_forward", start_forward)


@bug("Reading")
def states_that_a_reader_writes_into(patch: Patch) -> None:
    def read(self: StateTable, ctx: Any, key: Any, sequences: Any, *args: Any) -> ml.Tensor:
        seq = next(iter(sequences))
        return self.point(self.rows[seq]).state.read(ctx)[key]

    patch.setattr(StateTable, "read", read)


# The tests.


@pytest.mark.parametrize("name", BUGS.found)
def test_the_suite_notices(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_noticed(BUGS, name, tmp_path, monkeypatch)


def areas() -> Iterator[type]:
    return (base for base in CacheTests.__mro__ if base.__module__.startswith("kvcache.testing."))


def test_no_test_of_one_area_hides_one_of_another() -> None:
    names = Counter(name for area in areas() for name in vars(area) if name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(names.values()) > 100


def test_every_area_of_the_suite_belongs_to_the_whole() -> None:
    import kvcache.testing as package

    whole = set(areas())
    for file in Path(inspect.getfile(package)).parent.glob("**/*.py"):
        for line in file.read_text().splitlines():
            if line.startswith("class ") and "Tests(CacheCase)" in line:
                assert any(area.__name__ in line for area in whole), f"{file.name}: {line}"
