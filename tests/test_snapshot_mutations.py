"""The cache suite is itself tested: every bug planted in snapshots here has to make it fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.caches.causal import CausalCache
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.windows import SlidingWindowCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.snapshots.recurrent import StateSnapshots
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import InCache
from kvcache.storage.cell_table import CellTable, Pin

from .suite_bugs import Bugs, Patch, check_noticed

BUGS = Bugs()
bug = BUGS.bug


# Taken and restored.


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
    patch.setattr(AttentionSnapshots, "reclaim", lambda self, count: self.detach_all())


@bug("LazySnapshot")
def a_full_cache_that_copies_in_vain(patch: Patch) -> None:
    patch.setattr(CellTable, "unowned", property(lambda self: self.cells))


@bug("LazySnapshot")
def snapshots_that_overlap_and_never_make_room(patch: Patch) -> None:
    original = AttentionSnapshots._in_cache

    def alone(self: AttentionSnapshots) -> Iterator[Any]:
        table = self.storage.table
        return (pair for pair in original(self) if (table.references[pair[1].pin.cells] == 1).any())

    patch.setattr(AttentionSnapshots, "_in_cache", alone)


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
    original = SnapshotSchedule.due
    patch.setattr(SnapshotSchedule, "due", lambda self, seq, offset: original(self, seq, offset - 1))


@bug("ScheduledSnapshot")
def a_scheduled_snapshot_of_where_the_batch_ends(patch: Patch) -> None:
    original = AttentionSnapshots.snapshot

    def snapshot(self: AttentionSnapshots, seq: int, begin: int = 0, end: int | None = None) -> Any:
        found = original(self, seq, begin)
        found.end = found.end if end is None else end
        return found

    patch.setattr(AttentionSnapshots, "snapshot", snapshot)


@bug("ScheduledSnapshot")
def snapshots_of_a_pass_that_was_taken_back(patch: Patch) -> None:
    patch.setattr(SnapshotSchedule, "cut", lambda self, seq, position: None)


@bug("ScheduledSnapshot")
def layers_that_are_put_after_the_start_missing(patch: Patch) -> None:
    original = InCache.__init__

    def init(self: InCache, backend: Any, table: Any, buffers: Any, cells: Any) -> None:
        original(self, backend, table, dict(buffers), cells)

    patch.setattr(InCache, "__init__", init)


@bug("ScheduledSnapshot")
def each_from_the_beginning(patch: Patch) -> None:
    original = SnapshotSchedule.due
    patch.setattr(
        SnapshotSchedule,
        "due",
        lambda self, seq, offset: ((0, end) for _, end in original(self, seq, offset)),
    )


@bug("ScheduledState")
def a_state_of_where_a_batch_ended_for_one_inside_it(patch: Patch) -> None:
    def capture(self: StateSnapshots, seq: int) -> None:
        for begin, _ in self.schedule.due(seq, self.states.rows[seq].offset):
            self.schedule.taken(seq, self.snapshot(seq, begin))

    patch.setattr(StateSnapshots, "capture", capture)
    patch.setattr(SnapshotSchedule, "_over", lambda self, seq, position: self._due.pop(seq, None))


@bug("ScheduledState")
def a_skip_that_is_not_said(patch: Patch) -> None:
    patch.setattr(SnapshotSchedule, "skipped", lambda self, seq: [])


@bug("ScheduledState")
def a_skip_that_is_said_for_ever(patch: Patch) -> None:
    patch.setattr(SnapshotSchedule, "skipped", lambda self, seq: self._skipped.get(seq, []))


@bug("ScheduledState")
def a_next_position_that_is_reached_already(patch: Patch) -> None:
    patch.setattr(
        SnapshotSchedule, "next", lambda self, seq, offset: min(self._due.get(seq, ()), default=None)
    )


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
    original = CausalCache.prepare_restore_snapshot

    def prepare(self: Any, *args: Any) -> Any:
        return original(self, *args) or (lambda: None)

    patch.setattr(SlidingWindowCache, "prepare_restore_snapshot", prepare)
    patch.setattr(CausalCache, "prepare_restore_snapshot", prepare)


@bug("WrapperSnapshot")
def a_restore_half_done_that_keeps_silent(patch: Patch) -> None:
    patch.setattr(WrapperCache, "mark_lost", lambda self, seq: None)


# The tests.


@pytest.mark.parametrize("name", BUGS.found)
def test_the_suite_notices(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_noticed(BUGS, name, tmp_path, monkeypatch)
