"""Passes with reserve: shapes at their largest, and nothing stored."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing import values
from kvcache.testing.harness import CacheCase, MakeRig, attends, every_arrangement, every_kind
from kvcache.testing.model import Setup
from ml import DType

__all__ = ["ReservingTests"]


class ReservingTests(CacheCase):
    @every_kind
    @every_arrangement
    def test_get_spans_the_whole_capacity(self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig) -> None:
        r = rig(kind, config=arranged)
        r.reserve(4)
        key, value, mask = r.cache.get(r.ctx)
        cells = r.cache.cells
        assert key.shape == (cells, values.KV_HEADS, values.KEY_DIM)
        wide = (cells, values.KV_HEADS, values.VALUE_DIM)
        assert value.shape == ((*wide[1:], cells) if arranged.permuted_v else wide)
        assert isinstance(mask, ml.Tensor)
        assert mask.shape[0] % arranged.mask_batch_padding == 0
        assert mask.shape[0] >= 4
        assert mask.shape[1] == cells
        assert mask.dtype is arranged.mask_dtype

    @every_kind
    def test_nothing_is_stored_and_nothing_is_evicted(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind)
        r.reserve(8)
        for first in range(0, 12, 3):
            r.forward([first, first + 1, first + 2, first], [0, 0, 0, 1])
            r.reserve(5)
        batch = Batch([100, 101], [0, 1])
        r.cache.start_forward(r.ctx, batch, reserve=True)
        r.check_figures()
        r.drain()

    def test_positions_that_are_stored_may_be_reserved_for(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2], 0)
        r.cache.start_forward(r.ctx, Batch([0, 1, 2], [0, 0, 0]), reserve=True)
        r.check_figures()

    def test_a_full_cache_may_be_reserved_for(self, rig: MakeRig) -> None:
        r = rig(max_sequences=1, capacity=4)
        r.forward(range(4), 0)
        r.reserve(8)
        r.remove(0, 3)
        r.extend(0)
        r.drain()

    def test_put_checks_shapes(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0], 0)
        r.cache.start_forward(r.ctx, Batch([1, 2], [0, 0]), reserve=True)
        for tokens, heads in ((3, 2), (2, 3)):
            key = r.ctx.zeros((tokens, heads, values.KEY_DIM), DType.F32)
            value = r.ctx.zeros((tokens, heads, values.VALUE_DIM), DType.F32)
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.put(r.ctx, key, value)

    def test_the_buffers_of_a_reserved_pass_are_those_of_the_next(
        self, rig: MakeRig, backend: ml.Backend
    ) -> None:
        r = rig(layers=2)
        r.reserve(3)
        reserved = r.cache.nbytes
        assert reserved > 0
        r.forward(range(3), 0)
        assert r.cache.nbytes == reserved

    def test_an_unknown_sequence_is_refused_here_too(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0], 0)
        with pytest.raises(kvcache.InvalidBatchError):
            r.cache.start_forward(r.ctx, Batch([0], [5]), reserve=True)
        r.check_seen()

    @attends
    @every_arrangement
    def test_attend_gives_the_shape_of_its_result(self, rig: MakeRig, arranged: ml.CacheConfig) -> None:
        r = rig(config=arranged)
        r.reserve(3)
        query = r.ctx.from_numpy(values.queries(0, 3))
        assert r.cache.attend(r.ctx, query, 1.0).shape == (3, values.HEADS, values.VALUE_DIM)
