"""Every pair of dtypes, through each operation that converts, bit for bit.

The reference is exact rational arithmetic (``samples.converted``), not NumPy's casts.
"""

from __future__ import annotations

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Context
from ml.testing.harness import BackendCase, assert_same, unchanged
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, LAYOUTS, converted, counting

__all__ = ["CastTests"]


_ALL = [
    pytest.param(source, target, id=f"{source.name}-{target.name}") for source in DTYPES for target in DTYPES
]
every_pair = pytest.mark.parametrize(("source", "target"), _ALL)


class CastTests(BackendCase):
    @every_pair
    def test_cast_converts_exactly_as_the_contract_says(
        self, ctx: Context, source: DType, target: DType
    ) -> None:
        values, expected = converted(source, target)
        assert_same(ctx.from_numpy(values).cast(ctx, target), expected)

    @every_pair
    def test_copy_converts_as_cast_does(self, ctx: Context, source: DType, target: DType) -> None:
        values, expected = converted(source, target)
        dst = ctx.zeros(values.shape, target)
        assert ctx.from_numpy(values).copy(ctx, dst) is dst
        assert_same(dst, expected)

    @every_pair
    def test_a_strided_copy_converts_as_cast_does(self, ctx: Context, source: DType, target: DType) -> None:
        values, expected = converted(source, target)
        count = len(values) // 2
        pairs, wanted = values[: 2 * count].reshape(count, 2), expected[: 2 * count].reshape(count, 2)
        placed = LAYOUTS["stepped"](ctx, pairs)
        dst = ctx.zeros((2, count), target)
        placed.tensor.copy(ctx, dst.permute(ctx, 1, 0))
        assert_same(dst, wanted.T)

    @every_pair
    def test_set_rows_converts_as_cast_does(self, ctx: Context, source: DType, target: DType) -> None:
        values, expected = converted(source, target)
        dst = ctx.zeros((len(values), 1), target)
        order = np.random.default_rng(0).permutation(len(values))
        dst.set_rows(ctx, ctx.from_numpy(values[order][:, None]), order)
        assert_same(dst, expected[:, None])

    @every_pair
    def test_from_numpy_converts_as_cast_does(self, ctx: Context, source: DType, target: DType) -> None:
        values, expected = converted(source, target)
        assert_same(ctx.from_numpy(values, target), expected)

    @every_pair
    def test_empty_and_scalar_casts_keep_their_shape(
        self, ctx: Context, source: DType, target: DType
    ) -> None:
        assert_same(ctx.zeros((2, 0, 3), source).cast(ctx, target), np.zeros((2, 0, 3)), target)
        assert_same(ctx.full((), 1, source).cast(ctx, target), np.ones(()), target)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_float_goes_through_f32_and_back_unchanged(self, ctx: Context, dtype: DType) -> None:
        values, _ = converted(dtype, DType.F32)
        assert_same(ctx.from_numpy(values).cast(ctx, DType.F32).cast(ctx, dtype), values)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nan_stays_some_nan(self, ctx: Context, dtype: DType) -> None:
        raw = {DType.F32: 0x7F800001, DType.F16: 0x7C01, DType.BF16: 0x7F81}[dtype]
        width = np.dtype(f"u{dtype.itemsize}")
        host = np.array([raw, raw | 1 << (8 * dtype.itemsize - 1)], dtype=width).view(dtype.numpy)
        tensor = ctx.from_numpy(host)
        for target in self.offered(FLOATS):
            assert np.isnan(tensor.cast(ctx, target).to_numpy().astype(np.float32)).all()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_cast_of_a_strided_view_gives_c_contiguous_storage(self, ctx: Context, layout: str) -> None:
        values = counting((4, 3, 2), DType.F32)
        shown = LAYOUTS[layout](ctx, values).tensor
        for target in self.offered((DType.F32, DType.F16, DType.I64)):
            result = shown.cast(ctx, target)
            assert_same(result, values, target)
            assert result.strides == (6, 2, 1)

    def test_cast_of_a_stride_0_view_repeats_it(self, ctx: Context) -> None:
        shown = ctx.arange(0, 4, 1, DType.I32).view(ctx, 1, (3, 2), (0, 1))
        assert_same(shown.cast(ctx, DType.F32), [[1, 2]] * 3, DType.F32)

    @pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0, "F32", np.float32])
    def test_cast_refuses_what_is_no_dtype_of_a_tensor(self, ctx: Context, dtype: DType) -> None:
        tensor = ctx.zeros((32,), DType.F32)
        with unchanged(tensor, error=ml.DTypeError):
            tensor.cast(ctx, dtype)

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_a_float_truncates_toward_zero(self, ctx: Context, dtype: DType) -> None:
        values = ctx.from_numpy(np.array([0.5, 0.99, 1.5, 2.5, 126.99], dtype=np.float32))
        assert_same(values.cast(ctx, dtype), [0, 0, 1, 2, 126], dtype)
        if dtype is not DType.U8:
            negative = ctx.from_numpy(np.array([-0.5, -0.99, -1.5, -127.9], dtype=np.float32))
            assert_same(negative.cast(ctx, dtype), [0, 0, -1, -127], dtype)
