"""Sums, means, maxima, orders and norms: dtype of the result, precision inside, ties, empty axes."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Context
from ml.testing.compute import exact, normal
from ml.testing.harness import BackendCase, assert_close, assert_same, needs, unchanged
from ml.testing.samples import FLOATS, INTEGERS, LAYOUTS, counting

__all__ = ["ReductionTests"]

NARROW = (DType.F16, DType.BF16)


class ReductionTests(BackendCase):
    @pytest.mark.parametrize("op", ["sum", "mean", "max"])
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_reductions_of_floats_match_float64(
        self, ctx: Context, op: str, dtype: DType, layout: str
    ) -> None:
        x = normal((4, 3, 5), dtype, 13)
        shown = LAYOUTS[layout](ctx, x).tensor
        for axis in (0, 1, -1):
            for keepdims in (False, True):
                expected = getattr(exact(x), op)(axis=axis, keepdims=keepdims)
                assert_close(getattr(shown, op)(ctx, axis, keepdims), expected, dtype)
                assert_close(getattr(shown, op)(ctx, axis, keepdims=keepdims), expected, dtype)

    @pytest.mark.parametrize("dtype", [*INTEGERS, DType.BOOL])
    @needs("sum")
    def test_sums_of_integers_and_bool_are_i64(self, ctx: Context, dtype: DType) -> None:
        x = counting((3, 50), dtype, start=60)
        for axis in (0, 1):
            assert_same(ctx.from_numpy(x).sum(ctx, axis), x.astype(np.int64).sum(axis))
        assert_same(ctx.from_numpy(x).sum(ctx, 1, True), x.astype(np.int64).sum(1, keepdims=True))

    @needs("sum")
    def test_a_sum_of_integers_does_not_pass_through_a_float(self, ctx: Context) -> None:
        assert_same(ctx.full((3,), 2**31 - 1, DType.I32).sum(ctx, 0), np.asarray(3 * (2**31 - 1)))
        assert_same(ctx.from_numpy(np.array([2**53, 1, 1])).sum(ctx, 0), np.asarray(2**53 + 2))

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @needs("max", "argmax")
    def test_max_keeps_the_dtype_and_argmax_is_i32(self, ctx: Context, dtype: DType) -> None:
        x = counting((3, 4, 5), dtype, start=97)
        if dtype is not DType.U8:
            x = -x
        tensor = ctx.from_numpy(x)
        for axis in (0, 1, 2, -1, -3):
            for keepdims in (False, True):
                assert_same(tensor.max(ctx, axis, keepdims), exact(x).max(axis, keepdims=keepdims), dtype)
                expected = exact(x).argmax(axis, keepdims=keepdims)
                assert_same(tensor.argmax(ctx, axis, keepdims), expected, DType.I32)

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @needs("argmax")
    def test_argmax_of_ties_is_the_first(self, ctx: Context, dtype: DType) -> None:
        rows = np.array([[1, 5, 5, 2, 5], [0, 0, 0, 0, 0], [1, 2, 3, 4, 4]], dtype.numpy)
        assert_same(ctx.from_numpy(rows).argmax(ctx, 1), [1, 0, 3], DType.I32)
        assert_same(ctx.from_numpy(rows).argmax(ctx, 0), [0, 0, 0, 2, 0], DType.I32)
        wide = np.zeros((2, 5000), dtype.numpy)
        wide[0, [700, 3000, 4999]] = 1
        assert_same(ctx.from_numpy(wide).argmax(ctx, -1), [700, 0], DType.I32)

    @needs("max", "argmax")
    def test_infinities_take_part_in_maxima(self, ctx: Context) -> None:
        rows = np.array([[-np.inf, -np.inf, -5], [-np.inf] * 3, [1, np.inf, np.inf]], np.float32)
        for dtype in self.offered(FLOATS):
            tensor = ctx.from_numpy(rows, dtype)
            assert_same(tensor.max(ctx, 1), [-5, -np.inf, np.inf], dtype)
            assert_same(tensor.argmax(ctx, 1), [2, 0, 1], DType.I32)

    @needs("max", "argmax")
    def test_large_integers_compare_exactly(self, ctx: Context) -> None:
        tensor = ctx.from_numpy(np.array([2**53, 2**53 + 1, -(2**62)]))
        assert_same(tensor.max(ctx, 0), np.asarray(2**53 + 1))
        assert_same(tensor.argmax(ctx, 0), np.asarray(1, np.int32))

    # Empty axes.

    @pytest.mark.parametrize("op", ["sum", "mean", "max", "argmax"])
    def test_an_empty_axis_sums_to_0_and_has_no_mean_or_maximum(self, ctx: Context, op: str) -> None:
        tensor = ctx.zeros((3, 0), DType.F32)
        if op == "sum":
            assert_same(tensor.sum(ctx, 1), [0, 0, 0], DType.F32)
            assert_same(ctx.zeros((0, 2), DType.I32).sum(ctx, 0), [0, 0], DType.I64)
        else:
            with unchanged(tensor, error=ml.ShapeError):
                getattr(tensor, op)(ctx, 1)
        result = getattr(tensor, op)(ctx, 0)
        assert result.shape == (0,)
        assert getattr(tensor, op)(ctx, 0, True).shape == (1, 0)
        assert result.dtype is (DType.I32 if op == "argmax" else DType.F32)

    @needs("softmax", "argsort", "rms_norm", "top_k")
    def test_other_functions_of_an_axis_keep_empty_shapes(self, ctx: Context) -> None:
        for dtype in self.offered(FLOATS):
            for shape in ((0, 3), (3, 0), (0,)):
                tensor = ctx.zeros(shape, dtype)
                assert_same(tensor.softmax(ctx), np.zeros(shape), dtype)
                assert_same(tensor.argsort(ctx), np.zeros(shape), DType.I32)
                assert_same(tensor.rms_norm(ctx, None, 1e-5), np.zeros(shape), dtype)
            values, indices = ctx.zeros((0, 3), dtype).top_k(ctx, 2)
            assert_same(values, np.zeros((0, 2)), dtype)
            assert_same(indices, np.zeros((0, 2)), DType.I32)

    @pytest.mark.parametrize("op", ["sum", "mean", "max", "argmax", "softmax", "argsort"])
    def test_an_axis_that_is_not_there_is_refused(self, ctx: Context, op: str) -> None:
        tensor = ctx.zeros((2, 3), DType.F32)
        for axis in (2, -3):
            with unchanged(tensor, error=ml.ShapeError):
                getattr(tensor, op)(ctx, axis)
        for axis in (0, -1):
            with unchanged(error=ml.ShapeError):
                getattr(ctx.zeros((), DType.F32), op)(ctx, axis)

    @needs("mean")
    def test_mean_refuses_integers_and_bool(self, ctx: Context) -> None:
        for dtype in self.offered((*INTEGERS, DType.BOOL)):
            with unchanged(error=ml.DTypeError):
                ctx.zeros((2,), dtype).mean(ctx, 0)

    # Precision inside.

    @pytest.mark.parametrize("dtype", NARROW)
    @needs("sum", "mean")
    def test_sums_accumulate_in_f32_or_better(self, ctx: Context, dtype: DType) -> None:
        """Ones summed in F16 stop at 2048, in BF16 at 256; a mean overflows on its way."""
        ones = ctx.full((8192, 2), 1, dtype)
        assert_same(ones.sum(ctx, 0), [8192, 8192], dtype)
        assert_same(ones.permute(ctx, 1, 0).sum(ctx, 1), [8192, 8192], dtype)
        assert_same(ctx.full((4096,), 1024, dtype).mean(ctx, 0), np.asarray(1024.0), dtype)
        small = ctx.full((4096,), 2.0**-10, dtype)
        assert_same(ctx.full((1,), 64, dtype).concat(ctx, small, 0).sum(ctx, 0), np.asarray(68.0), dtype)

    @needs("sum")
    def test_a_long_sum_in_f32_does_not_drift(self, ctx: Context) -> None:
        x = np.random.default_rng(14).uniform(0, 1, 200_000).astype(np.float32)
        result = float(ctx.from_numpy(x).sum(ctx, 0).to_numpy())
        np.testing.assert_allclose(result, exact(x).sum(), rtol=1e-5)

    @pytest.mark.parametrize("dtype", NARROW)
    @needs("rms_norm")
    def test_rms_norm_squares_in_f32_or_better(self, ctx: Context, dtype: DType) -> None:
        """300 squared is beyond F16, 1e-4 squared below it; 4096 squares are beyond what BF16 adds up."""
        for value in (300.0, 1e-4, 60000.0):
            x = np.full((2, 4096), value).astype(dtype.numpy)
            result = ctx.from_numpy(x).rms_norm(ctx, None, 0.0)
            assert_close(result, np.ones(x.shape), dtype)

    @pytest.mark.parametrize("dtype", NARROW)
    @needs("softmax")
    def test_softmax_sums_in_f32_or_better(self, ctx: Context, dtype: DType) -> None:
        assert_same(ctx.full((8192,), 3, dtype).softmax(ctx), np.full(8192, 2.0**-13), dtype)

    # Softmax and norms.

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("axis", [0, 1, -1, -3])
    @needs("softmax")
    def test_softmax_matches_float64_on_any_axis(self, ctx: Context, dtype: DType, axis: int) -> None:
        x = normal((3, 4, 5), dtype, 15, spread=4)
        for layout in LAYOUTS:
            weights = np.exp(exact(x) - exact(x).max(axis=axis, keepdims=True))
            expected = weights / weights.sum(axis=axis, keepdims=True)
            assert_close(LAYOUTS[layout](ctx, x).tensor.softmax(ctx, axis), expected, dtype, slack=2)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("softmax")
    def test_softmax_survives_large_logits_and_masks(self, ctx: Context, dtype: DType) -> None:
        rows = np.array([[30000, 30000, -30000], [-np.inf, 1, 1], [-np.inf, -np.inf, 5], [0, -1e4, 3e4]])
        expected = np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1], [0, 0, 1]])
        assert_close(ctx.from_numpy(rows, dtype).softmax(ctx), expected, dtype)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("rms_norm")
    def test_rms_norm_matches_float64(self, ctx: Context, dtype: DType) -> None:
        x, weight = normal((2, 3, 8), dtype, 16), normal((8,), dtype, 17)
        wide = exact(x)
        for eps in (1e-6, 0.5):
            expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
            for layout in LAYOUTS:
                shown = LAYOUTS[layout](ctx, x).tensor
                assert_close(shown.rms_norm(ctx, None, eps), expected, dtype, slack=2)
                result = shown.rms_norm(ctx, ctx.from_numpy(weight), eps)
                assert_close(result, expected * exact(weight), dtype, slack=2)
        assert_close(ctx.from_numpy(x[0, 0]).rms_norm(ctx, None, 0.5), expected[0, 0], dtype, slack=2)

    @needs("rms_norm")
    def test_rms_norm_refuses_a_weight_that_does_not_fit(self, ctx: Context) -> None:
        tensor = ctx.zeros((2, 8), DType.F32)
        for shape in ((7,), (1,), (2, 8), ()):
            with unchanged(tensor, error=ml.ShapeError):
                tensor.rms_norm(ctx, ctx.zeros(shape, DType.F32), 1e-5)
        with unchanged(tensor, error=ml.DTypeError):
            tensor.rms_norm(ctx, ctx.zeros((8,), DType.I32), 1e-5)
        with unchanged(error=ml.ShapeError):
            ctx.zeros((), DType.F32).rms_norm(ctx, None, 1e-5)

    # Orders.

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @needs("argsort")
    def test_argsort_ascends_and_equal_values_keep_their_order(self, ctx: Context, dtype: DType) -> None:
        x = (np.random.default_rng(18).permutation(60).reshape(3, 20) // 4).astype(dtype.numpy)
        for axis in (0, 1, -1):
            expected = np.argsort(exact(x), axis=axis, kind="stable")
            assert_same(ctx.from_numpy(x).argsort(ctx, axis), expected, DType.I32)
        turned = LAYOUTS["permuted"](ctx, x).tensor
        assert_same(turned.argsort(ctx), np.argsort(exact(x), kind="stable"), DType.I32)
        many = (np.arange(3000) * 7 % 3).astype(dtype.numpy)
        assert_same(ctx.from_numpy(many).argsort(ctx), np.argsort(exact(many), kind="stable"), DType.I32)

    @needs("argsort")
    def test_argsort_of_large_integers_and_infinities_is_exact(self, ctx: Context) -> None:
        assert_same(ctx.from_numpy(np.array([2**53 + 1, 2**53, -(2**60)])).argsort(ctx), [2, 1, 0], DType.I32)
        floats = np.array([np.inf, -1, -np.inf, 0], np.float32)
        assert_same(ctx.from_numpy(floats).argsort(ctx), [2, 1, 3, 0], DType.I32)

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @pytest.mark.parametrize("k", [1, 3, 20])
    @needs("top_k")
    def test_top_k_gives_the_largest_descending_and_where_they_are(
        self, ctx: Context, dtype: DType, k: int
    ) -> None:
        x = np.random.default_rng(19).permutation(60).reshape(3, 20).astype(dtype.numpy)
        if dtype is not DType.U8:
            x = x - np.array(30, dtype.numpy)
        order = np.argsort(-exact(x), axis=-1, kind="stable")[:, :k]
        for layout in ("contiguous", "permuted", "stepped"):
            values, indices = LAYOUTS[layout](ctx, x).tensor.top_k(ctx, k)
            assert_same(values, np.take_along_axis(x, order, -1))
            assert_same(indices, order, DType.I32)

    @needs("top_k")
    def test_top_k_of_ties_gives_distinct_places(self, ctx: Context) -> None:
        x = np.array([3, 5, 5, 1, 5, 3], np.float32)
        values, indices = ctx.from_numpy(x).top_k(ctx, 5)
        assert_same(values, [5, 5, 5, 3, 3], DType.F32)
        places = indices.to_numpy()
        assert len(set(places.tolist())) == 5
        np.testing.assert_array_equal(x[places], [5, 5, 5, 3, 3])

    @needs("top_k")
    def test_top_k_refuses_a_k_outside_the_axis(self, ctx: Context) -> None:
        tensor = ctx.zeros((2, 4), DType.F32)
        for k in (0, -1, 5):
            with unchanged(tensor, error=ml.BoundsError):
                tensor.top_k(ctx, k)
        with unchanged():
            ctx.zeros((), DType.F32).top_k(ctx, 1)
