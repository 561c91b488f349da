"""Snapshots of attention caches: copied out, cut, joined and put back, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.testing import values
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase, every_arrangement
from kvcache.testing.model import Setup
from kvcache.testing.rig import look
from ml import DType

__all__ = ["Holder", "SnapshotTests", "filled"]

ALL = Setup(max_sequences=4, capacity=12, layers=2)
WINDOW = replace(ALL, window=3, memory=5)
kinds = pytest.mark.parametrize("setup", [ALL, replace(ALL, chunk=4)], ids=["causal", "chunked"])


class Holder:
    """A cache and, for each sequence, the ids that it holds by position."""

    def __init__(self, setup: Setup, backend: ml.Backend, ctx: ml.Context) -> None:
        self.setup, self.ctx, self.cache = setup, ctx, setup.make(backend)
        self.held: dict[int, dict[int, int]] = {seq: {} for seq in range(setup.max_sequences)}
        self.next_id = 1

    def forward(self, positions: list[int], sequences: list[int]) -> list[dict[int, int]]:
        ids = list(range(self.next_id, self.next_id + len(positions)))
        self.next_id += len(ids)
        self.cache.start_forward(self.ctx, Batch(positions, sequences))
        for layer in range(self.setup.layers):
            self.cache.set_layer(layer)
            key, value = values.keys(ids, positions, layer), values.values(ids, layer)
            self.cache.put(self.ctx, self.ctx.from_numpy(key), self.ctx.from_numpy(value))
        for seq, position, token in zip(sequences, positions, ids, strict=True):
            self.held[seq][position] = token
        for seq, row in self.held.items():
            stored = set(self.cache.positions(seq).tolist())
            self.held[seq] = {position: token for position, token in row.items() if position in stored}
        seen = [look(self.cache, self.ctx, len(ids), layer) for layer in range(self.setup.layers)]
        assert all(other == seen[0] for other in seen)
        return seen[0]

    def check(self) -> None:
        """Every sequence holds what it should, and shows it to a further token."""
        for seq, row in self.held.items():
            assert self.cache.positions(seq).tolist() == sorted(row)
            offset = self.cache.offset(seq)
            assert offset == max(row, default=-1) + 1
        for seq, row in list(self.held.items()):
            if row and self.cache.free_cells:
                offset, before = self.cache.offset(seq), dict(row)
                (seen,) = self.forward([offset], [seq])
                lowest = offset - (self.setup.window or offset)
                if self.setup.chunk is not None:
                    lowest = offset - offset % self.setup.chunk
                wanted = {p: token for p, token in before.items() if p >= lowest}
                assert {p: token for p, token in seen.items() if p < offset} == wanted
                self.cache.remove(seq, offset)
                del self.held[seq][offset]

    def restore(
        self, seq: int, snapshot: AttentionSnapshot, ids: dict[int, int], target: int | None = None
    ) -> None:
        end = snapshot.end if target is None else target
        assert self.cache.restore(seq, snapshot, target)
        kept = {p: token for p, token in self.held[seq].items() if p < snapshot.begin}
        self.held[seq] = kept | {p: ids[p] for p in snapshot.positions.tolist() if p < end}
        self.check()


def _same(one: AttentionSnapshot, other: AttentionSnapshot) -> None:
    assert (one.begin, one.end, one.nbytes) == (other.begin, other.end, other.nbytes)
    np.testing.assert_array_equal(one.positions, other.positions)
    assert one.layers.keys() == other.layers.keys()
    for i, layer in one.layers.items():
        for mine, yours in zip(layer.tensors, other.layers[i].tensors, strict=True):
            np.testing.assert_array_equal(mine.to_numpy(), yours.to_numpy())


class SnapshotTests(CacheCase):
    @pytest.fixture
    def holder(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., Holder]:
        """``holder(setup)``: sequence 0 holds six tokens, scattered between those of 1."""

        def make(setup: Setup = ALL) -> Holder:
            return filled(setup, backend, ctx)

        return make

    @kinds
    @pytest.mark.parametrize("begin", [0, 2])
    def test_a_snapshot_is_restored_at_every_position_inside(
        self, holder: Callable[..., Holder], setup: Setup, begin: int
    ) -> None:
        h = holder(setup)
        ids = dict(h.held[0])
        snapshot = h.cache.snapshot(0, begin)
        assert (snapshot.begin, snapshot.end) == (begin, 6)
        for target in (None, *range(begin, 7)):
            h.cache.copy_prefix(0, 2, begin)
            h.held[2] = {p: ids[p] for p in range(begin)}
            h.restore(2, snapshot, ids, target)
        h.cache.remove(0, 0)
        h.held[0] = {}
        h.restore(3, h.cache.snapshot(2), ids)

    @every_arrangement
    def test_a_snapshot_fits_any_arrangement_of_the_same_cache(
        self, holder: Callable[..., Holder], arranged: ml.CacheConfig
    ) -> None:
        source, target = holder(), holder(replace(ALL, config=arranged))
        target.restore(2, source.cache.snapshot(0, 0, 4), source.held[0])
        target.restore(1, source.cache.snapshot(1), source.held[1])

    def test_a_cache_that_stored_nothing_takes_a_snapshot(
        self, holder: Callable[..., Holder], backend: ml.Backend, ctx: ml.Context
    ) -> None:
        source, fresh = holder(), Holder(ALL, backend, ctx)
        fresh.next_id = source.next_id
        fresh.restore(3, source.cache.snapshot(0), source.held[0])

    @pytest.mark.parametrize("at", range(7))
    def test_what_is_split_and_merged_is_what_it_was(self, holder: Callable[..., Holder], at: int) -> None:
        h = holder()
        whole = h.cache.snapshot(0)
        parent, child = h.cache.split(whole, at)
        assert (parent is None) == (at == 0)
        assert (child.begin, child.end) == (at, 6)
        _same(h.cache.merge(parent, child), whole)
        _same(child, h.cache.snapshot(0, at))
        if parent is not None:
            _same(parent, h.cache.snapshot(0, 0, at))

    def test_a_snapshot_outlives_what_it_was_taken_of(self, holder: Callable[..., Holder]) -> None:
        h = holder()
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0)
        h.cache.remove(0, 0)
        h.held[0] = {}
        for position in range(6):
            h.forward([position, position], [3, 2])
        h.cache.defrag()
        h.restore(0, snapshot, ids)

    def test_a_window_is_whole(self, holder: Callable[..., Holder]) -> None:
        h = holder(WINDOW)
        for position in range(6, 10):
            h.forward([position], [0])
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0, 7)
        assert snapshot.begin == 0
        assert h.cache.split(snapshot, 9) == (None, snapshot)
        assert h.cache.merge(h.cache.snapshot(1), snapshot) is snapshot
        first = int(snapshot.positions[0])
        for target in range(11):
            h.cache.remove(2, 0)
            h.held[2] = {}
            if target == 0 or target - 3 >= first:
                h.restore(2, snapshot, ids, target)
            else:
                assert not h.cache.restore(2, snapshot, target)
                h.check()
        with pytest.raises(kvcache.NotSupportedError):
            h.cache.snapshot(0, 0, first + 1)

    def test_what_cannot_be_restored_touches_nothing(self, holder: Callable[..., Holder]) -> None:
        h = holder()
        whole, tail = h.cache.snapshot(0), h.cache.snapshot(0, 3)
        assert not h.cache.restore(1, whole, 7)
        assert not h.cache.restore(1, tail, 2)
        assert not h.cache.restore(1, tail)  # it holds two tokens, and [0, 3) is needed
        assert not h.cache.restore(2, tail)
        h.check()

    def test_a_restore_that_does_not_fit_is_a_full_cache(self, holder: Callable[..., Holder]) -> None:
        h = holder(replace(ALL, capacity=4))
        h.forward([0, 1, 2, 3, 4], [2] * 5)
        ids, snapshot = dict(h.held[0]), h.cache.snapshot(0)
        snapshot.detach()
        with pytest.raises(kvcache.CacheFullError) as caught:
            h.cache.restore(3, snapshot)
        assert (caught.value.asked, caught.value.free) == (6, 3)
        h.check()
        with pytest.raises(kvcache.CacheFullError):
            h.cache.restore(1, snapshot)
        h.check()
        h.restore(2, snapshot, ids)

    def test_ranges_and_snapshots_that_mean_nothing_are_refused(
        self, holder: Callable[..., Holder], backend: ml.Backend, floats: list[DType]
    ) -> None:
        h = holder()
        for begin, end in ((-1, None), (4, 3), (0, 7), (8, None)):
            with pytest.raises(kvcache.InvalidRangeError):
                h.cache.snapshot(0, begin, end)
        snapshot = h.cache.snapshot(0)
        for at in (-1, 7):
            with pytest.raises(kvcache.InvalidRangeError):
                h.cache.split(snapshot, at)
        with pytest.raises(kvcache.InvalidRangeError):
            h.cache.merge(snapshot, h.cache.snapshot(0, 2))
        others = [replace(WINDOW, memory=None)] + [replace(ALL, dtype=dtype) for dtype in floats[1:]]
        for other in others:
            with pytest.raises(kvcache.InvalidRangeError):
                other.make(backend).restore(0, snapshot)
        fewer = AttentionSnapshot(0, 6, snapshot.positions, snapshot.dtype, False, {0: snapshot.layers[0]})
        with pytest.raises(kvcache.InvalidRangeError, match="layers"):
            h.cache.restore(2, fewer)
        wide = {i: replace(layer, tensors=layer.tensors[::-1]) for i, layer in snapshot.layers.items()}
        swapped = AttentionSnapshot(0, 6, snapshot.positions, snapshot.dtype, False, wide)
        with pytest.raises(kvcache.InvalidRangeError):
            h.cache.restore(2, swapped)
        h.check()

    @pytest.mark.parametrize("codec", [DType.Q8_0, DType.Q4_0], ids=lambda dtype: dtype.name)
    def test_codes_and_scales_come_back_bit_by_bit(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, codec: DType
    ) -> None:
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        caches = []
        for config in (ml.CacheConfig(), ml.CacheConfig(layout=ml.Layout.TOKEN_MAJOR, permuted_v=True)):
            cache = kvcache.CausalCache()
            cache.set_config(config)
            cache.init(backend, codec, 2, 8, 8)
            caches.append(cache)
        host = np.random.default_rng(5).normal(size=(5, 2, 64)).astype(np.float32)
        for position in range(5):
            caches[0].start_forward(ctx, Batch([position, position], [0, 1]))
            rows = ctx.from_numpy(host[[position, 4 - position]])
            caches[0].put(ctx, rows, rows.scale(ctx, -1.0))
        snapshot = caches[0].snapshot(0)
        parent, child = caches[0].split(snapshot, 2)
        _same(caches[0].merge(parent, child), snapshot)
        assert caches[1].restore(1, snapshot)
        _same(caches[1].snapshot(1), snapshot)
        caches[1].start_forward(ctx, Batch([4], [1]), read_only=True)
        assert caches[1].get(ctx)[0].dtype is DType.F32

    @pytest.mark.parametrize("seq", [1, 2], ids=["over what is there", "into free cells"])
    @every_way_to_fail
    def test_a_failing_backend_leaves_a_restore_undone_or_the_sequence_lost(
        self, backend: ml.Backend, seq: int, when: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> tuple[Holder, AttentionSnapshot]:
            h = filled(ALL, limited, ctx)
            return h, h.cache.snapshot(0)

        def check(made: tuple[Holder, AttentionSnapshot]) -> None:
            h, snapshot = made
            ids = dict(h.held[0])
            if not h.cache.can_resume(seq, 0):
                assert seq == 1, "nothing of sequence 2 was there to be lost"
                with pytest.raises(kvcache.SequenceLostError):
                    h.cache.snapshot(seq)
            else:
                h.check()
            h.restore(seq, snapshot, ids)

        every_failure(
            backend, when, make, lambda made: made[0].cache.restore(seq, made[1]), check, self.fault_stride
        )

    @every_way_to_fail
    def test_a_failing_backend_takes_no_snapshot_and_changes_nothing(
        self, backend: ml.Backend, when: str
    ) -> None:
        def act(h: Holder) -> Any:
            snapshot = h.cache.snapshot(0)
            return h.cache.merge(*h.cache.split(snapshot, 3))

        every_failure(
            backend, when, lambda b, ctx: filled(ALL, b, ctx), act, lambda h: h.check(), self.fault_stride
        )


def filled(setup: Setup, backend: ml.Backend, ctx: ml.Context) -> Holder:
    """Sequence 0 holds six tokens, the first ones scattered between the two of 1."""
    h = Holder(setup, backend, ctx)
    for position in range(2):
        h.forward([position, position], [0, 1])
    h.forward([2, 3, 4, 5], [0] * 4)
    return h
