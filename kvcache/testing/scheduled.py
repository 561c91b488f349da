"""Snapshots asked for ahead: taken when a batch reaches their position, also from its middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase
from kvcache.testing.model import Setup
from kvcache.testing.protocol import Plan, only_protocol
from kvcache.testing.snapshots import Holder
from kvcache.testing.states import StateRig, StateSetup

__all__ = ["ScheduledSnapshotTests", "ScheduledStateTests"]

ALL = Setup(max_sequences=4, capacity=12, layers=2)
WINDOW = replace(ALL, window=3, memory=5)
KINDS = {"causal": ALL, "chunked": replace(ALL, chunk=4), "window": WINDOW}
kinds = pytest.mark.parametrize("setup", list(KINDS.values()), ids=list(KINDS))

Make = Callable[..., Holder]


def _ends(cache: kvcache.CausalCache, seq: int) -> list[tuple[int, int]]:
    return [(snapshot.begin, snapshot.end) for snapshot in cache.take_snapshots(seq)]


class ScheduledSnapshotTests(CacheCase):
    @pytest.fixture
    def planned(self, backend: ml.Backend, ctx: ml.Context) -> Make:
        """``planned(setup)``: a cache that is empty, and what its sequences hold."""
        return lambda setup=ALL: Holder(setup, backend, ctx)

    @kinds
    def test_what_is_taken_inside_a_batch_is_what_was_there_at_that_position(
        self, planned: Make, setup: Setup
    ) -> None:
        """Two sequences in one batch, mixed; the last position is that of the batch's end."""
        h = planned(setup)
        h.forward([0, 1], [0] * 2)
        h.cache.schedule_snapshots(0, [5, 3, 7, 7])
        h.cache.schedule_snapshots(1, [2])
        h.forward([2, 0, 3, 1, 4, 5, 2, 6], [0, 1, 0, 1, 0, 0, 1, 0])
        reach = setup.reach if setup.window is not None else None
        ids = {seq: dict(row) for seq, row in h.held.items()}
        begins = {3: 2, 5: 3, 7: 5} if reach is None else {3: 0, 5: 0, 7: 0}
        taken = h.cache.take_snapshots(0)
        assert {snapshot.end: snapshot.begin for snapshot in taken} == begins
        for snapshot in taken:
            low = snapshot.begin if reach is None else max(0, snapshot.end - reach)
            assert snapshot.positions.tolist() == list(range(low, snapshot.end))
            h.cache.copy_prefix(0, 2, snapshot.begin)
            h.held[2] = {p: ids[0][p] for p in range(snapshot.begin)}
            h.restore(2, snapshot, ids[0])
        (other,) = h.cache.take_snapshots(1)
        h.restore(3, other, ids[1])
        assert h.cache.take_snapshots(0) == h.cache.take_snapshots(1) == []

    def test_a_prefill_of_several_batches_is_covered_without_a_gap(self, planned: Make) -> None:
        h = planned()
        h.cache.schedule_snapshots(0, [4, 8, 10])
        h.forward([0, 1, 2], [0] * 3)
        assert _ends(h.cache, 0) == []
        h.forward([3, 4, 5], [0] * 3)
        assert _ends(h.cache, 0) == [(0, 4)]
        h.forward([6, 7, 8], [0] * 3)
        h.forward([9], [0])
        assert _ends(h.cache, 0) == [(4, 8), (8, 10)]
        h.cache.schedule_snapshots(0, [11])
        h.forward([10], [0])
        assert _ends(h.cache, 0) == [(10, 11)]

    def test_one_taken_in_the_very_first_pass_has_what_is_put_after_it(self, planned: Make) -> None:
        h = planned()
        h.cache.schedule_snapshots(0, [2, 4])
        h.forward([0, 1, 2, 3, 4], [0] * 5)
        ids = dict(h.held[0])
        taken = h.cache.take_snapshots(0)
        for snapshot in taken:
            snapshot.detach()
            assert snapshot.layers.keys() == {0, 1}
            assert snapshot.nbytes == 2 * h.cache.nbytes // h.cache.cells
        h.cache.remove(0, 0)
        h.held[0] = {}
        for snapshot in taken:
            h.restore(0, snapshot, ids)

    @kinds
    def test_taking_them_moves_no_data(self, backend: ml.Backend, setup: Setup) -> None:
        calls = []
        for positions in ([], [3, 4, 6]):
            plan = Plan()
            limited = only_protocol(backend, plan)
            with limited.new_context() as ctx:
                h = Holder(setup, limited, ctx)
                h.forward([0, 1], [0] * 2)
                h.cache.schedule_snapshots(0, positions)
                plan.arm(None)
                h.forward([2, 3, 4, 5], [0] * 4)
                calls.append([*plan.calls])
                assert all(snapshot.in_cache for snapshot in h.cache.take_snapshots(0))
        assert calls[0] == calls[1]

    def test_a_position_that_was_passed_is_refused_and_nothing_scheduled(self, planned: Make) -> None:
        h = planned()
        h.forward([0, 1, 2], [0] * 3)
        for passed in ([3], [5, 2], [-1, 5]):
            with pytest.raises(kvcache.InvalidRangeError):
                h.cache.schedule_snapshots(0, passed)
        for unknown in (-1, 4):
            with pytest.raises(kvcache.InvalidSequenceError):
                h.cache.schedule_snapshots(unknown, [5])
            with pytest.raises(kvcache.InvalidSequenceError):
                h.cache.take_snapshots(unknown)
        h.forward([3, 4, 5], [0] * 3)
        assert _ends(h.cache, 0) == []

    @pytest.mark.parametrize("how", ["undo", "remove", "failed pass", "remove all"])
    def test_what_is_taken_back_is_taken_anew(self, planned: Make, how: str) -> None:
        h = planned()
        h.forward([0, 1], [0] * 2)
        h.cache.schedule_snapshots(0, [3, 5])
        if how == "undo":
            h.cache.start_forward(h.ctx, Batch([2, 3, 4], [0] * 3))
            h.cache.undo_forward()
        elif how == "failed pass":
            h.cache.start_forward(h.ctx, Batch([2, 3, 4], [0] * 3))
            h.cache.remove(0, 2)
        else:
            h.forward([2, 3, 4], [0] * 3)
            cut = 2 if how == "remove" else 0
            h.cache.remove(0, cut)
            h.held[0] = {p: token for p, token in h.held[0].items() if p < cut}
        assert h.cache.snapshots_taken(0) == []
        begin = len(h.held[0])
        h.forward(list(range(begin, 6)), [0] * (6 - begin))
        ids = dict(h.held[0])
        taken = h.cache.take_snapshots(0)
        assert [(snapshot.begin, snapshot.end) for snapshot in taken] == [(begin, 3), (3, 5)]
        h.cache.remove(0, begin)
        h.held[0] = {p: ids[p] for p in range(begin)}
        for snapshot in taken:
            h.restore(0, snapshot, ids)

    def test_a_removal_keeps_what_was_taken_before_it(self, planned: Make) -> None:
        h = planned()
        h.cache.schedule_snapshots(0, [2, 4, 6])
        h.forward(list(range(6)), [0] * 6)
        h.cache.remove(0, 4)
        del h.held[0][4], h.held[0][5]
        assert [snapshot.end for snapshot in h.cache.snapshots_taken(0)] == [2, 4]
        h.forward([4, 5], [0] * 2)
        assert _ends(h.cache, 0) == [(0, 2), (2, 4), (4, 6)]

    def test_a_refused_batch_takes_nothing(self, planned: Make) -> None:
        h = planned(replace(ALL, capacity=2))
        h.forward([0, 1], [0] * 2)
        h.cache.schedule_snapshots(0, [4])
        with pytest.raises(kvcache.CacheFullError):
            h.cache.start_forward(h.ctx, Batch(list(range(2, 9)), [0] * 7))
        with pytest.raises(kvcache.InvalidBatchError):
            h.cache.start_forward(h.ctx, Batch([2, 3, 1], [0] * 3))
        h.cache.start_forward(h.ctx, Batch([2, 3], [0] * 2), reserve=True)
        assert h.cache.snapshots_taken(0) == []
        h.forward([2, 3], [0] * 2)
        assert _ends(h.cache, 0) == [(2, 4)]

    def test_they_are_handed_over_once_and_up_to_where_it_is_asked(self, planned: Make) -> None:
        h = planned()
        h.cache.schedule_snapshots(0, [1, 3, 5])
        h.forward(list(range(6)), [0] * 6)
        assert [snapshot.end for snapshot in h.cache.snapshots_taken(0)] == [1, 3, 5]
        assert [snapshot.end for snapshot in h.cache.take_snapshots(0, 3)] == [1, 3]
        assert [snapshot.end for snapshot in h.cache.take_snapshots(0, 4)] == []
        assert [snapshot.end for snapshot in h.cache.take_snapshots(0)] == [5]

    def test_a_sequence_that_is_replaced_forgets_what_was_scheduled(self, planned: Make) -> None:
        h = planned()
        h.forward([0, 1, 2, 3], [1] * 4)
        h.cache.schedule_snapshots(0, [1, 3, 5])
        h.forward([0, 1], [0] * 2)
        h.cache.copy_prefix(1, 0, 4)
        h.held[0] = dict(h.held[1])
        h.forward([4, 5], [0] * 2)
        assert _ends(h.cache, 0) == []

    def test_after_a_restore_they_span_from_what_was_restored(self, planned: Make) -> None:
        h = planned()
        h.forward([0, 1, 2], [1] * 3)
        snapshot = h.cache.snapshot(1)
        h.cache.schedule_snapshots(0, [2, 5])
        assert h.cache.restore(0, snapshot)
        h.held[0] = dict(h.held[1])
        h.forward([3, 4, 5], [0] * 3)
        ids = dict(h.held[0])
        first, second = h.cache.take_snapshots(0)
        assert [(s.begin, s.end) for s in (first, second)] == [(0, 2), (2, 5)]
        h.restore(2, h.cache.merge(first, second), ids)

    def test_a_window_with_a_gap_is_skipped(self, planned: Make) -> None:
        h = planned(WINDOW)
        h.cache.schedule_snapshots(0, [2, 8, 10])
        h.forward([0, 1, 2, 9, 10], [0] * 5)
        assert [snapshot.end for snapshot in h.cache.take_snapshots(0)] == [2, 10]
        assert h.cache.skipped_snapshots(0) == [8]
        assert h.cache.skipped_snapshots(0) == [], "it is said once"

    def test_a_cache_bound_anew_has_nothing_scheduled(self, planned: Make, backend: ml.Backend) -> None:
        h = planned()
        h.cache.schedule_snapshots(0, [2])
        h.cache.close()
        h.cache.init(backend, ALL.dtype, ALL.max_sequences, ALL.capacity, ALL.max_batch)
        h.forward([0, 1, 2], [0] * 3)
        assert _ends(h.cache, 0) == []


class ScheduledStateTests(CacheCase):
    """A state is that of a batch's end."""

    @pytest.fixture
    def states(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., StateRig]:
        """``states(**changes)``: a recurrent cache and its model, side by side."""
        return lambda **changes: StateRig(replace(StateSetup(), **changes), backend, ctx)

    def test_a_state_is_taken_where_a_batch_ends(self, states: Callable[..., StateRig]) -> None:
        r = states()
        r.cache.schedule_snapshots(0, [2, 4, 7])
        r.cache.schedule_snapshots(1, [1])
        assert r.cache.next_snapshot(0) == 2
        assert r.cache.next_snapshot(2) is None
        r.forward(0, 1, 0)
        two, one = r.model.snapshot(0, 0, 2), r.model.snapshot(1, 0, 1)
        assert r.cache.next_snapshot(0) == 4, "2 is reached"
        assert r.cache.next_snapshot(1) is None
        r.forward(0, 0, 0)
        assert r.cache.next_snapshot(0) == 7, "4 was passed"
        assert r.cache.skipped_snapshots(0) == [4]
        assert r.cache.skipped_snapshots(0) == r.cache.skipped_snapshots(1) == [], "it is said once"
        r.forward(0, 0)
        seven = r.model.snapshot(0, 2, 7)
        taken = [*r.cache.take_snapshots(0), *r.cache.take_snapshots(1)]
        assert [(s.begin, s.end) for s in taken] == [(0, 2), (2, 7), (0, 1)]
        assert r.cache.take_snapshots(0) == []
        r.copies += zip(taken, (two, seven, one), strict=True)
        r.remove(0, 0)
        assert r.restore(0, 0)
        assert r.restore(0, 1)
        assert r.restore(2, 2)
        r.forward(0, 2, 1)
        r.drain()

    @pytest.mark.parametrize("looked", [False, True])
    def test_positions_inside_a_batch_are_skipped_and_said_to_be(
        self, states: Callable[..., StateRig], looked: bool
    ) -> None:
        r = states()
        r.cache.schedule_snapshots(0, [3, 7])
        r.forward(*[0] * 9)
        if looked:
            assert r.cache.take_snapshots(0) == []
        assert r.cache.skipped_snapshots(0) == [3, 7]
        assert r.cache.take_snapshots(0) == []
        assert r.cache.skipped_snapshots(0) == []

    @pytest.mark.parametrize("how", ["taken back", "cancelled", "replaced"])
    def test_a_skip_that_was_not_asked_for_goes_with_the_tokens(
        self, states: Callable[..., StateRig], how: str
    ) -> None:
        r = states(interval=1, checkpoints=9)
        r.forward(0)
        r.cache.schedule_snapshots(0, [2, 3])
        r.forward(0, 0, 0)
        assert r.cache.snapshots_taken(0) == []
        if how == "cancelled":
            r.cache.cancel_snapshots(0)
        elif how == "replaced":
            r.copy_prefix(1, 0, 0)
        else:
            assert r.remove(0, 1)
            r.forward(0, 0)
            assert [snapshot.end for snapshot in r.cache.take_snapshots(0)] == [3]
        assert r.cache.skipped_snapshots(0) == ([2] if how == "taken back" else [])

    def test_positions_that_were_passed_are_refused(self, states: Callable[..., StateRig]) -> None:
        r = states()
        r.forward(0, 0)
        for passed in ([2], [5, 1]):
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.schedule_snapshots(0, passed)
        assert r.cache.next_snapshot(0) is None

    @pytest.mark.parametrize("how", ["remove", "undo", "failed pass"])
    def test_a_state_that_is_taken_back_is_taken_anew(
        self, states: Callable[..., StateRig], how: str
    ) -> None:
        r = states(interval=1, checkpoints=9)
        r.forward(0)
        r.forward(0)
        r.cache.schedule_snapshots(0, [3, 4])
        if how == "remove":
            r.forward(0)
            assert [snapshot.end for snapshot in r.cache.snapshots_taken(0)] == [3]
            assert r.remove(0, 2)
        elif how == "undo":
            r.cache.start_forward(r.ctx, Batch([2], [0]))
            r.cache.undo_forward()
        else:
            assert r.start([0])
            r.write("conv", 0, in_place=True)
            assert r.remove(0, 2)
        assert r.cache.snapshots_taken(0) == []
        assert r.cache.next_snapshot(0) == 3
        for end in (3, 4):
            r.forward(0)
            r.copies.append((r.cache.snapshots_taken(0)[-1], r.model.snapshot(0, end - 1, end)))
        assert [(s.begin, s.end) for s in r.cache.take_snapshots(0)] == [(2, 3), (3, 4)]
        r.remove(0, 2)
        assert r.restore(0, 0)
        assert r.restore(0, 1)
        r.drain()

    @pytest.mark.parametrize("what", ["take", "start"])
    @every_way_to_fail
    def test_a_device_that_fails_in_taking_one_leaves_all_as_it_was(
        self, backend: ml.Backend, when: str, what: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> StateRig:
            r = StateRig(StateSetup(), limited, ctx)
            r.cache.schedule_snapshots(0, [2])
            r.forward(0, 0, 1)
            return r

        def check(r: StateRig) -> None:
            r.check()
            assert [snapshot.end for snapshot in r.cache.snapshots_taken(0)] == [2]
            r.copies.append((r.cache.take_snapshots(0)[0], r.model.snapshot(0, 0, 2)))
            r.forward(0, 1)
            assert r.restore(2, 0)
            r.drain()

        acts: dict[str, Callable[[StateRig], object]] = {
            "take": lambda r: r.cache.take_snapshots(0),
            "start": lambda r: r.cache.start_forward(r.ctx, r.plan([0, 1])),
        }
        every_failure(backend, when, make, acts[what], check, self.fault_stride)

    def test_states_of_another_dtype_are_not_restored(
        self, states: Callable[..., StateRig], floats: list[ml.DType]
    ) -> None:
        r = states(conv_dtype=floats[0])
        r.forward(0, 0)
        r.snapshot(0)
        for dtype in floats[1:]:
            other = states(conv_dtype=dtype)
            with pytest.raises(kvcache.InvalidRangeError):
                other.cache.restore(0, r.copies[0][0])
            other.check()
