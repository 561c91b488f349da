"""Layers that store less or more than keys and values, and attention over rows chosen by the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.attention import attend
from kvcache.snapshots.cut import cut_serialized
from kvcache.testing.harness import CacheCase, MakeRig, attends, every_arrangement
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.snapshots import CopyRig
from ml import DType

BOTH = Setup(latent=True, extra=True, max_sequences=3, capacity=24, max_batch=12, layers=2)
CHOOSING = {
    "causal": BOTH,
    "of keys and values": replace(BOTH, latent=False),
    "window": replace(BOTH, window=3),
    "window with the first kept": replace(BOTH, window=3, keep=2),
    "chunked": replace(BOTH, chunk=4),
    "Q8_0": replace(BOTH, dtype="Q8_0"),
    "Q4_0/F16": replace(BOTH, dtype="Q4_0/F16", latent=False),
}
BATCHES = (
    ([0, 1, 2, 3], [0, 0, 0, 0]),  # a prompt
    ([4], [0]),  # a token
    ([2, 0, 1, 5, 0], [1, 1, 1, 0, 2]),  # several sequences, unordered
    ([3, 6, 1], [1, 0, 2]),  # a token each
    ([11], [0]),  # a gap
)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no number of a key": ({"v_dim": 0}, "v_dim=0"),
    "more numbers than a key has": ({"v_dim": 9}, "v_dim=9"),
    "another part of the keys": ({"v_dim": 3}, "its first 3"),
    "another dtype of an extra": ({"extra": {"place": DType.I64}}, "I64"),
    "another shape of an extra": ({"extra": {"place": (2, 4)}}, r"place I32 \(2, 4\)"),
    "an extra of more tokens": ({"extra": {"place": (3, 3)}}, r"\(3, 3\)"),
    "an extra of no numbers": ({"extra": {"place": (2, 0)}}, r"\(2, 0\)"),
    "an extra too many": ({"extra": {"more": (2, 3)}}, "more"),
    "an extra without a name": ({"extra": {"": (2, 3)}}, "name"),
    "no extras": ({"extra": None}, "which stores"),
}


class ExtrasTests(CacheCase):
    @attends
    @pytest.mark.parametrize("setup", list(CHOOSING.values()), ids=list(CHOOSING))
    @every_arrangement
    def test_a_query_attends_to_the_chosen_rows_that_it_sees(
        self, rig: MakeRig, setup: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(setup, config=arranged)
        for seed, (positions, sequences) in enumerate(BATCHES):
            assert r.start(positions, sequences)
            r.put()
            r.check_selected(seed, sinks=seed % 2 == 1)
            r.check_seen()
        r.copy_prefix(0, 2, 3)
        r.forward([3, 4, 12], [2, 2, 0])
        r.check_selected(7)
        r.cache.set_causal(r.ctx, except_=[0])
        r.check_selected(4)
        if r.read([2, 12], [2, 0]):
            r.check_selected(8)

    @attends
    def test_chosen_rows_far_apart_or_many_are_read_in_any_number_of_steps(
        self, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attend, "BLOCK", 300)
        r = rig(BOTH, max_sequences=4, capacity=200)
        r.forward(range(6), 0)
        r.copy_prefix(0, 3, 5)
        r.forward([5, 6, 0, 1], [3, 3, 1, 1])
        r.check_selected(1)
        r.forward(range(6, 15), 0)
        r.check_selected(2, sinks=True)

    @attends
    def test_rows_that_a_query_does_not_see_do_no_harm_whatever_they_hold(self, rig: MakeRig) -> None:
        r = rig(BOTH)
        r.forward([0, 1], [0, 0])
        r.start([0], [1])
        r.put_nan()
        r.forward([2], [0])
        history = r.cache.get(r.ctx)[0].shape[0]
        query = r.ctx.from_numpy(r.setup.encoding.queries(1, 1), r.setup.computed)
        chosen = np.arange(-1, max(history, r.cache.cells), dtype=np.int32)[None]
        attended = r.cache.attend(r.ctx, query, 0.5, select=r.ctx.from_numpy(chosen)).to_numpy()
        np.testing.assert_allclose(
            attended, r.cache.attend(r.ctx, query, 0.5).to_numpy(), rtol=1e-5, atol=1e-5
        )
        assert np.isfinite(attended).all()

    def test_latents_are_stored_once_and_values_are_a_view_of_them(self, rig: MakeRig) -> None:
        apart, once = rig(replace(BOTH, latent=False, extra=False)), rig(replace(BOTH, extra=False))
        for r in (apart, once):
            r.forward(range(3), 0)
        rows, cells = once.setup.encoding, once.cache.cells
        assert once.cache.nbytes == 2 * cells * values.KV_HEADS * rows.key_dim * 4
        assert apart.cache.nbytes == 2 * cells * values.KV_HEADS * (values.KEY_DIM + values.VALUE_DIM) * 4
        key, value, _ = once.cache.get(once.ctx)
        assert value.shape == (*key.shape[:2], rows.value_dim)
        np.testing.assert_array_equal(value.to_numpy(), key.to_numpy()[..., : rows.value_dim])

    def test_a_latent_without_a_size_is_its_value_whole(self, backend: ml.Backend, ctx: ml.Context) -> None:
        with _cache(backend) as cache:
            cache.start_forward(ctx, Batch([0], [0]))
            cache.put(ctx, ctx.full((1, 1, 4), 2, DType.F32))
            key, value, _ = cache.get(ctx)
            assert key.shape == value.shape == (1, 1, 4)

    def test_extras_keep_their_shapes_and_dtypes(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features
    ) -> None:
        host = {
            dtype.name: np.arange(12).reshape(3, 2, 2) % 2
            for dtype in DType
            if dtype in declared.dtypes and not dtype.is_quantized
        }
        with _cache(backend) as cache:
            for start in (0, 3):
                cache.start_forward(ctx, Batch([start, start + 1, start + 2], [0] * 3))
                extra = {
                    name: ctx.from_numpy(array.astype(DType[name].numpy), DType[name])
                    for name, array in host.items()
                }
                some = ctx.from_numpy(np.ones((3, 2), np.float32)).view(ctx, 0, (3,), (2,))
                cache.put(ctx, ctx.zeros((3, 1, 4), DType.F32), extra={**extra, "one number": some})
            assert cache.get_extra(ctx, "one number").to_numpy().tolist() == [1] * 6
            for name, array in host.items():
                read_back = cache.get_extra(ctx, name)
                assert read_back.dtype is DType[name]
                twice = np.concatenate([array, array])
                np.testing.assert_array_equal(read_back.to_numpy().astype(np.int64), twice)

    @pytest.mark.parametrize("case", WRONG)
    def test_what_a_layer_does_not_store_is_refused_and_leaves_all_as_it_was(
        self, rig: MakeRig, case: str
    ) -> None:
        r = rig(replace(BOTH, layers=1))
        r.forward([0, 1], [0, 0])
        r.start([2, 3], [0, 0])
        r.put()
        changes, match = WRONG[case]
        extra = {name: r.ctx.from_numpy(x) for name, x in values.extras([0, 0], [2, 3]).items()}
        for name, wrong in (changes.get("extra") or {}).items():
            shape, dtype = ((2, 3), wrong) if isinstance(wrong, DType) else (wrong, DType.I32)
            extra[name] = r.ctx.zeros(shape, dtype)
        options = {"v_dim": r.setup.encoding.value_dim, **changes}
        options["extra"] = None if changes.get("extra", 1) is None else extra
        with pytest.raises(kvcache.InvalidRangeError, match=match):
            r.cache.put(r.ctx, r.ctx.zeros((2, values.KV_HEADS, values.KEY_DIM), DType.F32), **options)
        r.check_seen()
        r.drain()

    def test_v_dim_beside_values_and_extras_that_are_not_there_are_refused(self, rig: MakeRig) -> None:
        r = rig(BOTH, latent=False)
        with pytest.raises(kvcache.OrderError):
            r.cache.get_extra(r.ctx, "place")
        r.forward([0, 1], [0, 0])
        with pytest.raises(kvcache.InvalidRangeError, match=r"'strange'.*noise.*place"):
            r.cache.get_extra(r.ctx, "strange")
        key = r.ctx.zeros((2, values.KV_HEADS, values.KEY_DIM), DType.F32)
        with pytest.raises(kvcache.InvalidRangeError, match="v_dim=4 beside values"):
            r.cache.put(r.ctx, key, key, v_dim=4)
        r.start([2], [0])
        with pytest.raises(kvcache.OrderError):
            r.cache.get_extra(r.ctx, "place")

    @attends
    def test_rows_are_chosen_by_i32_for_each_query(self, rig: MakeRig) -> None:
        r = rig(BOTH)
        r.forward([0, 1], [0, 0])
        query = r.ctx.from_numpy(r.setup.encoding.queries(1, 2))
        for shape in ((2,), (1, 3), (3, 3), (2, 0)):
            with pytest.raises(kvcache.InvalidRangeError, match="select"):
                r.cache.attend(r.ctx, query, 1.0, select=r.ctx.zeros(shape, DType.I32))
        with pytest.raises(ml.DTypeError, match="select"):
            r.cache.attend(r.ctx, query, 1.0, select=r.ctx.zeros((2, 3), DType.F32))

    def test_nothing_moves_where_extras_cannot_be_re_encoded(self, rig: MakeRig) -> None:
        r = rig(replace(BOTH, can_shift=False))
        r.cache.editor.shift = r.setup.encoding.shift_positions
        r.forward(range(5), 0)
        with pytest.raises(kvcache.NotSupportedError, match=r"layers \[0, 1\] store extras.*shift_extra"):
            r.cache.remove(0, 1, 2)
        r.check_figures()
        r.remove(0, 3)
        r.drain()

    @pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
    def test_a_snapshot_on_the_host_is_the_snapshot_on_any_arrangement(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, dtype: str
    ) -> None:
        if dtype != "F32" and not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        source = CopyRig(replace(BOTH, dtype=dtype), backend, ctx)
        source.forward([0, 1, 0, 2, 1], [0, 0, 1, 0, 1])
        source.snapshot(0, 0, None)
        page = kvcache.serialize(backend, source.copies[0][0])
        halves = cut_serialized(page, 2)
        for config in (ml.CacheConfig(), ml.CacheConfig(permuted_v=True, cache_padding=4)):
            for pages in ([page], halves):
                target = CopyRig(replace(source.setup, config=config), backend, ctx)
                target.next_token = source.next_token
                for one in pages:
                    copy = source.model.snapshot(0, *_span(one))
                    target.copies = [(cast("Any", kvcache.deserialize(backend, one)), copy)]
                    assert target.restore(0, 2, None)
                target.extend(2)

    def test_a_wrapper_hands_on_what_its_cache_can_and_says_what_it_cannot(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        cache = kvcache.WrapperCache(kvcache.CausalCache(), kvcache.EncoderCache())
        cache.set_config(ml.CacheConfig())  # the default: the backend may request padding or permuted values
        cache.init(backend, DType.F32, 1, 8, 4)
        cache.start_forward(ctx, Batch([0], [0]))
        cache.put(ctx, ctx.full((1, 1, 4), 2, DType.F32), v_dim=3, extra={"x": ctx.zeros((1, 2), DType.I32)})
        assert cache.get(ctx)[1].shape == (1, 1, 3)
        assert cache.get_extra(ctx, "x").shape == (1, 2)
        cache.set_layer_type(1)
        for call in (
            lambda: cache.put(ctx, ctx.zeros((1, 1, 4), DType.F32)),
            lambda: cache.get_extra(ctx, "x"),
        ):
            with pytest.raises(kvcache.NotSupportedError, match="EncoderCache stores keys and values only"):
                call()
        cache.close()


@contextlib.contextmanager
def _cache(backend: ml.Backend) -> Iterator[kvcache.CausalCache]:
    """A cache of one sequence without padding or permutation, closed at the end."""
    cache = kvcache.CausalCache()
    cache.set_config(ml.CacheConfig())
    cache.init(backend, DType.F32, 1, 8, 8)
    yield cache
    cache.close()


def _span(page: kvcache.SerializedSnapshot) -> tuple[int, int]:
    meta: Any = page.meta["snapshot"]
    return meta["begin"], meta["end"]
