"""Snapshots of attention caches: copied out to the host, split, merged and restored, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ml
from kvcache import DenseBatch
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.testing.harness import KINDS, CacheCase, every_arrangement
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.snapshots import CopyRig

WINDOWS = [(3, 3, 0), (3, 3, 1), (3, 5, 3), (1, 1, 3), (6, 6, 0)]
"""Window, memory and keep."""


def _with_window(setup: Setup, sizes: tuple[int, ...]) -> Setup:
    window, memory, keep = sizes
    return replace(setup, window=window, memory=memory, keep=keep, max_sequences=1, capacity=40)


def _same(one: AttentionSnapshot, other: AttentionSnapshot) -> None:
    assert (one.begin, one.end, one.nbytes) == (other.begin, other.end, other.nbytes)
    np.testing.assert_array_equal(one.positions, other.positions)
    assert one.layers.keys() == other.layers.keys()
    for i, layer in one.layers.items():
        for mine, yours in zip(layer.tensors, other.layers[i].tensors, strict=True):
            np.testing.assert_array_equal(mine.to_numpy(), yours.to_numpy())


class SnapshotTests(CacheCase):
    @pytest.fixture(params=["F32", "Q8_0", "AFFINE4_32/F8_E4M3"])
    def setup(self, request: pytest.FixtureRequest, declared: ml.Features) -> Setup:
        if request.param != "F32" and not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        return Setup(max_sequences=3, capacity=12, layers=2, dtype=request.param)

    @staticmethod
    def filled(setup: Setup, backend: ml.Backend, ctx: ml.Context) -> CopyRig:
        """Sequence 0 has six tokens, the first ones interleaved with the two of sequence 1."""
        r = CopyRig(setup, backend, ctx)
        for position in range(2):
            r.forward([position, position], [0, 1])
        r.forward([2, 3, 4, 5], 0)
        return r

    @pytest.mark.parametrize("detached", [False, True], ids=["in the cache", "copied out"])
    @pytest.mark.parametrize("begin", [0, 2])
    def test_a_snapshot_is_restored_at_every_position_inside(
        self, backend: ml.Backend, ctx: ml.Context, setup: Setup, begin: int, detached: bool
    ) -> None:
        r = self.filled(setup, backend, ctx)
        r.snapshot(0, begin, None)
        if detached:
            r.detach(0)
        for target in (None, *range(begin, 7)):
            r.copy_prefix(0, 2, begin)
            assert r.restore(0, 2, target)
            r.extend(2)

    @every_arrangement
    def test_a_snapshot_fits_any_arrangement_of_the_same_cache(
        self, backend: ml.Backend, ctx: ml.Context, setup: Setup, arranged: ml.CacheConfig
    ) -> None:
        """Including a cache that has stored nothing; its restored content is the same, bit by bit."""
        source = self.filled(setup, backend, ctx)
        target = CopyRig(replace(setup, config=arranged), backend, ctx)
        target.next_token = source.next_token
        source.snapshot(0, 0, None)
        source.detach(0)
        target.copies = list(source.copies)
        for seq in (2, 0):
            assert target.restore(0, seq, None)
            _same(target.cache.snapshot(seq), target.copies[0][0])
            target.extend(seq)
        target.drain()

    @pytest.mark.parametrize("where", ["copied out", "in host memory"])
    @pytest.mark.parametrize("taken_of", WINDOWS, ids=str)
    def test_a_window_gets_of_another_ones_snapshot_what_it_would_hold_or_nothing(
        self, backend: ml.Backend, ctx: ml.Context, setup: Setup, taken_of: tuple[int, ...], where: str
    ) -> None:
        """Narrower and wider windows that keep fewer and more first tokens."""
        source = CopyRig(_with_window(setup, taken_of), backend, ctx)
        for batch in (range(3), range(3, 7), [7], [8], [9]):
            source.forward(batch, 0)
        source.snapshot(0, 0, None)
        source.detach(0)
        snapshot, copy = source.copies[0]
        if where == "in host memory":
            snapshot = deserialize(backend, serialize(backend, snapshot))  # type: ignore[assignment]
        answers = set()
        for into in WINDOWS:
            target = CopyRig(_with_window(setup, into), backend, ctx)
            target.next_token = source.next_token
            target.copies = [(snapshot, copy)]
            target.forward([0, 1], 0)
            for at in (None, 2, 9):
                answers.add(target.restore(0, 0, at))
                target.extend(0)
        assert answers == {True, False}
        source.drain()

    def test_what_is_split_and_merged_is_what_it_was(
        self, backend: ml.Backend, ctx: ml.Context, setup: Setup
    ) -> None:
        cache = self.filled(setup, backend, ctx).cache
        whole = cache.snapshot(0)
        for at in range(7):
            parent, child = cache.split(whole, at)
            assert (parent is None) == (at == 0)
            _same(cache.merge(parent, child), whole)
            _same(child, cache.snapshot(0, at))
            if parent is not None:
                _same(parent, cache.snapshot(0, 0, at))

    @every_arrangement
    def test_sequences_become_even_runs_in_a_cache_full_of_snapshots(
        self, backend: ml.Backend, ctx: ml.Context, arranged: ml.CacheConfig
    ) -> None:
        """Snapshots in the way move, and those whose cells are needed are copied out."""
        config = replace(arranged, cache_padding=1)
        r = CopyRig(Setup(max_sequences=2, capacity=8, layers=2, config=config), backend, ctx)
        r.forward(range(4), 0)
        for _ in range(2):  # one to each side of where the other sequence grows
            r.forward(range(4), 1)
            r.snapshot(1, 0, None)
            r.remove(1, 0)
        r.extend(0)
        assert not DenseBatch(r.cache, [0]).is_view
        assert not r.defrag([0], 12), "there are 16 cells"
        assert all(snapshot.in_cache for snapshot, _ in r.copies)
        assert r.defrag([0], 4)
        assert [snapshot.in_cache for snapshot, _ in r.copies] == [False, True], "3 cells were free"
        for _ in range(4):
            r.extend(0)
            assert DenseBatch(r.cache, [0]).is_view
        r.check_copies()

    @pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
    def test_a_snapshot_outlives_what_it_was_taken_of(
        self, backend: ml.Backend, ctx: ml.Context, kind: Setup
    ) -> None:
        r = self.filled(kind, backend, ctx)
        r.snapshot(0, 0, None)
        r.remove(0, 0)
        for position in range(2, 12):
            r.forward([position], [1])
        r.defrag()
        r.check_copies()
        r.detach(0)
        r.remove(1, 0)
        r.forward(range(8), 1)
        r.check_copies()
