"""copy and contiguous between every two layouts, and between overlapping views."""

from __future__ import annotations

import numpy as np

import ml
from ml.dtypes import DType
from ml.protocols import Context
from ml.testing.harness import BackendCase, assert_same, each, needs, unchanged
from ml.testing.samples import DTYPES, LAYOUTS, Place, counting, positions

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view."""

OVERLAPS: list[tuple[Geometry, Geometry]] = [
    ((0, (6,), (1,)), (2, (6,), (1,))),
    ((2, (6,), (1,)), (0, (6,), (1,))),
    ((1, (6,), (1,)), (1, (6,), (1,))),
    ((0, (5,), (1,)), (0, (5,), (2,))),
    ((0, (5,), (2,)), (0, (5,), (1,))),
    ((0, (4, 4), (4, 1)), (0, (4, 4), (1, 4))),
    ((0, (3, 3), (5, 1)), (6, (3, 3), (5, 1))),
    ((6, (3, 3), (5, 1)), (0, (3, 3), (5, 1))),
    ((1, (3, 3), (5, 1)), (5, (3, 3), (5, 1))),
    ((5, (3, 3), (1, 5)), (1, (3, 3), (5, 1))),
    ((3, (4, 3), (0, 1)), (0, (4, 3), (3, 1))),
    ((0, (2, 3, 2), (6, 2, 1)), (2, (2, 3, 2), (1, 2, 6))),
    ((0, (4, 5), (1, 1)), (0, (4, 5), (5, 1))),
    ((10, (1,), (1,)), (10, (1,), (1,))),
    ((0, (0, 3), (3, 1)), (2, (0, 3), (3, 1))),
]
SHARING = [((3, 2), (0, 1)), ((2, 2), (0, 0)), ((3, 3), (1, 1)), ((2, 3), (2, 1)), ((2, 2, 2), (3, 2, 1))]
DIFFERING: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3,), (4,)), ((1,), (4,)), ((4,), (2, 2)), ((), (1,)), ((2, 3), (3, 2)), ((3,), (1, 3)), ((0,), (0, 1)),
]  # fmt: skip


class CopyTests(BackendCase):
    @each(
        shape=[(4, 3), (2, 3, 4)],
        source=LAYOUTS,
        destination=LAYOUTS,
        dtype=(DType.F32, DType.BF16, DType.BOOL),
    )
    def test_copy_writes_what_the_destination_shows_and_nothing_else(
        self, ctx: Context, source: Place, destination: Place, shape: tuple[int, ...], dtype: DType
    ) -> None:
        values = counting(shape, dtype, start=7)
        src, dst = source(ctx, values), destination(ctx, counting(shape, DType.I32, start=50))
        before, model = src.base.to_numpy(), dst.base.to_numpy()
        model[dst.where] = values.astype(np.int32)
        assert src.tensor.copy(ctx, dst.tensor) is dst.tensor
        assert_same(dst.base, model)
        assert_same(dst.tensor, values, DType.I32)
        assert_same(src.base, before)

    @each(layout=LAYOUTS, dtype=DTYPES)
    def test_contiguous_shows_the_same_in_c_order(self, ctx: Context, layout: Place, dtype: DType) -> None:
        values = counting((2, 3, 4), dtype)
        result = layout(ctx, values).tensor.contiguous(ctx)
        assert_same(result, values)
        assert result.strides == (12, 4, 1)

    @each(views=OVERLAPS, dtype=(DType.F32, DType.BF16, DType.I8))
    def test_an_overlapping_copy_acts_as_if_the_source_were_read_first(
        self, ctx: Context, views: tuple[Geometry, Geometry], dtype: DType
    ) -> None:
        source, destination = views
        model = counting((40,), dtype, start=1)
        tensor = ctx.from_numpy(model)
        model[positions(*destination)] = model[positions(*source)]
        tensor.view(ctx, *source).copy(ctx, tensor.view(ctx, *destination))
        assert_same(tensor, model)

    @needs("from_native")
    @each(views=OVERLAPS)
    def test_two_tensors_of_one_native_array_overlap_too(
        self, ctx: Context, views: tuple[Geometry, Geometry]
    ) -> None:
        model = counting((40,), DType.F32, start=1)
        native = ctx.from_numpy(model).native
        first, second = ctx.from_native(native), ctx.from_native(native)
        model[positions(*views[1])] = model[positions(*views[0])]
        first.view(ctx, *views[0]).copy(ctx, second.view(ctx, *views[1]))
        assert_same(second, model)

    @each(shift=(1, 3, 1000))
    def test_a_long_overlapping_copy_moves_every_element_once(self, ctx: Context, shift: int) -> None:
        """Longer than any vector width or block that a kernel copies at once."""
        model = np.arange((1 << 20) + 1007, dtype=np.int32)
        tensor = ctx.from_numpy(model)
        for begin, end in ((0, shift), (shift, 0)):
            count = model.size - shift
            model[end : end + count] = model[begin : begin + count].copy()
            tensor.slice(ctx, 0, begin, begin + count).copy(ctx, tensor.slice(ctx, 0, end, end + count))
            assert_same(tensor, model)

    # Refusals, and valid calls that look like one.

    @each(shapes=DIFFERING)
    def test_copy_refuses_shapes_that_differ(
        self, ctx: Context, shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        source, dst = ctx.full(shapes[0], 1, DType.F32), ctx.zeros(shapes[1], DType.F32)
        with unchanged(dst, error=ml.ShapeError):
            source.copy(ctx, dst)

    @each(view=SHARING)
    def test_a_destination_whose_elements_share_memory_is_read_only(
        self, ctx: Context, view: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        shape, strides = view
        tensor = ctx.arange(0, 10, 1, DType.F32)
        shared = tensor.view(ctx, 1, shape, strides)
        with unchanged(tensor, error=ml.ReadOnlyError):
            ctx.full(shape, 9, DType.F32).copy(ctx, shared)
        with unchanged(tensor, error=ml.ReadOnlyError):
            ctx.full(shape, 9, DType.I32).copy(ctx, shared.permute(ctx, *range(len(shape))))
        with unchanged(tensor, error=ml.ReadOnlyError):
            shared.set_rows(ctx, ctx.full((1, *shape[1:]), 9, DType.F32), [0])

    def test_strides_that_share_nothing_can_be_written(self, ctx: Context) -> None:
        """A stride of 0 on an axis of size 1, and interleaved rows."""
        tensor = ctx.zeros((9,), DType.F32)
        ctx.full((1, 3), 5, DType.F32).copy(ctx, tensor.view(ctx, 1, (1, 3), (0, 1)))
        ctx.full((0, 3), 7, DType.F32).copy(ctx, tensor.view(ctx, 1, (0, 3), (0, 0)))
        assert_same(tensor, [0, 5, 5, 5, 0, 0, 0, 0, 0], DType.F32)
        ctx.from_numpy(counting((2, 3), DType.F32, 1)).copy(ctx, tensor.view(ctx, 0, (2, 3), (3, 2)))
        assert_same(tensor, [1, 5, 2, 4, 3, 5, 0, 6, 0], DType.F32)
