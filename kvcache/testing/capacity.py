"""How many cells there are, when they are full, and what an overflow says."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, ChunkedCache, SlidingWindowCache
from kvcache.testing.harness import CacheCase, MakeRig, every_kind
from kvcache.testing.model import Setup
from ml import DType

__all__ = ["CapacityTests"]

# (cache, max_sequences, capacity, max_batch, cache_padding, cells)
FORMULA = [
    (lambda: CausalCache(), 1, 10, 4, 1, 10),
    (lambda: CausalCache(), 3, 10, 4, 1, 30),
    (lambda: CausalCache(), 3, 10, 400, 1, 30),
    (lambda: CausalCache(), 1, 10, 4, 32, 32),
    (lambda: CausalCache(), 3, 11, 4, 32, 64),
    (lambda: CausalCache(), 2, 16, 4, 32, 32),
    (lambda: ChunkedCache(4), 3, 10, 4, 1, 30),
    (lambda: ChunkedCache(4), 1, 10, 4, 7, 14),
    (lambda: SlidingWindowCache(4), 1, 100, 8, 1, 4 + 8),
    (lambda: SlidingWindowCache(4), 2, 100, 8, 1, 2 * 5 + 8),
    (lambda: SlidingWindowCache(4), 3, 100, 8, 16, 32),
    (lambda: SlidingWindowCache(0), 1, 100, 8, 1, 8),
    (lambda: SlidingWindowCache(0), 2, 100, 8, 1, 2 + 8),
    (lambda: SlidingWindowCache(4, 4), 2, 100, 8, 1, 2 * 5 + 8),
    (lambda: SlidingWindowCache(4, 5), 2, 100, 8, 1, 2 * 5 + 8),
    (lambda: SlidingWindowCache(4, 20), 2, 100, 8, 1, 2 * 20 + 8),
    (lambda: SlidingWindowCache(4, 20), 1, 100, 8, 1, 20 + 8),
    (lambda: SlidingWindowCache(4, 99), 1, 100, 8, 1, 99 + 8),
    (lambda: SlidingWindowCache(4, 100), 1, 100, 8, 1, 100),
    (lambda: SlidingWindowCache(4, 1000), 3, 100, 8, 1, 300),
    (lambda: SlidingWindowCache(200), 2, 100, 8, 1, 200),
    (lambda: SlidingWindowCache(99), 1, 100, 8, 1, 99 + 8),
    (lambda: SlidingWindowCache(99), 2, 100, 8, 1, 200),
    (lambda: SlidingWindowCache(4, 20), 2, 100, 8, 16, 48),
]


class CapacityTests(CacheCase):
    @pytest.mark.parametrize(
        ("make", "max_sequences", "capacity", "max_batch", "padding", "cells"),
        FORMULA,
        ids=range(len(FORMULA)),
    )
    def test_the_number_of_cells_is(
        self, backend: ml.Backend, make: type[CausalCache], max_sequences: int, capacity: int, max_batch: int,
        padding: int, cells: int,
    ) -> None:  # fmt: skip
        cache = make()
        cache.set_config(ml.CacheConfig(cache_padding=padding))
        cache.init(backend, DType.F32, max_sequences, capacity, max_batch)
        assert cache.cells == cache.free_cells == cells

    @every_kind
    def test_every_cell_can_be_used(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, config=ml.CacheConfig(cache_padding=5))
        assert r.forward(range(r.cache.cells), 0)
        assert r.cache.free_cells == 0
        r.check_seen()

    def test_scattered_free_cells_are_used_to_the_last(self, rig: MakeRig) -> None:
        r = rig(max_sequences=4, capacity=4)
        for position in range(4):
            r.forward([position] * 4, [3, 1, 2, 0])
        for seq in range(4):
            r.remove(seq, 2)
        assert r.forward([2, 3, 4, 5, 6, 7, 8, 9], 1)
        assert r.cache.free_cells == 0
        r.check_seen()
        r.remove(0, 0)
        r.drain()

    @every_kind
    def test_an_overflow_says_what_was_asked_free_and_held_and_changes_nothing(
        self, rig: MakeRig, kind: Setup
    ) -> None:
        r = rig(kind, max_sequences=2, capacity=8, max_batch=4, layers=2)
        r.forward([0, 1, 2, 0], [0, 0, 0, 1])
        free = r.cache.free_cells
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.cache.start_forward(r.ctx, Batch(range(3, 4 + free), [0] * (free + 1)))
        error = caught.value
        assert isinstance(error, RuntimeError)
        assert (error.asked, error.free, error.held) == (free + 1, free, {0: 3, 1: 1})
        for number in (free + 1, free):
            assert str(number) in str(error)
        r.check_figures()
        r.check_seen()  # the pass before goes on
        assert r.forward(range(3, 3 + free), 0)
        r.check_seen()

    def test_evictions_are_undone_and_the_figures_are_those_after_evicting(self, rig: MakeRig) -> None:
        # Cells 2 * 3 + 4. Each sequence has stored more than its memory: 2 of them would go.
        r = rig(window=2, max_sequences=2, capacity=50, max_batch=4)
        r.forward(range(5), 0)
        r.forward(range(4), 1)
        held = r.cache.held()
        assert held == {0: 3, 1: 4}
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.cache.start_forward(r.ctx, Batch(range(4, 9), [1] * 5))
        assert (caught.value.asked, caught.value.free, caught.value.held) == (5, 4, {0: 3, 1: 3})
        assert r.cache.held() == held
        r.check_seen()
        assert r.forward(range(4, 8), 1)
        r.drain()

    def test_a_shared_cell_is_held_by_each_of_its_owners(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3, capacity=2)
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 2, 3)
        with pytest.raises(kvcache.CacheFullError) as caught:
            r.cache.start_forward(r.ctx, Batch(range(4), [1] * 4))
        assert (caught.value.asked, caught.value.free, caught.value.held) == (4, 3, {0: 3, 2: 3})

    @every_kind
    def test_a_full_cache_recovers_by_removing_one_sequence_all_others_intact(
        self, rig: MakeRig, kind: Setup
    ) -> None:
        r = rig(kind, max_sequences=4, capacity=6, max_batch=6, layers=2)
        for position in range(2):
            r.forward([position] * 4, [2, 0, 3, 1])
        r.copy_prefix(0, 3, 2)
        fill = r.cache.free_cells
        assert r.forward(range(2, 2 + fill), 2)
        assert r.cache.free_cells == 0
        assert not r.extend(0, r.cache.cells)
        assert isinstance(r.refusal, kvcache.CacheFullError)
        count = r.refusal.free + 1  # a window frees some by evicting
        assert not r.extend(0, count)
        r.remove(2, 0)
        assert r.extend(0, count)
        r.remove(0, 3)
        assert r.forward([0, 1, 2], [2, 2, 3])
        r.drain()

    @pytest.mark.parametrize("wrong", [(0, 8, 4), (2, 0, 4), (2, 8, 0), (-1, 8, 4), (2, -8, 4)])
    def test_a_cache_of_no_cells_is_refused(self, backend: ml.Backend, wrong: tuple[int, int, int]) -> None:
        cache = CausalCache()
        cache.set_config(ml.CacheConfig())  # whatever padding the backend asks for
        with pytest.raises(kvcache.InvalidRangeError):
            cache.init(backend, DType.F32, *wrong)
        cache.init(backend, DType.F32, 2, 8, 4)
        assert cache.cells == 16
