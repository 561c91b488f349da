"""copy and contiguous between every two layouts, and between views that overlap."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Context, Tensor
from ml.testing.harness import BackendCase, assert_same, needs, unchanged
from ml.testing.samples import DTYPES, LAYOUTS, counting

__all__ = ["CopyTests"]

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


def positions(geometry: Geometry) -> np.ndarray:
    """The storage positions of a view, from the definition of strides."""
    offset, shape, strides = geometry
    return offset + sum(
        (index * stride for index, stride in zip(np.indices(shape), strides, strict=True)),
        start=np.zeros(shape, dtype=np.int64),
    )


class CopyTests(BackendCase):
    @pytest.mark.parametrize("destination", LAYOUTS)
    @pytest.mark.parametrize("source", LAYOUTS)
    @pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4)], ids=str)
    def test_copy_writes_what_the_destination_shows_and_nothing_else(
        self, ctx: Context, source: str, destination: str, shape: tuple[int, ...]
    ) -> None:
        for dtype in self.offered((DType.F32, DType.BF16, DType.BOOL)):
            values = counting(shape, dtype, start=7)
            src = LAYOUTS[source](ctx, values)
            dst = LAYOUTS[destination](ctx, counting(shape, DType.I32, start=50))
            before = src.base.to_numpy()
            model = dst.base.to_numpy()
            model[dst.where] = values.astype(np.int32)
            assert src.tensor.copy(ctx, dst.tensor) is dst.tensor
            assert_same(dst.base, model)
            assert_same(dst.tensor, values, DType.I32)
            assert_same(src.base, before)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_contiguous_shows_the_same_in_c_order(self, ctx: Context, layout: str, dtype: DType) -> None:
        values = counting((2, 3, 4), dtype)
        result = LAYOUTS[layout](ctx, values).tensor.contiguous(ctx)
        assert_same(result, values)
        assert result.strides == (12, 4, 1)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1), (1, 4, 1)], ids=str)
    def test_scalars_and_empty_tensors_copy_too(self, ctx: Context, shape: tuple[int, ...]) -> None:
        for target in self.offered((DType.F32, DType.F16, DType.I64)):
            values = counting(shape, DType.F32, start=3)
            dst = ctx.zeros(shape, target)
            ctx.from_numpy(values).copy(ctx, dst)
            assert_same(dst, values, target)

    def test_a_stride_0_source_fills_the_destination(self, ctx: Context) -> None:
        dst = ctx.zeros((2, 3), DType.F32)
        ctx.arange(0, 9, 1, DType.F32).view(ctx, 4, (2, 3), (0, 1)).copy(ctx, dst)
        assert_same(dst, [[4, 5, 6]] * 2, DType.F32)

    @needs(DType.F16)
    def test_a_slice_of_one_row_writes_that_row_as_a_cache_does(self, ctx: Context) -> None:
        """(kv_heads, cells, head_dim): new tokens go to [:, begin:end] from (tokens, kv_heads, head_dim)."""
        cache = ctx.zeros((2, 6, 3), DType.F16)
        tokens = counting((2, 2, 3), DType.F32, start=1)
        ctx.from_numpy(tokens).permute(ctx, 1, 0, 2).copy(ctx, cache.slice(ctx, 1, 3, 5))
        model = np.zeros((2, 6, 3), np.float16)
        model[:, 3:5] = tokens.transpose(1, 0, 2)
        assert_same(cache, model)
        assert_same(cache.slice(ctx, 1, 2, 5).permute(ctx, 1, 0, 2), model[:, 2:5].transpose(1, 0, 2))

    @pytest.mark.parametrize(
        ("source", "destination"),
        [
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
        ],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I8])
    def test_an_overlapping_copy_acts_as_if_the_source_were_read_first(
        self, ctx: Context, source: Geometry, destination: Geometry, dtype: DType
    ) -> None:
        model = counting((40,), dtype, start=1)
        tensor = ctx.from_numpy(model)
        model[positions(destination)] = model[positions(source)]
        tensor.view(ctx, *source).copy(ctx, tensor.view(ctx, *destination))
        assert_same(tensor, model)

    def test_a_long_overlapping_copy_moves_every_element_once(self, ctx: Context) -> None:
        """Longer than any vector width or block that a kernel copies at once."""
        for shift in (1, 3, 1000):
            model = np.arange(100_000, dtype=np.int32)
            tensor = ctx.from_numpy(model)
            for begin, end in ((0, shift), (shift, 0)):
                count = model.size - shift
                model[end : end + count] = model[begin : begin + count].copy()
                tensor.slice(ctx, 0, begin, begin + count).copy(ctx, tensor.slice(ctx, 0, end, end + count))
                assert_same(tensor, model)

    @needs("from_native")
    def test_two_wraps_of_one_native_array_are_tensors_in_their_own_right(self, ctx: Context) -> None:
        native = ctx.arange(0, 8, 1, DType.F32).native
        first, second = ctx.from_native(native), ctx.from_native(native)
        assert_same(first, second.to_numpy())

    def test_a_chain_of_copies_runs_in_program_order(self, ctx: Context) -> None:
        tensor = ctx.arange(0, 8, 1, DType.I32)
        low, high = tensor.slice(ctx, 0, 0, 4), tensor.slice(ctx, 0, 4, 8)
        kept = low.contiguous(ctx)
        high.copy(ctx, low)
        kept.copy(ctx, high)
        assert_same(tensor, [4, 5, 6, 7, 0, 1, 2, 3], DType.I32)

    # Refusals.

    @pytest.mark.parametrize(
        ("source", "destination"),
        [
            ((3,), (4,)),
            ((1,), (4,)),
            ((4,), (2, 2)),
            ((), (1,)),
            ((2, 3), (3, 2)),
            ((3,), (1, 3)),
            ((0,), (0, 1)),
        ],
        ids=str,
    )
    def test_copy_refuses_shapes_that_differ(
        self, ctx: Context, source: tuple[int, ...], destination: tuple[int, ...]
    ) -> None:
        dst = ctx.zeros(destination, DType.F32)
        with unchanged(dst, error=ml.ShapeError):
            ctx.full(source, 1, DType.F32).copy(ctx, dst)

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [((3, 2), (0, 1)), ((2, 2), (0, 0)), ((3, 3), (1, 1)), ((2, 3), (2, 1)), ((2, 2, 2), (3, 2, 1))],
    )
    def test_a_destination_whose_elements_share_memory_is_read_only(
        self, ctx: Context, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        tensor = ctx.arange(0, 10, 1, DType.F32)
        shared = tensor.view(ctx, 1, shape, strides)
        with unchanged(tensor, error=ml.ReadOnlyError):
            ctx.full(shape, 9, DType.F32).copy(ctx, shared)
        with unchanged(tensor, error=ml.ReadOnlyError):
            ctx.full(shape, 9, DType.I32).copy(ctx, shared.permute(ctx, *range(len(shape))))
        with unchanged(tensor, error=ml.ReadOnlyError):
            shared.set_rows(ctx, ctx.full((1, *shape[1:]), 9, DType.F32), [0])

    def test_a_stride_of_0_on_an_axis_of_one_shares_nothing(self, ctx: Context) -> None:
        tensor = ctx.zeros((4,), DType.F32)
        ctx.full((1, 3), 5, DType.F32).copy(ctx, tensor.view(ctx, 1, (1, 3), (0, 1)))
        assert_same(tensor, [0, 5, 5, 5], DType.F32)
        ctx.full((0, 3), 5, DType.F32).copy(ctx, tensor.view(ctx, 1, (0, 3), (0, 0)))
        assert_same(tensor, [0, 5, 5, 5], DType.F32)

    def test_interleaved_strides_that_share_nothing_can_be_written(self, ctx: Context) -> None:
        tensor = ctx.zeros((9,), DType.F32)
        ctx.from_numpy(counting((2, 3), DType.F32, 1)).copy(ctx, tensor.view(ctx, 0, (2, 3), (3, 2)))
        assert_same(tensor, [1, 0, 2, 4, 3, 5, 0, 6, 0], DType.F32)

    def test_copy_refuses_what_is_no_tensor_of_the_backend(self, ctx: Context, foreign: Context) -> None:
        tensor = ctx.zeros((2,), DType.F32)
        other = foreign.full((2,), 1, DType.F32)
        with unchanged(tensor, other):
            other_as_source: Tensor = other
            other_as_source.copy(foreign, tensor)
        with unchanged(tensor, other):
            tensor.copy(ctx, other)
        with unchanged(tensor):
            tensor.copy(ctx, np.zeros(2, np.float32))  # type: ignore[arg-type]
