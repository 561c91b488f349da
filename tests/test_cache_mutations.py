"""The cache suite is itself tested: every bug planted here has to make it fail."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import cache as errors
from kvcache import forward, moving, plain, reading
from kvcache.capturing import AttentionSnapshots
from kvcache.causal import CausalCache, ChunkedCache, SlidingWindowCache, full
from kvcache.cells import CellTable, Pin
from kvcache.encoder import EncoderCache
from kvcache.forward import Forward
from kvcache.reading import Reading
from kvcache.recurrent import RecurrentCache
from kvcache.scheduling import Schedule
from kvcache.snapshots import InCache
from kvcache.testing import CacheTests
from kvcache.wrapper import WrapperCache

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, str, Callable[[Patch], None]]] = {}
"""What is wrong -> (module of the area that has to notice, its class, how to plant it)."""


def bug(area: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        module = {
            "Batch": "batches", "Fault": "faults", "Mask": "masks", "Window": "windows",
            "LazySnapshot": "lazy", "ScheduledSnapshot": "scheduled", "ScheduledState": "scheduled",
            "EncoderSnapshot": "composed", "WrapperSnapshot": "composed",
        }  # fmt: skip
        MUTATIONS[function.__name__] = (module.get(area, area.lower()), f"{area}Tests", function)
        return function

    return plant


# Who sees whom.


@bug("Mask")
def a_window_one_too_narrow(patch: Patch) -> None:
    patch.setattr(SlidingWindowCache, "_lower", lambda self: lambda p: p - max(0, self.window - 1))


@bug("Mask")
def a_window_one_too_wide(patch: Patch) -> None:
    patch.setattr(SlidingWindowCache, "_lower", lambda self: lambda p: p - self.window - 1)


@bug("Mask")
def a_chunk_that_slides(patch: Patch) -> None:
    patch.setattr(ChunkedCache, "_lower", lambda self: lambda p: p - self.chunk + 1)


@bug("Mask")
def a_token_that_does_not_see_itself(patch: Patch) -> None:
    original = reading.visible

    def visible(*args: Any) -> Any:
        first, stop = original(*args)
        return first, stop - 1

    patch.setattr(reading, "visible", visible)


@bug("Mask")
def another_sequence_visible(patch: Patch) -> None:
    original = Reading.mask

    def mask(self: Reading, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        found[:tokens, (found[:tokens] == 0).any(axis=0)] = 0
        return found if len(self.groups) > 1 else original(self, tokens, *args)

    patch.setattr(Reading, "mask", mask)


@bug("Mask")
def a_column_of_padding_visible(patch: Patch) -> None:
    original = Reading.mask

    def mask(self: Reading, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        if self.length > sum(len(row) for row in self.rows):
            found[:tokens, np.flatnonzero((found == -np.inf).all(axis=0))] = 0
        return found

    patch.setattr(Reading, "mask", mask)


@bug("Mask")
def a_row_of_padding_visible(patch: Patch) -> None:
    original = Reading.mask

    def mask(self: Reading, tokens: int, *args: Any) -> np.ndarray:
        found = original(self, tokens, *args)
        found[tokens:] = 0
        return found

    patch.setattr(Reading, "mask", mask)


@bug("Mask")
def a_stale_mask_after_set_causal(patch: Patch) -> None:
    patch.setattr(Forward, "lift", lambda self, indices: setattr(self, "lifted", indices))


@bug("Mask")
def an_except_list_that_outlives_its_pass(patch: Patch) -> None:
    lifted: list[frozenset[int]] = []
    original, start = Forward.lift, CausalCache.start_forward

    def lift(self: Forward, indices: frozenset[int]) -> None:
        lifted[:] = [indices]
        original(self, indices)

    def start_forward(self: CausalCache, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if lifted and self._forward is not None:
            original(self._forward, lifted[0])

    patch.setattr(Forward, "lift", lift)
    patch.setattr(CausalCache, "start_forward", start_forward)


@bug("Mask")
def a_mask_elided_for_an_unordered_batch(patch: Patch) -> None:
    original = Reading.elided

    def elided(self: Reading, *args: Any) -> Any:
        found = original(self, *args)
        return ml.CAUSAL if found is False and len(self.groups) == 1 else found

    patch.setattr(Reading, "elided", elided)


# Where data lies.


@bug("Storing")
def values_read_in_the_wrong_layout(patch: Patch) -> None:
    def read_permuted(self: plain.Buffer, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        flat = self.tensor.view(ctx, start * self.strides[0], (count, self.heads, self.dim))
        return flat.permute(ctx, 1, 2, 0)

    patch.setattr(plain.Buffer, "read_permuted", read_permuted)


@bug("Storing")
def scattered_cells_written_in_ascending_order(patch: Patch) -> None:
    original = Forward.targets

    def targets(self: Forward, ctx: ml.Context) -> int | ml.Tensor:
        if not isinstance(self.cells, int):
            self.cells = np.sort(self.cells)
        return original(self, ctx)

    patch.setattr(Forward, "targets", targets)


@bug("Storing")
def every_layer_in_one_buffer(patch: Patch) -> None:
    patch.setattr(CausalCache, "set_layer", lambda self, layer: None)


@bug("Storing")
def keys_written_before_the_shapes_are_checked(patch: Patch) -> None:
    original = CausalCache.put

    def put(self: CausalCache, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        buffers = self._buffers.get(self._layer)
        forward = self._forward
        if buffers and forward and key.shape == (forward.tokens, buffers.key.heads, buffers.key.dim):
            buffers.key.write(ctx, forward.targets(ctx), key)
        original(self, ctx, key, value)

    patch.setattr(CausalCache, "put", put)


@bug("Reserving")
def a_reserved_pass_that_writes(patch: Patch) -> None:
    original = CausalCache.put

    def put(self: CausalCache, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        original(self, ctx, key, value)
        assert self._forward is not None
        self._buffers[self._layer].write(ctx, self._forward.targets(ctx), key, value)

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
    patch.setattr(CausalCache, "_check_shift", lambda self, *args: None)


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
        self._table = CellTable(self._cells(), self._max_sequences)

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
    patch.setattr("kvcache.cells.Row.holds_any", lambda self, positions: False)


@bug("Fault")
def a_lost_sequence_that_keeps_silent(patch: Patch) -> None:
    patch.setattr(moving, "_mark_lost", lambda table, *touched: None)


@bug("Fault")
def everything_marked_lost(patch: Patch) -> None:
    original = moving._mark_lost
    patch.setattr(moving, "_mark_lost", lambda table, *touched: original(table, range(table.cells)))


@bug("Attending")
def attention_merged_without_its_mask(patch: Patch) -> None:
    original = forward.Forward.shared
    patch.setattr(forward.Forward, "shared", lambda self, ctx: (original(self, ctx)[0], None))


@bug("Attending")
def rows_of_an_unordered_batch_mixed_up(patch: Patch) -> None:
    original = Reading.own_mask
    patch.setattr(Reading, "own_mask", lambda self, *args: original(self, *args)[::-1])


# Snapshots.


@bug("LazySnapshot")
def a_snapshot_copied_when_it_is_taken(patch: Patch) -> None:
    original = AttentionSnapshots._remember

    def remember(self: AttentionSnapshots, *args: Any) -> Any:
        found = original(self, *args)
        found.detach()
        return found

    patch.setattr(AttentionSnapshots, "_remember", remember)


@bug("LazySnapshot")
def cells_of_a_snapshot_given_to_others(patch: Patch) -> None:
    def pin(self: CellTable, cells: np.ndarray) -> Pin:
        found = Pin(cells)
        self.pins[id(found)] = found
        return found

    patch.setattr(CellTable, "pin", pin)
    patch.setattr(CellTable, "unpin", lambda self, pin: self.pins.pop(id(pin), None))


@bug("LazySnapshot")
def the_newest_copied_out_first(patch: Patch) -> None:
    original = AttentionSnapshots._in_cache
    patch.setattr(AttentionSnapshots, "_in_cache", lambda self: iter([*original(self)][::-1]))


@bug("LazySnapshot")
def all_copied_out_where_one_would_do(patch: Patch) -> None:
    patch.setattr(AttentionSnapshots, "_reclaim", lambda self, count: self._detach_all())


@bug("LazySnapshot")
def a_full_cache_that_copies_in_vain(patch: Patch) -> None:
    patch.setattr(CellTable, "unowned", property(lambda self: self.cells))


@bug("LazySnapshot")
def snapshots_that_overlap_and_never_make_room(patch: Patch) -> None:
    original = AttentionSnapshots._in_cache

    def alone(self: AttentionSnapshots) -> Iterator[Any]:
        table = self._table
        return (pair for pair in original(self) if (table.references[pair[1].pin.cells] == 1).any())

    patch.setattr(AttentionSnapshots, "_in_cache", alone)


@bug("LazySnapshot")
def a_snapshot_whose_keys_are_shifted(patch: Patch) -> None:
    patch.setattr(AttentionSnapshots, "_detach_shared", lambda self, cells: None)


@bug("LazySnapshot")
def a_snapshot_left_behind_by_defrag(patch: Patch) -> None:
    original = CellTable.move

    def move(self: CellTable, target: np.ndarray) -> None:
        held = {pin: pin.cells for pin in self.pins.values()}
        original(self, target)
        for pin, cells in held.items():
            pin.cells = cells

    patch.setattr(CellTable, "move", move)


@bug("LazySnapshot")
def a_lost_snapshot_that_keeps_silent(patch: Patch) -> None:
    patch.setattr(InCache, "check", lambda self: None)


@bug("LazySnapshot")
def snapshots_that_are_gone_and_keep_their_cells(patch: Patch) -> None:
    patch.setattr(CellTable, "drop_pin", lambda self, pin: None)


@bug("LazySnapshot")
def bytes_of_the_whole_buffer(patch: Patch) -> None:
    patch.setattr(InCache, "nbytes", property(lambda self: sum(b.nbytes for b in self.buffers.values())))


@bug("ScheduledSnapshot")
def a_snapshot_taken_one_token_late(patch: Patch) -> None:
    original = Schedule.due
    patch.setattr(Schedule, "due", lambda self, seq, offset: original(self, seq, offset - 1))


@bug("ScheduledSnapshot")
def a_scheduled_snapshot_of_where_the_batch_ends(patch: Patch) -> None:
    original = CausalCache.snapshot

    def snapshot(self: CausalCache, seq: int, begin: int = 0, end: int | None = None) -> Any:
        found = original(self, seq, begin)
        found.end = found.end if end is None else end
        return found

    patch.setattr(CausalCache, "snapshot", snapshot)


@bug("ScheduledSnapshot")
def snapshots_of_a_pass_that_was_taken_back(patch: Patch) -> None:
    patch.setattr(Schedule, "cut", lambda self, seq, position: None)


@bug("ScheduledSnapshot")
def layers_that_are_put_after_the_start_missing(patch: Patch) -> None:
    original = InCache.__init__

    def init(self: InCache, backend: Any, table: Any, buffers: Any, cells: Any) -> None:
        original(self, backend, table, dict(buffers), cells)

    patch.setattr(InCache, "__init__", init)


@bug("ScheduledSnapshot")
def each_from_the_beginning(patch: Patch) -> None:
    original = Schedule.due
    patch.setattr(
        Schedule, "due", lambda self, seq, offset: ((0, end) for _, end in original(self, seq, offset))
    )


@bug("ScheduledState")
def a_state_of_where_a_batch_ended_for_one_inside_it(patch: Patch) -> None:
    def capture(self: RecurrentCache, seq: int) -> None:
        for begin, _ in self._schedule.due(seq, self._rows[seq].offset):
            self._schedule.taken(seq, self.snapshot(seq, begin))

    patch.setattr(RecurrentCache, "_capture", capture)
    patch.setattr(Schedule, "skip", lambda self, seq, position: self._due[seq].clear())


@bug("ScheduledState")
def a_next_position_that_is_reached_already(patch: Patch) -> None:
    patch.setattr(Schedule, "next", lambda self, seq, offset: min(self._due.get(seq, ()), default=None))


@bug("EncoderSnapshot")
def an_output_that_changes_in_its_snapshot(patch: Patch) -> None:
    original = EncoderCache.snapshot

    def snapshot(self: EncoderCache, seq: int, *args: Any) -> Any:
        found = original(self, seq, *args)
        return dataclasses.replace(found, layers=self._entries[seq].layers) if found.layers else found

    patch.setattr(EncoderCache, "snapshot", snapshot)


@bug("EncoderSnapshot")
def an_output_restored_without_its_token(patch: Patch) -> None:
    original = EncoderCache.prepare_restore_snapshot

    def prepare(self: EncoderCache, seq: int, snapshot: Any, target: int | None = None) -> Any:
        found = original(self, seq, snapshot, target)
        return found and original(self, seq, snapshot)

    patch.setattr(EncoderCache, "prepare_restore_snapshot", prepare)


@bug("WrapperSnapshot")
def what_only_some_have_taken_thrown_away(patch: Patch) -> None:
    original = WrapperCache.take_snapshots

    def take(self: WrapperCache, seq: int, upto: int | None = None) -> Any:
        found = original(self, seq, upto)
        for cache in self.caches:
            if isinstance(cache, CausalCache):
                cache.take_snapshots(seq)
        return found

    patch.setattr(WrapperCache, "take_snapshots", take)


@bug("WrapperSnapshot")
def a_snapshot_restored_in_those_that_can(patch: Patch) -> None:
    original = AttentionSnapshots.prepare_restore_snapshot

    def prepare(self: Any, *args: Any) -> Any:
        return original(self, *args) or (lambda: None)

    patch.setattr(SlidingWindowCache, "prepare_restore_snapshot", prepare)
    patch.setattr(CausalCache, "prepare_restore_snapshot", prepare)


@bug("WrapperSnapshot")
def a_restore_half_done_that_keeps_silent(patch: Patch) -> None:
    patch.setattr(WrapperCache, "mark_lost", lambda self, seq: None)


# The tests.


class Recorder:
    """Which tests failed in an inner run, and why."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)


def run_area(folder: Path, module: str, name: str) -> Recorder:
    file = folder / f"test_area_{name.lower()}.py"
    file.write_text(
        f"from kvcache.testing.{module} import {name}\n\n\n"
        f'class TestArea({name}):\n    backend_name = "numpy"\n    long_run = 2000\n'
    )
    recorder = Recorder()
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(folder / "none.ini")]
    (folder / "none.ini").write_text("[pytest]\n")
    pytest.main([str(file), f"--rootdir={folder}", "--import-mode=importlib", *options], plugins=[recorder])
    return recorder


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_suite_notices(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, area, plant = MUTATIONS[name]
    plant(monkeypatch)
    found = run_area(tmp_path, module, area)
    monkeypatch.undo()
    print(name, "->", *found.failed)
    assert found.failed, f"{name}: {found.passed} tests of {area} passed, and none failed"


def areas() -> Iterator[type]:
    return (base for base in CacheTests.__mro__ if base.__module__.startswith("kvcache.testing."))


def test_no_test_of_one_area_hides_one_of_another() -> None:
    names = Counter(name for area in areas() for name in vars(area) if name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(names.values()) > 100


def test_every_area_of_the_suite_belongs_to_the_whole() -> None:
    import kvcache.testing as package

    whole = set(areas())
    for file in Path(inspect.getfile(package)).parent.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith("class ") and "Tests(CacheCase)" in line:
                assert any(area.__name__ in line for area in whole), f"{file.name}: {line}"
