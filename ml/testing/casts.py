"""Every pair of dtypes, through each operation that converts, bit for bit.

The reference is exact rational arithmetic (``samples.converted``), not NumPy's casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ml.dtypes import DType
from ml.protocols import Context, Tensor
from ml.testing.harness import BackendCase, assert_same, bits, each
from ml.testing.samples import DTYPES, FLOATS, LAYOUTS, Place, converted, counting


def _copied(ctx: Context, values: np.ndarray, target: DType) -> Tensor:
    dst = ctx.zeros(values.shape, target)
    assert ctx.from_numpy(values).copy(ctx, dst) is dst
    return dst


def _copied_strided(ctx: Context, values: np.ndarray, target: DType) -> Tensor:
    """Copy from every other row into columns."""
    count = (len(values) + 1) // 2
    pairs = np.resize(values, 2 * count).reshape(count, 2)
    dst = ctx.zeros((2, count), target)
    LAYOUTS["stepped"](ctx, pairs).tensor.copy(ctx, dst.permute(ctx, 1, 0))
    return dst.permute(ctx, 1, 0).contiguous(ctx).reshape(ctx, -1).slice(ctx, 0, 0, len(values))


def _scattered(ctx: Context, values: np.ndarray, target: DType) -> Tensor:
    dst = ctx.zeros((len(values), 1), target)
    order = np.random.default_rng(0).permutation(len(values))
    dst.set_rows(ctx, ctx.from_numpy(values[order][:, None]), order)
    return dst.reshape(ctx, -1)


ROUTES: dict[str, Callable[[Context, np.ndarray, DType], Tensor]] = {
    "cast": lambda ctx, values, target: ctx.from_numpy(values).cast(ctx, target),
    "copy": _copied,
    "strided copy": _copied_strided,
    "set_rows": _scattered,
    "from_numpy": lambda ctx, values, target: ctx.from_numpy(values, target),
}


def shown(number: Any) -> str:
    """A number and its bits, which distinguish it from its neighbours: ``1.0039062 (0x3f808000)``."""
    width = 2 * number.dtype.itemsize
    return f"{number} (0x{int(bits(np.asarray(number))):0{width}x})"


class CastTests(BackendCase):
    @each(source=DTYPES, target=DTYPES, route=ROUTES)
    def test_cast_converts_exactly_as_the_contract_says(
        self,
        ctx: Context,
        source: DType,
        target: DType,
        route: Callable[[Context, np.ndarray, DType], Tensor],
    ) -> None:
        values, expected = converted(source, target)
        actual = route(ctx, values, target)
        wrong = np.flatnonzero(bits(actual.to_numpy()) != bits(expected))[:4]
        host = actual.to_numpy()
        examples = [f"{shown(values[i])} as {target.name} is {host[i]}, not {expected[i]}" for i in wrong]
        assert not examples, "; ".join(examples)
        assert_same(actual, expected)

    @each(source=DTYPES, target=DTYPES)
    def test_empty_and_scalar_casts_keep_their_shape(
        self, ctx: Context, source: DType, target: DType
    ) -> None:
        assert_same(ctx.zeros((2, 0, 3), source).cast(ctx, target), np.zeros((2, 0, 3)), target)
        assert_same(ctx.full((), 1, source).cast(ctx, target), np.ones(()), target)

    @each(dtype=FLOATS)
    def test_a_float_goes_through_f32_and_back_unchanged_and_nan_stays_some_nan(
        self, ctx: Context, dtype: DType
    ) -> None:
        values, _ = converted(dtype, DType.F32)
        assert_same(ctx.from_numpy(values).cast(ctx, DType.F32).cast(ctx, dtype), values)
        raw = {DType.F32: 0x7F800001, DType.F16: 0x7C01, DType.BF16: 0x7F81}[dtype]
        width = np.dtype(f"u{dtype.itemsize}")
        host = np.array([raw, raw | 1 << (8 * dtype.itemsize - 1)], dtype=width).view(dtype.numpy)
        for target in self.offered(FLOATS):
            assert np.isnan(ctx.from_numpy(host).cast(ctx, target).to_numpy().astype(np.float32)).all()

    @each(layout=LAYOUTS, target=(DType.F32, DType.F16, DType.I64))
    def test_cast_of_a_view_gives_c_contiguous_storage(
        self, ctx: Context, layout: Place, target: DType
    ) -> None:
        values = counting((4, 3, 2), DType.F32)
        result = layout(ctx, values).tensor.cast(ctx, target)
        assert_same(result, values, target)
        assert result.strides == (6, 2, 1)
        repeated = ctx.arange(0, 4, 1, DType.I32).view(ctx, 1, (3, 2), (0, 1))
        assert_same(repeated.cast(ctx, target), [[1, 2]] * 3, target)
