"""Passes that store nothing: read-only passes, and those that reserve the largest shapes."""

from __future__ import annotations

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase, MakeRig, attends, every_arrangement, every_kind
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.models.states import StateSetup
from kvcache.testing.rigs.attention import reference_attention
from kvcache.testing.rigs.encoder import EncoderRig
from kvcache.testing.rigs.states import StateRig
from ml import DType


class ReadingTests(CacheCase):
    @every_kind
    @every_arrangement
    def test_queries_see_what_a_token_there_would(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig, declared: ml.Features
    ) -> None:
        r = rig(kind, max_sequences=3, config=arranged, layers=2)
        r.forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
        r.forward([4, 5], [0, 0])
        first = r.cache.positions(0)[0]
        for positions, sequences in (
            ([5], [0]),
            ([first], [0]),
            ([1, 6, 3, 0, 5], [1, 0, 0, 1, 0]),
            ([5, 4], [0, 0]),
            ([6, 7], [0, 0]),  # behind the end
        ):
            if not r.read(positions, sequences):
                assert kind.chunk, "position 4 begins a chunk"
                continue
            r.check_seen()
            if declared.has("matmul"):
                r.check_attend(len(positions))
        r.extend(0)

    @every_arrangement
    def test_a_layer_that_was_not_put_in_this_pass_is_refused(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        r = rig(config=arranged, layers=2)
        r.forward([0, 1, 0], [0, 0, 1])
        r.start([2, 1], [0, 1])
        r.put(layers=1)
        for read_only in (False, True):  # also after a pass that failed between two layers
            if read_only:
                assert r.read([1], [0])
            r.check_seen(layers=1)
            r.cache.set_layer(1)
            query = r.ctx.from_numpy(values.queries(0, len(r.pass_[0])))
            with pytest.raises(kvcache.OrderError, match="layer 1"):
                r.cache.get(r.ctx)
            with pytest.raises(kvcache.OrderError, match="layer 1"):
                r.cache.attend(r.ctx, query, 1.0)
        r.remove(0, 2)
        r.remove(1, 1)
        assert r.read([1], [0])
        r.check_seen()

    def test_it_takes_no_cell_evicts_nothing_and_leaves_snapshots_due(
        self, rig: MakeRig, backend: ml.Backend
    ) -> None:
        r = rig(window=2, max_sequences=2, capacity=50, max_batch=4)
        r.forward(range(6), 0)
        r.cache.schedule_snapshots(0, [7])
        stored = backend.memory().allocated
        assert r.read([4, 5, 7], [0, 0, 0])
        r.check_seen()
        assert r.cache.positions(0).tolist() == [*range(6)]
        assert r.cache.snapshots_taken(0) == []
        assert backend.memory().allocated <= stored + 128
        r.forward([6], 0)
        assert r.cache.positions(0).tolist() == [3, 4, 5, 6]
        assert [snapshot.end for snapshot in r.cache.take_snapshots(0)] == [7]

    @attends
    def test_layers_that_share_anothers_keys_and_values_attend_to_them(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        """Like the upper layers of Gemma 3n and YOCO, which put nothing and name the layer that does."""
        cache = Setup(layers=2).make(backend)
        rng = np.random.default_rng(4)
        key, value, query = (rng.standard_normal((9, 2, 6)).astype(np.float32) for _ in range(3))
        source = {0: 0, 1: 1, 2: 0, 3: 1}  # layers 2 and 3 share the keys and values of 0 and 1
        for positions in (range(6), [6], [7, 8]):
            first, stop = positions[0], positions[-1] + 1
            cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
            for layer, stored in source.items():
                cache.set_layer(stored)
                if layer == stored:
                    new = (ctx.from_numpy(part[first:stop] + layer) for part in (key, value))
                    cache.put(ctx, *new)
                attended = cache.attend(ctx, ctx.from_numpy(query[first:stop] - layer), 0.4).to_numpy()
                for i in range(first, stop):
                    seen = key[: i + 1] + stored, value[: i + 1] + stored
                    expected = reference_attention(query[i] - layer, *seen, 0.4)
                    np.testing.assert_allclose(attended[i - first], expected, rtol=1e-4, atol=1e-5)

    # The other caches.

    def test_states_are_read_as_they_stand_and_cannot_be_set(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        r = StateRig(StateSetup(interval=1), backend, ctx)
        r.forward(0, 1, 0, 1, 1, 2)
        r.copy_prefix(0, 2, 2)
        r.snapshot(1)
        r.remove(1, 0)
        assert r.restore(1, 0)
        for sequences in ([0], [2, 1], [1, 0, 2]):
            r.read(sequences)
        r.forward(0, 1, 2)
        r.drain()

    def test_an_encoders_output_is_read(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features
    ) -> None:
        r = EncoderRig(backend, ctx)
        r.start([3, 3], [0, 1])
        r.put(2, 3)
        r.pass_ = [0, 9], [1, 0]
        r.cache.start_forward(ctx, Batch(*r.pass_, multimodal=[(1, "an image")]), read_only=True)
        r.check(declared.has("matmul"))
        key = ctx.zeros((2, values.KV_HEADS, values.KEY_DIM), DType.F32)
        with pytest.raises(kvcache.OrderError, match="read-only"):
            r.cache.put(ctx, key, key)

    # Passes that reserve.

    @every_kind
    @every_arrangement
    def test_a_reserved_pass_spans_the_whole_capacity_and_stores_nothing(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig, declared: ml.Features
    ) -> None:
        r = rig(kind, config=arranged, layers=2)
        r.reserve(4)
        key, value, mask = r.cache.get(r.ctx)
        cells, reserved = r.cache.cells, r.cache.nbytes
        wide = (cells, values.KV_HEADS, r.setup.encoding.value_dim)
        assert key.shape == (cells, values.KV_HEADS, values.KEY_DIM)
        assert value.shape == ((*wide[1:], cells) if arranged.permuted_v else wide)
        assert isinstance(mask, ml.Tensor)
        assert mask.shape == (-(-4 // arranged.mask_batch_padding) * arranged.mask_batch_padding, cells)
        assert mask.dtype is arranged.mask_dtype
        if declared.has("matmul"):
            attended = r.cache.attend(r.ctx, r.ctx.from_numpy(values.queries(0, 4)), 1.0)
            assert attended.shape == (4, values.HEADS, wide[2])
        for first in (0, 3, 6):
            r.forward([first, first + 1, first + 2, first], [0, 0, 0, 1])
            r.reserve(5)
        assert r.cache.nbytes == reserved, "the buffers are those of the first pass"
        r.forward([9], [0])
        r.cache.start_forward(
            r.ctx, Batch([8, 9, 100], [0, 0, 1]), reserve=True
        )  # stored positions, and one far beyond
        r.check_figures()
        r.drain()

    def test_a_full_cache_may_be_read_and_reserved_for(self, rig: MakeRig) -> None:
        r = rig(max_sequences=1, capacity=4)
        r.forward(range(4), 0)
        assert r.read([2, 3], [0, 0])
        r.check_seen()
        r.reserve(8)
        for tokens, heads in ((3, 2), (8, 3)):
            key = r.ctx.zeros((tokens, heads, values.KEY_DIM), DType.F32)
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.put(r.ctx, key, key)
        r.remove(0, 3)
        r.extend(0)
