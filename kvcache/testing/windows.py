"""Windows: what is evicted and when, where a sequence can be resumed, and that storage stays flat."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache import Batch, ChunkedCache, SlidingWindowCache
from kvcache.testing.harness import CacheCase, MakeRig, every_arrangement
from kvcache.testing.model import Setup
from ml import DType

__all__ = ["WindowTests"]


class WindowTests(CacheCase):
    # Eviction happens in start_forward.

    def test_a_token_leaves_when_the_next_batch_no_longer_needs_it(self, rig: MakeRig) -> None:
        r = rig(window=2, max_sequences=1, capacity=50)
        stored = []
        for position in range(6):
            r.forward([position], 0)
            stored.append(r.cache.positions(0).tolist())
        assert stored == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]

    def test_the_lowest_position_of_the_batch_decides(self, rig: MakeRig) -> None:
        r = rig(window=2, max_sequences=1, capacity=50)
        r.forward(range(6), 0)
        assert r.cache.positions(0).tolist() == [0, 1, 2, 3, 4, 5]
        r.forward([8, 6, 7], 0)
        assert r.cache.positions(0).tolist() == [4, 5, 6, 7, 8]

    def test_sequences_out_of_the_batch_lose_what_lies_below_their_own_memory(self, rig: MakeRig) -> None:
        r = rig(window=2, max_sequences=2, capacity=50, max_batch=8)
        r.forward(range(6), 0)
        assert len(r.cache.positions(0)) == 6
        r.forward([0], 1)
        assert r.cache.positions(0).tolist() == [3, 4, 5], "several sequences keep window + 1"
        r.extend(0)
        r.drain()

    def test_memory_keeps_more_than_the_window(self, rig: MakeRig) -> None:
        r = rig(window=1, memory=4, max_sequences=1, capacity=50)
        r.forward(range(7), 0)
        r.forward([7], 0)
        assert r.cache.positions(0).tolist() == [3, 4, 5, 6, 7]
        r.remove(0, 5)
        assert r.cache.can_resume(0, 5)
        assert r.forward([5, 6], 0)
        r.drain()

    def test_a_memory_of_the_whole_capacity_evicts_nothing(self, rig: MakeRig) -> None:
        r = rig(window=2, memory=16, max_sequences=1, capacity=16)
        for position in range(16):
            assert r.forward([position], 0)
        assert len(r.cache.positions(0)) == 16
        assert not r.extend(0)

    def test_a_chunked_cache_evicts_nothing(self, rig: MakeRig) -> None:
        r = rig(chunk=3, max_sequences=1, capacity=10)
        for position in range(10):
            assert r.forward([position], 0)
        assert len(r.cache.positions(0)) == 10
        assert not r.extend(0)
        assert all(r.cache.can_resume(0, position) for position in range(30))

    def test_a_refused_batch_evicts_nothing(self, rig: MakeRig) -> None:
        r = rig(window=1, max_sequences=2, capacity=50)
        r.forward(range(5), 0)
        for positions, sequences in (([9, 9], [0, 0]), ([9, -1], [0, 0]), ([9], [4])):
            with pytest.raises(kvcache.InvalidBatchError):
                r.cache.start_forward(r.ctx, Batch(positions, sequences))
            assert r.cache.positions(0).tolist() == [0, 1, 2, 3, 4]

    # Resuming.

    @pytest.mark.parametrize(("window", "memory"), [(0, None), (1, None), (3, None), (3, 5), (2, 7)])
    @pytest.mark.parametrize("max_sequences", [1, 2])
    def test_can_resume_is_exact(
        self, rig: MakeRig, window: int, memory: int | None, max_sequences: int
    ) -> None:
        r = rig(window=window, memory=memory, max_sequences=max_sequences, capacity=60, max_batch=12)
        assert not r.cache.can_resume(0, 0), "nothing is stored"
        for positions in (range(2), range(2, 9), [9], [10, 11], [12]):
            r.forward(positions, 0)
            stored = r.cache.positions(0).tolist()
            for position in range(20):
                needed = set(range(max(0, position - window), position))
                expected = needed <= set(stored) and max(0, position - window) >= stored[0]
                assert r.cache.can_resume(0, position) == (expected and position <= stored[-1] + 1)

    @pytest.mark.parametrize("seq", [-1, 2])
    def test_can_resume_refuses_an_unknown_sequence(self, rig: MakeRig, seq: int) -> None:
        for setup in (Setup(), Setup(window=2), Setup(chunk=2)):
            with pytest.raises(kvcache.InvalidBatchError):
                rig(setup).cache.can_resume(seq, 0)

    def test_without_a_window_a_sequence_can_always_be_resumed(self, rig: MakeRig) -> None:
        r = rig()
        assert r.cache.can_resume(0, 0)
        assert r.cache.can_resume(1, 1000)
        r.forward([3], 0)
        assert all(r.cache.can_resume(0, position) for position in range(6))

    @every_arrangement
    def test_a_sequence_resumed_where_it_can_be_sees_what_it_saw_before(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        for back in range(6, 10):
            r = rig(window=2, memory=4, max_sequences=2, capacity=40, config=arranged)
            r.forward([0, 1], 1)
            r.forward(range(9), 0)
            r.forward([9, 2], [0, 1])
            if r.cache.can_resume(0, back):
                r.remove(0, back)
                assert r.forward([back, back + 1, 3], [0, 0, 1])
            r.drain()

    # Arguments.

    @pytest.mark.parametrize(("window", "memory"), [(-1, None), (3, 2), (3, -1)])
    def test_a_window_that_means_nothing_is_refused(self, window: int, memory: int | None) -> None:
        with pytest.raises(kvcache.InvalidRangeError):
            SlidingWindowCache(window, memory)

    @pytest.mark.parametrize("chunk", [0, -1])
    def test_a_chunk_that_means_nothing_is_refused(self, chunk: int) -> None:
        with pytest.raises(kvcache.InvalidRangeError):
            ChunkedCache(chunk)

    # For ever.

    def test_a_long_run_through_a_small_window_stays_within_its_cells(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        tokens, batch = self.long_run, 32
        cache = SlidingWindowCache(64)
        cache.set_config(ml.CacheConfig())  # whatever padding the backend asks for
        cache.init(backend, DType.F32, 1, tokens, batch)
        key, value = ctx.zeros((batch, 1, 2), DType.F32), ctx.zeros((batch, 1, 2), DType.F32)
        one = ctx.zeros((1, 1, 2), DType.F32)
        figures = set()
        position = 0
        while position < tokens:
            count = batch if position % 1000 < 900 else 1
            cache.start_forward(ctx, Batch(range(position, position + count), [0] * count))
            cache.put(ctx, *((key, value) if count == batch else (one, one)))
            history = cache.get(ctx)[0].shape[0]
            assert history <= cache.cells == 64 + batch
            figures.add((cache.nbytes, cache.cells))
            position += count
        assert len(figures) == 1
        assert cache.positions(0).tolist() == list(range(position - len(cache.positions(0)), position))

    long_run = 20_000
    """Tokens of the long run; a lazy framework may want fewer."""
