"""view, slice, permute and reshape: the elements they show, and aliasing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, each, evaluate, unchanged
from ml.testing.samples import DTYPES, counting

VIEWS: list[tuple[int, tuple[int, ...], tuple[int, ...] | None, Any]] = [
    (0, (24,), None, np.arange(24)),
    (5, (2, 3), None, [[5, 6, 7], [8, 9, 10]]),
    (1, (3, 2), (6, 3), [[1, 4], [7, 10], [13, 16]]),
    (0, (4, 2), (1, 4), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (2, (3, 3), (1, 1), [[2, 3, 4], [3, 4, 5], [4, 5, 6]]),
    (7, (2, 3), (0, 2), [[7, 9, 11], [7, 9, 11]]),
    (7, (2, 2), (0, 0), [[7, 7], [7, 7]]),
    (23, (), None, 23),
    (23, (1, 1), (99, 99), [[23]]),
    (3, (2, 1, 2, 1), (4, 77, 2, 0), [[[[3], [5]]], [[[7], [9]]]]),
    (0, (0,), None, np.zeros(0, int)),
    (24, (0, 3), None, np.zeros((0, 3), int)),
    (4, (2, 0), (50, 50), np.zeros((2, 0), int)),
    (0, (2, 2, 2, 2), (8, 4, 2, 1), np.arange(16).reshape(2, 2, 2, 2)),
    (1, (2, 3), (3, 2), [[1, 3, 5], [4, 6, 8]]),
]
"""Offset, shape, strides, and the elements of 0 to 23 that such a view shows."""

SHOWN = {
    # Offsets count from the first element shown; the storage is the limit.
    "x.slice(ctx, 0, 1, 3).slice(ctx, 1, 2, 4).view(ctx, 0, (3,))": "a[8:11]",
    "x.slice(ctx, 0, 1, 3).slice(ctx, 1, 2, 4).view(ctx, -8, (24,))": "a",
    "x.slice(ctx, 0, 1, 3).slice(ctx, 1, 2, 4).view(ctx, -3, (2, 2), (6, 1))": "a[[[5, 6], [11, 12]]]",
    "x.slice(ctx, 0, 1, 3).slice(ctx, 1, 2, 4).view(ctx, 15, (1,))": "a[23:]",
    "v.slice(ctx, 0, 8, 10).view(ctx, 0, (16,))": "a[8:]",
    "v.slice(ctx, 0, 1, 24, 2).slice(ctx, 0, 1, 11, 3)": "a[1:24:2][1:11:3]",
    "v.slice(ctx, 0, 1, 24, 2).slice(ctx, 0, 1, 11, 3).slice(ctx, 0, 2, 4)": "a[1:24:2][1:11:3][2:4]",
    "x.slice(ctx, -1, 0, 3)": "g[:, :3]",
    "x.slice(ctx, -2, 2, 4, 7)": "g[2:4:7]",
    "x.slice(ctx, 0, 4, 4)": "g[4:4]",
    "x.slice(ctx, 1, 6, 6, 3).contiguous(ctx)": "g[:, 6:6]",
    "v.view(ctx, 24, (0, 5)).slice(ctx, 1, 2, 4)": "a[24:].reshape(0, 2)",
    "v.view(ctx, 24, (0, 5)).slice(ctx, 1, 2, 4).view(ctx, 0, (0,))": "a[24:]",
    # Merged or split axes must be contiguous among themselves; the others may have any strides.
    "x.reshape(ctx, 2, 3, 4).slice(ctx, 0, 1, 2).reshape(ctx, 12)": "a[12:]",
    "v.reshape(ctx, 2, 3, 4).slice(ctx, 1, 1, 3).reshape(ctx, 2, 8)": "a.reshape(2, 12)[:, 4:]",
    "x.reshape(ctx, 2, 3, 4).slice(ctx, 2, 0, 4, 2).reshape(ctx, 6, 2)": "a[::2].reshape(6, 2)",
    "x.reshape(ctx, 2, 3, 4).permute(ctx, 2, 0, 1).reshape(ctx, 4, 6)": "g.reshape(6, 4).T",
    "x.reshape(ctx, 2, 3, 4).permute(ctx, 2, 0, 1).reshape(ctx, 2, 2, 2, 1, 3)":
        "g.reshape(6, 4).T.reshape(2, 2, 2, 1, 3)",
    "v.view(ctx, 7, (3, 4), (0, 0)).reshape(ctx, 12)": "np.full(12, a[7])",
    "x.permute(ctx, 1, 0).permute(ctx, 1, 0)": "g",
    "x.permute(ctx)": "g.T",
    "x.permute(ctx, 0, -1)": "g",
    "x.permute(ctx, -1, -2)": "g.T",
    **{f"v.reshape(ctx, *{shape})": f"a.reshape{shape}" for shape in ((2, 3, 4), (4, 6), (3, -1), (-1,),
        (1, 24, 1))},
    **{f"x.reshape(ctx, 2, 3, 4).permute(ctx, *{axes})": f"g.reshape(2, 3, 4).transpose{axes}"
       for axes in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (-1, 0, -2))},
    **{f"v.slice(ctx, 0, 0, 0).reshape(ctx, *{shape})": f"a[:0].reshape{shape}" for shape in ((3, 0), (0,),
        (-1, 3))},
    **{f"v.view(ctx, 3, ()).reshape(ctx, *{shape})": f"a[3].reshape{shape}" for shape in ((1, 1), (-1,))},
    # NumPy's integers are accepted.
    "x.slice(ctx, 0, np.int64(1), np.uint8(3), np.int64(1))": "g[1:3]",
    "v.view(ctx, np.int64(1), (np.uint8(3), 1), (np.int64(1), 1))": "a[1:4].reshape(3, 1)",
    "v.reshape(ctx, np.uint8(3), np.int64(-1))": "a.reshape(3, 8)",
}  # fmt: skip
"""Views of ``v`` (24 elements) or ``x`` (the same as 4 x 6), and the same views of ``a`` and ``g`` in NumPy.
"""
SLICES = [(axis, *cut) for axis in (0, 1, 2) for cut in ((0, 4, 1), (1, 3, 1), (0, 3, 2), (1, 4, 2),
    (0, 4, 3), (2, 2, 1), (0, 3, 100))]  # fmt: skip


def put(ctx: Context, dst: Tensor, values: Any) -> None:
    """Write host values through a tensor."""
    ctx.from_numpy(np.broadcast_to(np.asarray(values, dst.dtype.numpy), dst.shape)).copy(ctx, dst)


class MovementTests(BackendCase):
    @each(view=VIEWS, dtype=DTYPES)
    def test_view_shows_offset_plus_index_times_strides(self, ctx: Context, view: Any, dtype: DType) -> None:
        *geometry, where = view
        values = counting((24,), dtype)
        tensor = ctx.from_numpy(values)
        for whole in (tensor, tensor.reshape(ctx, 4, 6).permute(ctx, 1, 0)):
            shown = whole.view(ctx, *geometry)
            assert_same(shown, values[np.asarray(where)])
            assert shown.nbytes == np.size(where) * dtype.itemsize

    @each(pair=SHOWN.items())
    def test_views_of_views_are_those_of_numpy_and_alias(self, ctx: Context, pair: tuple[str, str]) -> None:
        call, expression = pair
        vector = ctx.from_numpy(np.arange(24, dtype=np.int32))
        shown = evaluate(call, ctx=ctx, v=vector, x=vector.reshape(ctx, 4, 6))
        host = np.arange(24, dtype=np.int32)
        expected = np.asarray(evaluate(expression, a=host, g=host.reshape(4, 6)), np.int32)
        assert_same(shown, expected)
        assert all(type(size) is int for size in (*shown.shape, *shown.strides))
        if 0 not in (*shown.strides, *shown.shape) and "contiguous" not in call:
            put(ctx, shown, -expected)
            host[expected.ravel()] *= -1
            assert_same(vector, host)

    @each(cut=SLICES)
    def test_slice_is_numpys_without_wrapping(self, ctx: Context, cut: tuple[int, int, int, int]) -> None:
        axis, start, stop, step = cut
        values = np.arange(80, dtype=np.int32).reshape(4, 5, 4)
        tensor = ctx.from_numpy(values)
        for shown, model in ((tensor, values), (tensor.permute(ctx, 2, 0, 1), values.transpose(2, 0, 1))):
            expected = model[(slice(None),) * axis + (slice(start, stop, step),)]
            assert_same(shown.slice(ctx, axis, start, stop, step), expected)
            assert_same(shown.slice(ctx, axis - 3, start, stop, step), expected)
            if step == 1:
                assert_same(shown.slice(ctx, axis, start, stop), expected)

    @each(shape=[(0, 5), (5, 0), (0, 0), (2, 0, 4)])
    def test_the_empty_can_be_sliced_on_every_axis(self, ctx: Context, shape: tuple[int, ...]) -> None:
        tensor = ctx.zeros(shape, DType.F32)
        for axis, size in enumerate(shape):
            for start in {0, size // 2, size}:
                expected = (*shape[:axis], size - start, *shape[axis + 1 :])
                assert_same(tensor.slice(ctx, axis, start, size), np.zeros(expected), DType.F32)

    def test_permute_changes_strides_alone(self, ctx: Context) -> None:
        shown = ctx.zeros((2, 3, 4), DType.I32).permute(ctx, 1, 2, 0)
        assert (shown.shape, shown.strides) == ((3, 4, 2), (4, 1, 12))

    # Aliasing. aliasing.py has random walks of views and writes.

    def test_two_contexts_share_storage_and_order(self, backend: Backend) -> None:
        with backend.new_context() as first, backend.new_context() as second:
            tensor = first.zeros((4,), DType.I32)
            view = tensor.slice(second, 0, 1, 3)
            put(second, view, 7)
            assert_same(tensor, [0, 7, 7, 0], DType.I32)
            put(first, tensor, [1, 2, 3, 4])
            assert_same(view, [2, 3], DType.I32)
            first.forward(tensor).compute(tensor)
            put(second, view.view(second, -1, (1,)), 9)
            first.compute(tensor)
            assert_same(tensor, [9, 2, 3, 4], DType.I32)

    def test_new_storage_is_independent_of_its_source(self, ctx: Context) -> None:
        source = ctx.from_numpy(counting((2, 3), DType.I32))
        makers: tuple[Callable[[], Tensor], ...] = (
            lambda: source.contiguous(ctx),
            lambda: source.cast(ctx, DType.I32),
            lambda: source.rows(ctx, [0, 1]),
            lambda: source.repeat(ctx, 0, 1),
            lambda: source.concat(ctx, ctx.zeros((0, 3), DType.I32), 0),
            lambda: source.permute(ctx, 1, 0).contiguous(ctx).permute(ctx, 1, 0),
        )
        for make in makers:
            before = source.to_numpy()
            result = make()
            put(ctx, source, 50)
            assert_same(result, before)
            put(ctx, result, -1)
            assert_same(source, np.full((2, 3), 50), DType.I32)
            put(ctx, source, before)

    def test_new_storage_is_contiguous_and_holds_no_more_than_it_shows(self, ctx: Context) -> None:
        whole = ctx.from_numpy(counting((4, 6), DType.I32))
        source = whole.permute(ctx, 1, 0).slice(ctx, 0, 1, 5, 2)
        for result in (source.contiguous(ctx), source.cast(ctx, DType.F32), source.rows(ctx, [1, 0])):
            assert result.strides == (4, 1)
            for offset, size in ((0, 9), (-1, 1)):
                with unchanged(whole, error=ml.BoundsError):
                    result.view(ctx, offset, (size,))
