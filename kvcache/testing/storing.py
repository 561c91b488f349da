"""put and get: stored data is returned, converted, in the requested layout; refusals store nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase, MakeRig, every_arrangement, every_kind
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import mask_of
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml import DType, Layout

FLOATS = [DType.F32, DType.F16, DType.BF16]
Shape = tuple[int, ...]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored_by_position(
    cache: kvcache.CausalCache, ctx: ml.Context, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a single sequence in the order of positions, after a pass that appended to it."""
    key, value, mask = cache.get(ctx)
    host_key, host_value = key.to_numpy(), value.to_numpy()
    if cache.config.permuted_v:
        host_value = host_value.transpose(2, 0, 1)
    if isinstance(mask, ml.Tensor):
        seen = mask.to_numpy().astype(np.float32) == 0
        last = np.flatnonzero(seen.any(axis=0))
        host_key, host_value = host_key[last], host_value[last]
    assert host_key.shape[0] == count
    return host_key, host_value


class StoringTests(CacheCase):
    @every_arrangement
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("given", FLOATS)
    def test_what_is_put_comes_back_rounded_to_the_dtype_of_the_cache(
        self, backend: ml.Backend, ctx: ml.Context, arranged: ml.CacheConfig, dtype: DType, given: DType
    ) -> None:
        cache = Setup(dtype=dtype, config=arranged).make(backend)
        key, value = normal(1, 6, 3, 5).astype(given.numpy), normal(2, 6, 3, 7).astype(given.numpy)
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            cache.start_forward(ctx, Batch(range(start, stop), [0] * (stop - start)))
            cache.put(ctx, ctx.from_numpy(key[start:stop]), ctx.from_numpy(value[start:stop]))
            found_key, found_value = stored_by_position(cache, ctx, stop)
            assert found_key.dtype == found_value.dtype == dtype.numpy
            np.testing.assert_array_equal(found_key, key[:stop].astype(np.float32).astype(dtype.numpy))
            np.testing.assert_array_equal(found_value, value[:stop].astype(np.float32).astype(dtype.numpy))

    @pytest.mark.parametrize("layout", list(Layout))
    def test_cells_lie_in_memory_as_the_layout_says(
        self, backend: ml.Backend, ctx: ml.Context, layout: Layout
    ) -> None:
        cache = Setup(capacity=8, config=ml.CacheConfig(layout=layout)).make(backend)
        cache.start_forward(ctx, Batch([0, 1], [0, 0]))
        cache.put(ctx, ctx.zeros((2, 3, 5), DType.F32), ctx.zeros((2, 3, 7), DType.F32))
        key, value, _ = cache.get(ctx)
        if layout is Layout.HEAD_MAJOR:
            assert (key.strides, value.strides) == ((5, 16 * 5, 1), (7, 16 * 7, 1))
        else:
            assert (key.strides, value.strides) == ((15, 5, 1), (21, 7, 1))

    def test_permuted_values_lie_with_the_history_innermost(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        cache = Setup(capacity=8, config=ml.CacheConfig(permuted_v=True)).make(backend)
        cache.start_forward(ctx, Batch([0, 1], [0, 0]))
        cache.put(ctx, ctx.zeros((2, 3, 5), DType.F32), ctx.zeros((2, 3, 7), DType.F32))
        assert cache.get(ctx)[1].strides == (7 * 16, 16, 1)

    @every_kind
    @every_arrangement
    def test_layers_keep_apart(self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig) -> None:
        r = rig(kind, layers=3, config=arranged)
        r.forward([0, 1, 2, 0], [0, 0, 0, 1])
        r.forward([3, 1], [0, 1])
        r.drain()

    def test_layers_may_differ_in_shape(self, backend: ml.Backend, ctx: ml.Context) -> None:
        cache = Setup().make(backend)
        shapes = {0: ((2, 1, 4), (2, 1, 4)), 7: ((2, 3, 5), (2, 3, 2))}
        cache.start_forward(ctx, Batch([0, 1], [0, 0]))
        for layer, (key, value) in shapes.items():
            cache.set_layer(layer)
            cache.put(ctx, ctx.from_numpy(normal(layer, *key)), ctx.from_numpy(normal(layer + 1, *value)))
        for layer, (key, value) in shapes.items():
            cache.set_layer(layer)
            found_key, found_value = stored_by_position(cache, ctx, 2)
            np.testing.assert_array_equal(found_key, normal(layer, *key))
            np.testing.assert_array_equal(found_value, normal(layer + 1, *value))

    @every_arrangement
    def test_strided_views_are_put_as_they_look(
        self, backend: ml.Backend, ctx: ml.Context, arranged: ml.CacheConfig
    ) -> None:
        cache = Setup(config=arranged).make(backend)
        key, value = normal(1, 3, 2, 5), normal(2, 3, 2, 4)
        cache.start_forward(ctx, Batch([2, 0, 1], [0, 0, 0]))  # scattered in the order of positions
        turned = ctx.from_numpy(key.transpose(2, 0, 1)).permute(ctx, 1, 2, 0)
        wide = ctx.from_numpy(np.concatenate([value, value], axis=2)).slice(ctx, 2, 0, 4)
        cache.put(ctx, turned, wide)
        got_key, got_value, mask = cache.get(ctx)
        found_key, stored = got_key.to_numpy(), got_value.to_numpy()
        if arranged.permuted_v:
            stored = stored.transpose(2, 0, 1)
        seen = mask_of(mask, 3, found_key.shape[0], arranged)
        for row, tokens in ((1, [1]), (2, [1, 2]), (0, [0, 1, 2])):  # in the order of positions
            for token in tokens:
                same = (found_key[seen[row]] == key[token]).all(axis=(1, 2))
                assert same.sum() == 1
                np.testing.assert_array_equal(stored[seen[row]][same][0], value[token])
            assert seen[row].sum() == len(tokens)

    def test_the_last_put_of_a_layer_counts(self, rig: MakeRig) -> None:
        r = rig()
        r.start([0, 1], [0, 0])
        zeros = r.ctx.zeros((2, 2, 8), DType.F32), r.ctx.zeros((2, 2, 5), DType.F32)
        r.cache.put(r.ctx, *zeros)
        r.put()
        r.check_seen()

    def test_get_of_cells_that_lie_together_copies_nothing(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        cache = Setup(max_sequences=1, capacity=64).make(backend)
        cache.start_forward(ctx, Batch(range(48), [0] * 48))
        cache.put(ctx, ctx.zeros((48, 2, 64), DType.F32), ctx.zeros((48, 2, 64), DType.F32))
        first = cache.get(ctx)
        before = backend.memory().allocated
        again = cache.get(ctx)
        assert backend.memory().allocated == before
        assert again[0].shape == first[0].shape

    def test_nothing_is_allocated_before_the_first_put(self, backend: ml.Backend, ctx: ml.Context) -> None:
        before = backend.memory().allocated
        cache = Setup(capacity=4096).make(backend)
        cache.start_forward(ctx, Batch([0], [0]))
        assert backend.memory().allocated == before
        assert cache.nbytes == 0
        cache.put(ctx, ctx.zeros((1, 2, 8), DType.F32), ctx.zeros((1, 2, 4), DType.F32))
        assert cache.nbytes == 2 * 4096 * 2 * (8 + 4) * 4
        assert backend.memory().allocated >= before + cache.nbytes

    # Writes.

    def test_a_run_of_cells_is_one_slice_copy_each_and_scattered_cells_are_set_rows(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        cache = Setup(max_sequences=1, capacity=8).make(limited)
        with limited.new_context() as inner:
            key, value = inner.zeros((4, 2, 8), DType.F32), inner.zeros((4, 2, 5), DType.F32)
            cache.start_forward(inner, Batch(range(4), [0] * 4))
            assert self._writes(plan, cache, inner, key, value) == {"copy": 2}
            cache.start_forward(inner, Batch([5, 4, 7, 6], [0] * 4))
            assert self._writes(plan, cache, inner, key, value) == {"set_rows": 2}

    @staticmethod
    def _writes(
        plan: Plan, cache: kvcache.CausalCache, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor
    ) -> dict[str, int]:
        plan.calls.clear()
        cache.put(ctx, key, value)
        counts = Counter(plan.calls)
        return {name: counts[name] for name in ("copy", "set_rows") if counts[name]}

    # Refusals.

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ((3, 2, 8), (2, 2, 5)), ((2, 2, 8), (3, 2, 5)), ((3, 2, 8), (3, 2, 5)), ((1, 2, 8), (1, 2, 5)),
            ((2, 3, 8), (2, 2, 5)), ((2, 2, 8), (2, 3, 5)), ((2, 3, 8), (2, 3, 5)), ((2, 2, 9), (2, 2, 5)),
            ((2, 2, 8), (2, 2, 6)), ((2, 16), (2, 10)), ((2, 2, 8), (2, 10)), ((1, 2, 2, 8), (1, 2, 2, 5)),
        ],
        ids=str,
    )  # fmt: skip
    def test_wrong_shapes_are_refused_and_leave_all_as_it_was(
        self, rig: MakeRig, key: Shape, value: Shape
    ) -> None:
        r = rig(layers=2)
        r.forward([0, 1], 0)
        r.start([2, 3], [0, 0])
        r.put()
        with pytest.raises(kvcache.InvalidRangeError) as caught:
            r.cache.put(r.ctx, r.ctx.zeros(key, DType.F32), r.ctx.zeros(value, DType.F32))
        assert isinstance(caught.value, ValueError)
        assert str(key) in str(caught.value) or str(value) in str(caught.value)
        r.check_figures()
        r.check_seen()
        r.drain()

    def test_a_refused_first_put_fixes_no_shapes(self, rig: MakeRig) -> None:
        r = rig()
        r.start([0, 1], [0, 0])
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.put(r.ctx, r.ctx.zeros((2, 3, 8), DType.F32), r.ctx.zeros((2, 2, 8), DType.F32))
        assert r.cache.nbytes == 0
        r.put()
        r.check_seen()
