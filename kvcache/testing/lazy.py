"""Snapshots that lie in the cache: copied only when their cells are needed, and no more than it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import AttentionSnapshot, tensors_of
from kvcache.testing import values
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase
from kvcache.testing.model import Setup
from kvcache.testing.protocol import Plan, only_protocol
from kvcache.testing.snapshots import Holder, filled
from ml import DType

__all__ = ["LazySnapshotTests"]

ALL = Setup(max_sequences=4, capacity=12, layers=2)
WINDOW = replace(ALL, window=3, memory=5)
TIGHT = Setup(max_sequences=4, capacity=4)
kinds = pytest.mark.parametrize(
    "setup", [ALL, replace(ALL, chunk=4), WINDOW], ids=["causal", "chunked", "window"]
)

Ids = dict[int, int]
Make = Callable[..., Holder]


def _drop(h: Holder, seq: int) -> None:
    h.cache.remove(seq, 0)
    h.held[seq] = {}


def _four_each(h: Holder, count: int = 3) -> list[tuple[AttentionSnapshot, Ids]]:
    """Snapshots of four tokens each, of sequences that are gone by then; the oldest first."""
    found = []
    for seq in range(count):
        h.forward([0, 1, 2, 3], [seq] * 4)
        found.append((h.cache.snapshot(seq), dict(h.held[seq])))
    for seq in range(count):
        _drop(h, seq)
    return found


def _where(pairs: list[tuple[AttentionSnapshot, Ids]]) -> list[bool]:
    return [snapshot.in_cache for snapshot, _ in pairs]


class LazySnapshotTests(CacheCase):
    @pytest.fixture
    def tight(self, backend: ml.Backend, ctx: ml.Context) -> Make:
        """``tight(setup)``: a cache that is empty, and what its sequences hold."""
        return lambda setup=TIGHT: Holder(setup, backend, ctx)

    # Nothing is copied while the cells are there.

    @kinds
    def test_taking_cutting_joining_and_restoring_move_no_data(
        self, backend: ml.Backend, setup: Setup
    ) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            h = filled(setup, limited, ctx)
            cache, ids = h.cache, dict(h.held[0])
            plan.arm(None)
            whole = cache.snapshot(0)
            parent, child = cache.split(whole, 4)
            joined = cache.merge(parent, child)
            cache.remove(0, 0)
            assert cache.restore(0, joined)
            assert cache.restore(2, whole, 6)
            cache.copy_prefix(0, 3, 6)
            cache.remove(3, 0)
            assert joined.nbytes == whole.nbytes > 0
            assert cache.restore(3, joined)
            assert plan.calls == []
            assert joined.in_cache
            stored = {p: ids[p] for p in whole.positions.tolist()}
            h.held[0], h.held[2], h.held[3] = dict(stored), dict(stored), dict(stored)
            h.check()

    @kinds
    def test_cells_of_a_snapshot_are_not_written_while_others_are_free(
        self, tight: Make, setup: Setup
    ) -> None:
        h = tight(setup)
        h.forward(list(range(4)), [0] * 4)
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0)
        _drop(h, 0)
        assert h.cache.free_cells == h.cache.cells
        room = h.cache.free_cells - snapshot.positions.size
        for position in range(room // 2):
            h.forward([position], [1])
            h.forward([position], [3])
            if h.cache.free_cells - snapshot.positions.size < 2:
                break
        assert snapshot.in_cache
        h.restore(0, snapshot, ids)

    def test_cells_that_only_snapshots_hold_count_as_free(self, tight: Make) -> None:
        h = tight()
        h.forward([0, 1, 2, 3], [0] * 4)
        h.forward([0, 1], [1] * 2)
        first, second = h.cache.snapshot(0), h.cache.snapshot(0, 2)
        assert h.cache.free_cells == 10
        h.cache.remove(0, 3)
        assert h.cache.free_cells == 11
        _drop(h, 0)
        assert h.cache.free_cells == 14
        assert h.cache.held() == {1: 2}
        assert first.in_cache
        assert second.in_cache
        h.check()

    # When cells are needed.

    def test_the_oldest_are_copied_out_and_no_more_than_it_takes(self, tight: Make) -> None:
        h = tight()
        h.forward([0, 1], [3] * 2)
        living = h.cache.snapshot(3), dict(h.held[3])
        pairs = _four_each(h)
        sizes = [snapshot.nbytes for snapshot, _ in pairs]
        h.forward([2, 3], [3] * 2)
        assert _where(pairs) == [True, True, True]
        h.forward([4], [3])
        assert _where(pairs) == [False, True, True]
        h.forward([5, 6, 7], [3] * 3)
        assert _where(pairs) == [False, True, True], "three cells of the first are left"
        h.forward([8, 9, 10, 11, 12], [3] * 5)
        assert _where(pairs) == [False, False, False]
        assert living[0].in_cache, "copying it out frees nothing"
        assert [snapshot.nbytes for snapshot, _ in pairs] == sizes
        _drop(h, 3)
        for seq, (snapshot, ids) in enumerate([*pairs, living]):
            h.restore(seq, snapshot, ids)

    def test_snapshots_that_share_their_cells_make_room_together(self, tight: Make) -> None:
        h = tight()
        h.forward(list(range(6)), [0] * 6)
        ids = dict(h.held[0])
        whole = h.cache.snapshot(0)
        parts = h.cache.split(whole, 2)
        _drop(h, 0)
        h.forward(list(range(16)), [1] * 16)
        _drop(h, 1)
        for snapshot in (whole, *parts):
            assert snapshot is not None
            h.restore(2, snapshot, ids)

    def test_of_snapshots_that_overlap_the_one_that_frees_enough_is_copied(self, tight: Make) -> None:
        h = tight()
        h.forward(list(range(6)), [0] * 6)
        ids = dict(h.held[0])
        shorter, longer = h.cache.snapshot(0, 0, 2), h.cache.snapshot(0)
        _drop(h, 0)
        h.forward(list(range(12)), [1] * 12)
        assert (shorter.in_cache, longer.in_cache) == (True, False)
        _drop(h, 1)
        h.restore(2, longer, ids)
        h.restore(2, shorter, ids)

    def test_a_snapshot_joined_with_an_empty_one_makes_room_too(self, tight: Make) -> None:
        h = tight()
        h.forward([0, 1, 2, 3], [0] * 4)
        ids = dict(h.held[0])
        joined = h.cache.merge(h.cache.snapshot(0, 0, 0), h.cache.snapshot(0))
        _drop(h, 0)
        h.forward(list(range(16)), [1] * 16)
        assert not joined.in_cache
        _drop(h, 1)
        h.restore(0, joined, ids)

    def test_what_a_window_evicts_stays_with_the_snapshot(self, tight: Make) -> None:
        h = tight(WINDOW)
        h.forward(list(range(6)), [0] * 6)
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0)
        for position in range(6, 14):
            h.forward([position], [0])
        assert snapshot.in_cache
        h.restore(2, snapshot, ids)
        h.restore(0, snapshot, ids, 5)

    def test_a_full_cache_copies_nothing_and_counts_what_snapshots_hold_as_free(self, tight: Make) -> None:
        h = tight()
        h.forward([0, 1], [3] * 2)
        pairs = _four_each(h)
        asked: list[int] = []
        h.cache.on_pressure = asked.append
        with pytest.raises(kvcache.CacheFullError) as caught:
            h.cache.start_forward(h.ctx, Batch(list(range(2, 17)), [3] * 15))
        assert (caught.value.asked, caught.value.free, caught.value.held) == (15, 14, {3: 2})
        assert _where(pairs) == [True, True, True]
        assert asked == []
        other = tight(replace(TIGHT, capacity=8))
        other.forward(list(range(15)), [0] * 15)
        large = other.cache.snapshot(0)
        large.detach()
        with pytest.raises(kvcache.CacheFullError) as caught:
            h.cache.restore(1, large)
        assert (caught.value.asked, caught.value.free, caught.value.held) == (15, 14, {3: 2})
        assert _where(pairs) == [True, True, True]
        h.check()

    def test_those_asked_before_anything_is_copied_may_let_snapshots_go(self, tight: Make) -> None:
        h = tight()
        pairs = _four_each(h)
        missing: list[int] = []

        def drop_the_last(count: int) -> None:
            missing.append(count)
            assert all(_where(pairs))
            pairs.pop()

        h.cache.on_pressure = drop_the_last
        h.forward([0, 1, 2, 3], [3] * 4)
        assert missing == []
        h.forward([4, 5], [3] * 2)
        assert missing == [2]
        assert _where(pairs) == [True, True], "room enough without the last"
        h.forward([6, 7, 8], [3] * 3)
        assert missing == [2, 1]
        assert _where(pairs) == [True]
        h.cache.on_pressure = missing.append
        h.forward([9, 10, 11, 12], [3] * 4)
        assert missing == [2, 1, 1]
        assert _where(pairs) == [False]
        _drop(h, 3)
        h.restore(0, *pairs[0])

    def test_they_are_asked_again_while_cells_are_missing_and_they_let_some_go(self, tight: Make) -> None:
        h = tight()
        pairs = _four_each(h)
        missing: list[int] = []

        def drop_the_first(count: int) -> bool:
            missing.append(count)
            if len(pairs) > 1:
                pairs.pop(0)
            return True  # even where it let none go

        h.cache.on_pressure = drop_the_first
        h.forward(list(range(14)), [3] * 14)
        assert missing == [10, 6, 2]
        assert _where(pairs) == [False]
        _drop(h, 3)
        h.restore(0, *pairs[0])

    def test_the_last_one_to_forget_a_snapshot_frees_its_cells(self, tight: Make) -> None:
        h = tight()
        pairs = _four_each(h)
        asked: list[int] = []
        h.cache.on_pressure = asked.append
        kept, ids = pairs[0]
        part = h.cache.split(kept, 2)[1]
        pairs.clear()
        h.forward(list(range(12)), [3] * 12)
        assert kept.in_cache
        assert asked == []
        _drop(h, 3)
        h.restore(1, kept, ids)
        _drop(h, 1)
        del kept
        h.forward(list(range(14)), [3] * 14)
        assert part.in_cache
        assert asked == []
        del part
        h.forward([14, 15], [3] * 2)
        assert asked == []

    def test_a_restore_over_cells_that_a_snapshot_holds_copies_that_one_out(self, tight: Make) -> None:
        h = tight(replace(TIGHT, max_sequences=2))
        h.forward(list(range(6)), [1] * 6)
        other, other_ids = h.cache.snapshot(1), dict(h.held[1])
        other.detach()
        _drop(h, 1)
        h.forward(list(range(8)), [0] * 8)
        held, ids = h.cache.snapshot(0), dict(h.held[0])
        h.restore(0, other, other_ids)
        assert not held.in_cache
        h.restore(0, held, ids)

    # What snapshots live through.

    @pytest.mark.parametrize("what", ["remove", "shift", "defrag", "close", "another cache", "refused shift"])
    def test_a_snapshot_lives_through(
        self, tight: Make, backend: ml.Backend, ctx: ml.Context, what: str
    ) -> None:
        h = filled(ALL, backend, ctx)
        ids, snapshot, start = dict(h.held[0]), h.cache.snapshot(0), h.cache.snapshot(0, 0, 1)
        stays, fits = True, h
        if what == "remove":
            _drop(h, 0)
        elif what == "shift":
            h.cache.remove(0, 1, 3)
            h.held[0] = {0: ids[0]} | {p - 2: ids[p] for p in range(3, 6)}
            stays = False
        elif what == "refused shift":
            h.cache.copy_prefix(0, 2, 6)
            h.held[2] = dict(ids)
            with pytest.raises(kvcache.NotSupportedError):
                h.cache.remove(0, 1, 3)
        elif what == "defrag":
            h.cache.remove(1, 0)
            h.held[1] = {}
            h.cache.remove(0, 4)
            h.held[0] = {p: ids[p] for p in range(4)}
            h.cache.defrag()
        elif what == "close":
            h.cache.close()
            h.cache.set_config(ALL.config)
            h.cache.init(backend, ALL.dtype, ALL.max_sequences, ALL.capacity, ALL.max_batch)
            h.held = {seq: {} for seq in h.held}
            stays = False
        else:
            fits = tight(ALL)
            fits.next_id = h.next_id
        assert snapshot.in_cache is stays
        assert start.in_cache is (what != "close")
        if what != "close":
            fits.check()
        fits.restore(3, snapshot, ids)
        fits.restore(0, start, ids)
        assert snapshot.in_cache is stays, "restoring it elsewhere leaves it where it lies"

    def test_sequences_that_share_a_snapshot_go_their_own_ways(self, tight: Make) -> None:
        h = tight()
        h.forward([0, 1, 2, 3], [0] * 4)
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0)
        for seq, target in ((1, 4), (2, 3)):
            h.restore(seq, snapshot, ids, target)
        assert h.cache.free_cells == 12
        h.forward([4, 3, 4], [0, 2, 1])
        h.check()
        h.cache.remove(1, 1)
        h.held[1] = {0: ids[0]}
        h.forward([1, 5, 4], [1, 0, 2])
        h.check()
        for seq in range(3):
            _drop(h, seq)
        assert h.cache.free_cells == 16
        h.restore(3, snapshot, ids)

    @kinds
    def test_bytes_are_the_same_in_the_cache_and_out_of_it(self, tight: Make, setup: Setup) -> None:
        for config in (ml.CacheConfig(), ml.CacheConfig(permuted_v=True, cache_padding=5)):
            h = tight(replace(setup, config=config))
            h.forward(list(range(6)), [0] * 6)
            for snapshot in (h.cache.snapshot(0), h.cache.snapshot(0, 0, 0)):
                one = setup.layers * values.KV_HEADS * (values.KEY_DIM + values.VALUE_DIM) * 4
                assert snapshot.nbytes == snapshot.positions.size * one
                snapshot.detach()
                assert snapshot.nbytes == snapshot.positions.size * one
                assert snapshot.nbytes == sum(tensor.nbytes for tensor in tensors_of(snapshot.layers))

    @pytest.mark.parametrize("codec", [DType.Q8_0, DType.Q4_0], ids=lambda dtype: dtype.name)
    def test_bytes_of_codes_and_scales_are_the_same_in_the_cache_and_out_of_it(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, codec: DType
    ) -> None:
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        cache = kvcache.CausalCache()
        cache.init(backend, codec, 1, 8, 8)
        cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
        rows = ctx.full((3, 2, 64), 0.5, DType.F32)
        cache.put(ctx, rows, rows)
        snapshot = cache.snapshot(0, 1)
        expected = 2 * 2 * 2 * 64 * (34 if codec is DType.Q8_0 else 18) // 32  # tokens, K and V, heads, dim
        assert snapshot.nbytes == expected
        snapshot.detach()
        assert snapshot.nbytes == expected

    # Failures.

    @every_way_to_fail
    def test_a_device_that_fails_while_a_restore_makes_room_loses_no_snapshot(
        self, backend: ml.Backend, when: str
    ) -> None:
        def fill(limited: ml.Backend, ctx: ml.Context) -> tuple[Holder, Any]:
            h = Holder(TIGHT, limited, ctx)
            h.forward([0, 1], [3] * 2)
            pairs = _four_each(h)
            pairs[1][0].detach()
            h.forward([0, 1, 2, 3, 4, 5], [0] * 6)
            return h, pairs

        def check(made: tuple[Holder, Any]) -> None:
            h, pairs = made
            h.check()
            assert pairs[2][0].in_cache
            for seq in (0, 3):
                _drop(h, seq)
            for seq, (snapshot, ids) in enumerate(pairs):
                h.restore(seq, snapshot, ids)

        every_failure(
            backend,
            when,
            fill,
            lambda made: made[0].cache.restore(1, made[1][1][0]),
            check,
            self.fault_stride,
        )

    @every_way_to_fail
    def test_a_device_that_fails_in_a_shift_loses_no_snapshot(self, backend: ml.Backend, when: str) -> None:
        def fill(limited: ml.Backend, ctx: ml.Context) -> tuple[Holder, Any]:
            h = filled(ALL, limited, ctx)
            return h, (h.cache.snapshot(0), dict(h.held[0]))

        def check(made: tuple[Holder, Any]) -> None:
            h, (snapshot, ids) = made
            if not h.cache.can_resume(0, 0):
                _drop(h, 0)
            h.check()
            h.restore(2, snapshot, ids)

        every_failure(
            backend, when, fill, lambda made: made[0].cache.remove(0, 1, 3), check, self.fault_stride
        )

    @every_way_to_fail
    def test_a_device_that_fails_in_copying_out_leaves_all_as_it_was(
        self, backend: ml.Backend, when: str
    ) -> None:
        def fill(limited: ml.Backend, ctx: ml.Context) -> tuple[Holder, Any]:
            h = Holder(TIGHT, limited, ctx)
            h.forward([0, 1], [3] * 2)
            return h, _four_each(h)

        def check(made: tuple[Holder, Any]) -> None:
            h, pairs = made
            h.check()
            if not h.cache.restore(0, pairs[2][0]):
                pytest.fail("the last one is there still")
            _drop(h, 0)
            h.forward(list(range(2, 8)), [3] * 6)
            assert _where(pairs) == [False, True, True]
            _drop(h, 3)
            for seq, (snapshot, ids) in enumerate(pairs):
                h.restore(seq, snapshot, ids)

        every_failure(
            backend,
            when,
            fill,
            lambda made: made[0].cache.start_forward(made[0].ctx, Batch(list(range(2, 8)), [3] * 6)),
            check,
            self.fault_stride,
        )

    @every_way_to_fail
    def test_a_defrag_that_fails_says_which_snapshots_are_lost(self, backend: ml.Backend, when: str) -> None:
        lost: list[bool] = []

        def fill(limited: ml.Backend, ctx: ml.Context) -> tuple[Holder, Any]:
            h = Holder(TIGHT, limited, ctx)
            h.forward([0, 1], [0] * 2)  # they stay where they are
            kept = h.cache.snapshot(0), dict(h.held[0])
            h.forward([0, 1, 2, 3], [2] * 4)
            pair = h.cache.snapshot(2), dict(h.held[2])
            _drop(h, 2)
            return h, (kept, pair)

        def check(made: tuple[Holder, Any]) -> None:
            h, (kept, (snapshot, ids)) = made
            h.check()
            h.restore(1, *kept)
            _drop(h, 1)
            uses: list[Callable[[], object]] = [
                snapshot.detach,
                lambda: snapshot.layers,
                lambda: h.cache.restore(3, snapshot),
                lambda: h.cache.split(snapshot, 2),
                lambda: h.cache.merge(h.cache.snapshot(0, 0, 0), snapshot),
            ]
            try:
                h.restore(3, snapshot, ids)
                _drop(h, 3)
                lost.append(False)
            except kvcache.SequenceLostError:
                lost.append(True)
                for use in uses:
                    with pytest.raises(kvcache.SequenceLostError):
                        use()
            h.forward(list(range(14)), [3] * 14)  # into its cells too
            h.check()
            if lost[-1]:
                with pytest.raises(kvcache.SequenceLostError):
                    snapshot.detach()

        every_failure(backend, when, fill, lambda made: made[0].cache.defrag(), check, self.fault_stride)
        if self.fault_stride == 1:
            assert any(lost)
            assert when == "after the call" or not all(lost), "before the first write nothing is lost"

    def test_what_cannot_be_copied_out_when_a_cache_closes_is_lost(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            h = Holder(TIGHT, limited, ctx)
            (first, _), (second, ids), _ = _four_each(h)
            plan.arm(0)
            h.cache.close()
            plan.arm(None)
            with pytest.raises(kvcache.SequenceLostError):
                first.detach()
            other = Holder(TIGHT, limited, ctx)
            with pytest.raises(kvcache.SequenceLostError):
                other.cache.restore(0, first)
            other.next_id = h.next_id
            other.restore(0, second, ids)
