"""attend, compared with float64 attention over the model's content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import KINDS, CacheCase, MakeRig, attends, every_arrangement, every_kind
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import reference_attention
from ml import DType, nn


class AttendingTests(CacheCase):
    @attends
    @every_kind
    @every_arrangement
    def test_several_sequences_in_any_order_attend_to_their_own(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(kind, max_sequences=3, capacity=24, max_batch=12, config=arranged, layers=2)
        batches = (
            ([0, 1, 2, 3], [0, 0, 0, 0]),  # a prompt
            ([4], [0]),  # a token
            ([2, 0, 1, 5, 0], [1, 1, 1, 0, 2]),  # several sequences, unordered
            ([3, 6, 1], [1, 0, 2]),  # a token each
            ([8, 7, 4, 5], [0, 0, 1, 1]),
            ([11], [0]),  # a gap
        )
        for seed, (positions, sequences) in enumerate(batches):
            assert r.start(positions, sequences)
            r.put()
            r.check_attend(seed, sinks=seed % 2 == 1)

    @attends
    @pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
    def test_in_every_dtype_of_the_cache_and_of_the_query(self, rig: MakeRig, dtype: DType) -> None:
        r = rig(dtype=dtype)
        for positions in (range(5), [5], [7, 6]):
            r.start(list(positions), [0] * len(positions))
            r.put()
            r.check_attend(1)
        query = r.ctx.from_numpy(values.queries(1, 2))
        assert r.cache.attend(r.ctx, query, 1.0).dtype is DType.F32

    @attends
    @every_arrangement
    def test_a_pass_that_fills_every_cell_may_be_repeated(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        r = rig(max_sequences=1, capacity=16, max_batch=16, config=arranged, layers=2)
        for seed in range(3):
            r.forward(range(16), 0)
            r.check_attend(seed)
            r.remove(0, 0)

    @attends
    @every_kind
    def test_after_sharing_removing_and_moving(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, max_sequences=3, capacity=12, layers=2)
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 2)
        r.forward([3, 2, 0], [0, 1, 2])
        r.remove(0, 3)
        r.forward([3, 4, 3], [0, 0, 1])
        changes: list[Callable[[], object]] = [lambda: r.remove(1, 0), r.defrag, lambda: r.remove(0, 1, 2)]
        for seed, change in enumerate(changes):
            change()
            r.start([r.model.last(seq) + 1 for seq in range(3)], [0, 1, 2])
            r.put()
            r.check_attend(seed)

    @attends
    @pytest.mark.parametrize("arranged", [ml.CacheConfig(), ml.CacheConfig(permuted_v=True, cache_padding=8)])
    def test_cells_that_lie_far_apart(self, rig: MakeRig, arranged: ml.CacheConfig) -> None:
        """Prefixes shared across a wide cache: one sequence reads cells in several places."""
        r = rig(max_sequences=4, capacity=200, config=arranged)
        r.forward(range(6), 0)
        r.copy_prefix(0, 3, 5)
        r.forward([5, 6, 0, 1], [3, 3, 1, 1])
        r.check_attend(1)
        r.forward([6, 7, 2], [0, 3, 1])
        r.check_attend(2)
        r.drain()

    @attends
    @every_kind
    @every_arrangement
    def test_sequences_with_one_prefix_decode_together(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        """NaN stored for one of them affects no other."""
        r = rig(kind, max_sequences=4, capacity=20, max_batch=12, config=arranged)
        r.forward(range(5), 0)
        for seq, length in ((1, 5), (2, 3)):
            r.copy_prefix(0, seq, length)
        r.start([0, 1], [3, 3])
        r.put_nan()
        for step in range(6):
            sequences = [0, 2, 1] if step < 4 else [0, 1, 2, 3]
            if step == 4:
                r.remove(3, 0)
            r.start([r.model.last(seq) + 1 for seq in sequences], sequences)
            r.put()
            r.check_attend(step, sinks=step % 2 == 0)

    # Padding.

    @attends
    @every_kind
    def test_with_padding_the_shapes_that_attention_sees_repeat(
        self, rig: MakeRig, kind: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = ml.CacheConfig(cache_padding=16, mask_batch_padding=8, permuted_v=True)
        r = rig(kind, max_sequences=2, capacity=48, max_batch=16, config=config)
        shapes: set[tuple[int, int]] = set()
        attention = nn.attention

        def recorded(ctx: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> ml.Tensor:
            assert key.shape[0] == value.shape[0]
            assert not isinstance(mask, ml.Tensor) or mask.shape == (
                -(-query.shape[0] // 8) * 8,
                key.shape[0],
            )
            shapes.add((query.shape[0], key.shape[0]))
            return attention(ctx, query, key, value, mask, *rest)

        monkeypatch.setattr(nn, "attention", recorded)
        for position in range(34):
            sequences = [[0], [1], [1, 0]][position % 3] if position < 26 else [0]
            r.start([r.model.last(seq) + 1 for seq in sequences], sequences)
            r.put()
            r.check_attend(position)
        if not shapes and nn.offers(r.backend, ml.SupportsRaggedAttention):
            pytest.skip("one kernel for ragged batches, which needs no padding")
        assert {history % 16 for _, history in shapes} == {0}
        assert len(shapes) <= 6

    @attends
    @every_kind
    @pytest.mark.parametrize(("padding", "layout"), [(4, ml.Layout.HEAD_MAJOR), (7, ml.Layout.TOKEN_MAJOR)])
    def test_columns_of_padding_do_no_harm_whatever_they_hold(
        self, rig: MakeRig, kind: Setup, padding: int, layout: ml.Layout
    ) -> None:
        """NaN in free cells, in another sequence's, and in those of a snapshot."""
        config = ml.CacheConfig(cache_padding=padding, mask_batch_padding=3, layout=layout, permuted_v=True)
        r = rig(kind, max_sequences=3, capacity=11, max_batch=8, config=config, layers=2)
        r.spoil(0)
        for step in range(12):
            r.start([step], [1])
            r.put()
            r.check_attend(step)
            if step == 3:
                r.start([0, 1], [0, 0])  # before it
                r.put_nan()
            elif step == 5:
                r.start([0, 1], [2, 2])  # behind it
                r.put_nan()
                kept = r.cache.snapshot(2)
                r.remove(2, 0)
            elif step == 8:
                del kept
                r.defrag()
            elif step == 10:
                r.spoil(1)

    @attends
    @pytest.mark.parametrize("codec", ["Q8_0", "Q4_0", "F8_E4M3/AFFINE4_32"])
    def test_columns_of_padding_do_no_harm_in_blocks_either(
        self, backend: ml.Backend, ctx: ml.Context, codec: str
    ) -> None:
        cache = Setup(dtype=codec, config=ml.CacheConfig(cache_padding=8)).make(backend)
        for content, positions in ((np.nan, range(9)), (1.0, range(3)), (1.0, range(3, 4))):
            cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
            host = ctx.full((len(positions), 1, 32), content, DType.F32)
            cache.put(ctx, host, host)
            if content != content:
                cache.remove(0, 0)
                continue
            attended = cache.attend(ctx, host, 0.1).to_numpy()
            np.testing.assert_allclose(attended, np.ones_like(attended), rtol=0.01)

    @attends
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 3), (8, 2)])
    def test_grouped_queries_share_the_heads_of_keys(
        self, backend: ml.Backend, ctx: ml.Context, heads: int, kv_heads: int
    ) -> None:
        rng = np.random.default_rng(heads * 10 + kv_heads)
        query, key, value = (
            rng.standard_normal((7, count, dim)).astype(np.float32)
            for count, dim in ((heads, 6), (kv_heads, 6), (kv_heads, 3))
        )
        cache = Setup().make(backend)
        for start, stop in ((0, 5), (5, 7)):
            cache.start_forward(ctx, Batch(range(start, stop), [0] * (stop - start)))
            cache.put(ctx, ctx.from_numpy(key[start:stop]), ctx.from_numpy(value[start:stop]))
            attended = cache.attend(ctx, ctx.from_numpy(query[start:stop]), 0.4).to_numpy()
            for i in range(start, stop):
                expected = reference_attention(query[i], key[: i + 1], value[: i + 1], 0.4)
                np.testing.assert_allclose(attended[i - start], expected, rtol=1e-4, atol=1e-5)

    @attends
    def test_a_query_of_another_number_of_tokens_is_refused(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2], 0)
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.attend(r.ctx, r.ctx.from_numpy(values.queries(0, 2)), 1.0)

    def test_a_backend_that_only_stores_says_so(self, rig: MakeRig, declared: ml.Features) -> None:
        if declared.has("matmul"):
            pytest.skip("it computes")
        for kind in KINDS.values():
            r = rig(kind)
            r.forward([0, 1, 0], [0, 0, 1])
            with pytest.raises(ml.NotSupportedError):
                r.cache.attend(r.ctx, r.ctx.from_numpy(values.queries(0, 3)), 1.0)
            r.check_seen()
            r.drain()
