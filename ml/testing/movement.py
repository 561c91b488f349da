"""view, slice, permute and reshape: what they show, what they alias, what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, refused, unchanged
from ml.testing.samples import DTYPES, counting

__all__ = ["MovementTests"]


def grid(ctx: Context, *shape: int, dtype: DType = DType.I32) -> Tensor:
    return ctx.from_numpy(counting(shape, dtype))


def put(ctx: Context, dst: Tensor, values: Any) -> None:
    """Write host values through a tensor."""
    ctx.from_numpy(np.broadcast_to(np.asarray(values, dst.dtype.numpy), dst.shape)).copy(ctx, dst)


class MovementTests(BackendCase):
    # View.

    @pytest.mark.parametrize(
        ("offset", "shape", "strides", "positions"),
        [
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
        ],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_view_shows_offset_plus_index_times_strides(
        self, ctx: Context, offset: int, shape: Any, strides: Any, positions: Any, dtype: DType
    ) -> None:
        values = counting((24,), dtype)
        tensor = ctx.from_numpy(values)
        shown = tensor.view(ctx, offset, shape, strides)
        assert_same(shown, values[np.asarray(positions)])
        assert shown.nbytes == len(np.ravel(positions)) * dtype.itemsize
        assert_same(
            tensor.reshape(ctx, 4, 6).permute(ctx, 1, 0).view(ctx, offset, shape, strides), shown.to_numpy()
        )

    def test_view_counts_from_the_first_element_shown_and_may_leave_it(self, ctx: Context) -> None:
        whole = grid(ctx, 4, 6)
        inner = whole.slice(ctx, 0, 1, 3).slice(ctx, 1, 2, 4)  # first element at 8
        assert_same(inner.view(ctx, 0, (3,)), [8, 9, 10], DType.I32)
        assert_same(inner.view(ctx, -8, (24,)), np.arange(24), DType.I32)
        assert_same(inner.view(ctx, -3, (2, 2), (6, 1)), [[5, 6], [11, 12]], DType.I32)
        assert_same(inner.view(ctx, 15, (1,)), [23], DType.I32)

    @pytest.mark.parametrize(
        ("offset", "shape", "strides"),
        [(0, (25,), None), (24, (1,), None), (-1, (2,), None), (1, (4, 6), None), (0, (2, 2), (23, 1)),
         (25, (0,), None), (-1, (0,), None), (24, (), None), (10**30, (1,), None), (0, (2,), (10**30,)),
         (0, (2**62, 2**62), None)],
        ids=str,
    )  # fmt: skip
    def test_view_refuses_to_leave_the_storage(
        self, ctx: Context, offset: int, shape: Any, strides: Any
    ) -> None:
        tensor = grid(ctx, 24)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.view(ctx, offset, shape, strides)

    def test_view_of_a_view_is_bound_by_the_storage_not_by_what_is_shown(self, ctx: Context) -> None:
        inner = grid(ctx, 24).slice(ctx, 0, 8, 10)
        assert_same(inner.view(ctx, 0, (16,)), np.arange(8, 24), DType.I32)
        for offset, shape in ((0, (17,)), (-9, (1,)), (16, (1,))):
            with pytest.raises(ml.BoundsError):
                inner.view(ctx, offset, shape)

    @pytest.mark.parametrize(
        ("offset", "shape", "strides"),
        [(0, (-1,), None), (0, (2, -3), None), (4, (2,), (-1,)), (0, (2, 2), (1,)), (0, (2,), (1, 1)),
         (0, (), (1,))],
        ids=str,
    )  # fmt: skip
    def test_view_refuses_bad_shapes_and_strides(
        self, ctx: Context, offset: Any, shape: Any, strides: Any
    ) -> None:
        tensor = grid(ctx, 24)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.view(ctx, offset, shape, strides)

    # Slice.

    @pytest.mark.parametrize(
        ("axis", "start", "stop", "step"),
        [(0, 0, 4, 1), (0, 1, 3, 1), (1, 0, 5, 2), (1, 1, 5, 2), (1, 1, 4, 3), (-1, 0, 3, 1), (-2, 2, 5, 7),
         (-3, 3, 4, 1), (2, 0, 3, 3), (0, 2, 2, 1), (0, 4, 4, 1), (1, 5, 5, 3), (1, 0, 0, 1), (0, 0, 4, 100)],
    )  # fmt: skip
    def test_slice_is_numpys_without_wrapping(
        self, ctx: Context, axis: int, start: int, stop: int, step: int
    ) -> None:
        values = np.arange(60, dtype=np.int32).reshape(4, 5, 3)
        index: list[Any] = [slice(None)] * 3
        index[axis] = slice(start, stop, step)
        tensor = ctx.from_numpy(values)
        assert_same(tensor.slice(ctx, axis, start, stop, step), values[tuple(index)])
        if step == 1:
            assert_same(tensor.slice(ctx, axis, start, stop), values[tuple(index)])
        turned = tensor.permute(ctx, 2, 0, 1)
        index = [slice(None)] * 3
        index[axis] = slice(start, min(stop, turned.shape[axis]), step)
        if start <= turned.shape[axis]:
            shown = turned.slice(ctx, axis, start, min(stop, turned.shape[axis]), step)
            assert_same(shown, values.transpose(2, 0, 1)[tuple(index)])

    def test_slices_of_slices_add_up(self, ctx: Context) -> None:
        tensor = grid(ctx, 40)
        shown = tensor.slice(ctx, 0, 3, 40, 2).slice(ctx, 0, 1, 17, 3)
        assert_same(shown, np.arange(40)[3:40:2][1:17:3], DType.I32)
        assert_same(shown.slice(ctx, 0, 2, 4), np.arange(40)[3:40:2][1:17:3][2:4], DType.I32)

    def test_the_empty_and_the_end_can_be_sliced_on_every_axis(self, ctx: Context) -> None:
        for shape in ((0, 5), (5, 0), (0, 0), (2, 0, 4)):
            tensor = ctx.zeros(shape, DType.F32)
            for axis, size in enumerate(shape):
                for start in {0, size // 2, size}:
                    shown = tensor.slice(ctx, axis, start, size)
                    expected = (*shape[:axis], size - start, *shape[axis + 1 :])
                    assert_same(shown, np.zeros(expected), DType.F32)
                    assert_same(
                        shown.slice(ctx, axis, 0, 0).contiguous(ctx), shown.slice(ctx, axis, 0, 0).to_numpy()
                    )
        end = grid(ctx, 4).view(ctx, 4, (0, 5)).slice(ctx, 1, 2, 4)
        assert_same(end, np.zeros((0, 2)), DType.I32)
        assert_same(end.view(ctx, 0, (0,)), np.zeros(0), DType.I32)

    def test_sizes_and_positions_may_be_numpy_integers(self, ctx: Context) -> None:
        tensor = grid(ctx, 4, 6)
        one, three = np.int64(1), np.uint8(3)
        for shown in (
            tensor.slice(ctx, 0, one, three, one),  # type: ignore[arg-type]
            tensor.view(ctx, one, (three, one), (one, one)),  # type: ignore[arg-type]
            tensor.reshape(ctx, three, -one),  # type: ignore[arg-type]
            ctx.zeros((one, three), DType.F32),  # type: ignore[arg-type]
        ):
            assert all(type(size) is int for size in shown.shape)
            assert all(type(stride) is int for stride in shown.strides)
        assert_same(tensor.slice(ctx, 0, one, three), np.arange(6, 18).reshape(2, 6), DType.I32)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("axis", "start", "stop", "step", "error"),
        [(0, -1, 2, 1, ml.BoundsError), (0, 0, 5, 1, ml.BoundsError), (0, 3, 2, 1, ml.BoundsError),
         (0, 5, 5, 1, ml.BoundsError), (0, -3, -1, 1, ml.BoundsError), (0, 0, 4, 0, ml.ShapeError),
         (0, 0, 4, -1, ml.ShapeError), (2, 0, 1, 1, ml.ShapeError), (-3, 0, 1, 1, ml.ShapeError)],
    )  # fmt: skip
    def test_slice_refuses_what_wraps_or_leaves_the_axis(
        self, ctx: Context, axis: Any, start: Any, stop: Any, step: Any, error: type[Exception]
    ) -> None:
        tensor = grid(ctx, 4, 6)
        with unchanged(tensor, error=error):
            tensor.slice(ctx, axis, start, stop, step)

    def test_slice_refuses_a_tensor_without_axes(self, ctx: Context) -> None:
        for axis in (0, -1):
            with unchanged(error=ml.ShapeError):
                ctx.zeros((), DType.F32).slice(ctx, axis, 0, 1)

    # Permute.

    @pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (-1, 0, -2), ()])
    def test_permute_is_numpy_transpose(self, ctx: Context, axes: tuple[int, ...]) -> None:
        values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        expected = values.transpose(*axes) if axes else values.T
        shown = ctx.from_numpy(values).permute(ctx, *axes)
        assert_same(shown, expected)
        assert shown.strides == tuple(stride // 4 for stride in expected.strides)

    def test_permute_undone_is_the_tensor_again(self, ctx: Context) -> None:
        values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        tensor = ctx.from_numpy(values)
        assert_same(tensor.permute(ctx, 1, 2, 0).permute(ctx, 2, 0, 1), values)
        assert_same(ctx.zeros((), DType.F32).permute(ctx), np.zeros(()), DType.F32)
        assert_same(ctx.zeros((0, 3), DType.F32).permute(ctx, 1, 0), np.zeros((3, 0)), DType.F32)

    @pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, 1, 2), (0, -3), (0, -2)])
    def test_permute_refuses_what_is_no_permutation(self, ctx: Context, axes: Any) -> None:
        tensor = grid(ctx, 4, 6)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.permute(ctx, *axes)

    # Reshape.

    @pytest.mark.parametrize(
        ("shape", "target"),
        [((24,), (2, 3, 4)), ((2, 3, 4), (24,)), ((2, 3, 4), (6, 4)), ((2, 3, 4), (4, 6)), ((2, 3, 4), (-1,)),
         ((2, 3, 4), (3, -1)), ((1,), ()), ((), (1, 1)), ((0, 3), (3, 0)), ((0, 3), (0,)), ((0, 3), (-1, 3)),
         ((2, 1, 3), (2, 3)), ((6,), (1, 6, 1)), ((), (-1,)), ((), ())],
    )  # fmt: skip
    def test_reshape_keeps_the_elements_in_order(
        self, ctx: Context, shape: tuple[int, ...], target: tuple[int, ...]
    ) -> None:
        values = counting(shape, DType.I32)
        assert_same(ctx.from_numpy(values).reshape(ctx, *target), values.reshape(target))

    def test_reshape_aliases_where_strides_can_say_it(self, ctx: Context) -> None:
        """The axes it merges or splits are contiguous among themselves, the rest may be anything."""
        values = np.arange(120, dtype=np.int32).reshape(4, 5, 6)
        tensor = ctx.from_numpy(values)
        cases: list[tuple[Tensor, np.ndarray, tuple[int, ...]]] = [
            (tensor.slice(ctx, 0, 1, 3), values[1:3], (2, 30)),
            (tensor.slice(ctx, 0, 1, 3), values[1:3], (60,)),
            (tensor.slice(ctx, 1, 1, 3), values[:, 1:3], (4, 12)),
            (tensor.slice(ctx, 2, 0, 6, 2), values[:, :, ::2], (20, 3)),
            (tensor.permute(ctx, 2, 0, 1), values.transpose(2, 0, 1), (6, 20)),
            (tensor.permute(ctx, 2, 0, 1), values.transpose(2, 0, 1), (3, 2, 2, 2, 1, 5)),
            (tensor.view(ctx, 7, (3, 4), (0, 0)), np.full((3, 4), 7, np.int32), (12,)),
        ]
        for shown, model, target in cases:
            reshaped = shown.reshape(ctx, *target)
            assert_same(reshaped, model.reshape(target))
            if 0 not in reshaped.strides:
                put(ctx, reshaped, -reshaped.to_numpy())
                assert_same(shown, -model)
                put(ctx, shown, model)

    def test_reshape_refuses_what_needs_a_copy(self, ctx: Context) -> None:
        tensor = grid(ctx, 4, 5, 6)
        for shown, target in (
            (tensor.permute(ctx, 2, 1, 0), (120,)),
            (tensor.slice(ctx, 1, 0, 4), (16, 6)),
            (tensor.slice(ctx, 2, 0, 5), (100,)),
            (tensor.permute(ctx, 1, 0, 2), (20, 6)),
            (tensor.view(ctx, 0, (3, 4), (0, 1)), (12,)),
        ):
            with unchanged(tensor, error=ml.ShapeError):
                shown.reshape(ctx, *target)
            assert_same(shown.contiguous(ctx).reshape(ctx, *target), shown.to_numpy().reshape(target))

    @pytest.mark.parametrize("target", [(23,), (5, -1), (-1, -1), (-2, 12), (0, -1), (), (24, 0)])
    def test_reshape_refuses_another_number_of_elements(self, ctx: Context, target: Any) -> None:
        tensor = grid(ctx, 24)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.reshape(ctx, *target)

    def test_numbers_that_are_no_integers_are_refused(self, ctx: Context) -> None:
        tensor: Any = grid(ctx, 4, 6)
        refused(
            lambda: tensor.view(ctx, 0, (2.0,)),
            lambda: tensor.view(ctx, 0, (2,), (1.5,)),
            lambda: tensor.view(ctx, 0.5, (2,)),
            lambda: tensor.view(ctx, None, (2,)),
            lambda: tensor.slice(ctx, 0, 0.0, 2.0),
            lambda: tensor.slice(ctx, 0, 0, 2, 1.5),
            lambda: tensor.slice(ctx, 0, None, None),
            lambda: tensor.slice(ctx, 0.0, 0, 1),
            lambda: tensor.permute(ctx, 0.0, 1),
            lambda: tensor.reshape(ctx, 2.0, 12),
            keep=(tensor,),
        )

    # Aliasing.

    def test_a_write_through_one_view_is_seen_by_all_others(self, ctx: Context) -> None:
        whole = grid(ctx, 4, 6)
        model = whole.to_numpy()
        views = {
            "rows": (whole.slice(ctx, 0, 1, 3), model[1:3]),
            "column": (whole.slice(ctx, 1, 2, 3), model[:, 2:3]),
            "every second": (whole.slice(ctx, 1, 1, 6, 2), model[:, 1::2]),
            "turned": (whole.permute(ctx, 1, 0), model.T),
            "flat": (whole.reshape(ctx, 24), model.reshape(-1)),
            "split": (whole.reshape(ctx, 2, 2, 6), model.reshape(2, 2, 6)),
            "beyond": (whole.slice(ctx, 0, 3, 4).view(ctx, -5, (8,)), model.reshape(-1)[13:21]),
            "scalar": (whole.view(ctx, 9, ()), model.reshape(-1)[9:10].reshape(())),
        }
        for number, (writer, host) in enumerate(views.values()):
            put(ctx, writer, 1000 * (number + 1))
            host[...] = 1000 * (number + 1)
            for name, (reader, expected) in views.items():
                np.testing.assert_array_equal(reader.to_numpy(), expected, err_msg=name)
            assert_same(whole, model)

    def test_windows_that_overlap_see_each_others_writes(self, ctx: Context) -> None:
        tensor = ctx.zeros((10,), DType.F32)
        left, right = tensor.slice(ctx, 0, 0, 6), tensor.slice(ctx, 0, 4, 10)
        put(ctx, left, 1)
        put(ctx, right, 2)
        assert_same(left, [1, 1, 1, 1, 2, 2], DType.F32)
        put(ctx, left, 3)
        assert_same(right, [3, 3, 2, 2, 2, 2], DType.F32)

    def test_a_stride_0_view_follows_writes_to_what_it_repeats(self, ctx: Context) -> None:
        tensor = ctx.zeros((4,), DType.F32)
        repeated = tensor.view(ctx, 1, (3, 2), (0, 1))
        put(ctx, tensor, [5, 6, 7, 8])
        assert_same(repeated, [[6, 7]] * 3, DType.F32)

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
        source = grid(ctx, 2, 3)
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
        source = grid(ctx, 4, 6).permute(ctx, 1, 0).slice(ctx, 0, 1, 5, 2)
        for result in (source.contiguous(ctx), source.cast(ctx, DType.F32), source.rows(ctx, [1, 0])):
            assert result.strides == (4, 1)
            with pytest.raises(ml.BoundsError):
                result.view(ctx, 0, (9,))
            with pytest.raises(ml.BoundsError):
                result.view(ctx, -1, (1,))
