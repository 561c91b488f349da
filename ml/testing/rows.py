"""rows, set_rows, concat and repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Context, Indices, Tensor
from ml.testing.harness import BackendCase, assert_same, refused, unchanged
from ml.testing.samples import DTYPES, LAYOUTS, counting

__all__ = ["RowTests"]

INDEX_KINDS = [
    "list",
    "tuple",
    "range",
    "int64 array",
    "int32 array",
    "uint8 array",
    "tensor",
    "strided tensor",
]


def indices_of(ctx: Context, kind: str, values: list[int]) -> Any:
    match kind:
        case "list":
            return values
        case "tuple":
            return tuple(values)
        case "range":
            return range(values[0], values[-1] + 1) if values else range(0)
        case "tensor":
            return ctx.from_numpy(np.array(values, dtype=np.int32))
        case "strided tensor":
            spread = np.full((2 * len(values) + 1,), 10**6, dtype=np.int32)
            spread[1::2] = values
            return ctx.from_numpy(spread).slice(ctx, 0, 1, spread.size, 2)
        case _:
            return np.array(values, dtype=kind.split()[0])


class RowTests(BackendCase):
    # Reading.

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
    def test_rows_gathers_along_any_axis(self, ctx: Context, kind: str, axis: int) -> None:
        values = counting((4, 3, 5), DType.F32)
        wanted = [0, 1, 2] if kind == "range" else [2, 0, 0, 1, 2]
        rows = indices_of(ctx, kind, wanted)
        assert_same(ctx.from_numpy(values).rows(ctx, rows, axis), np.take(values, wanted, axis))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_keeps_the_dtype(self, ctx: Context, dtype: DType) -> None:
        values = counting((6, 2), dtype)
        assert_same(ctx.from_numpy(values).rows(ctx, [5, 1]), values[[5, 1]])
        assert_same(ctx.from_numpy(values).rows(ctx, indices_of(ctx, "tensor", [5, 1])), values[[5, 1]])

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("axis", [0, 1])
    def test_rows_reads_strided_sources(self, ctx: Context, layout: str, axis: int) -> None:
        values = counting((4, 5, 2), DType.F32)
        shown = LAYOUTS[layout](ctx, values).tensor
        for kind in ("list", "tensor"):
            result = shown.rows(ctx, indices_of(ctx, kind, [3, 1]), axis)
            assert_same(result, np.take(values, [3, 1], axis))
            assert result.strides == tuple(
                stride // 4 for stride in np.empty(result.shape, np.float32).strides
            )

    def test_rows_of_none_is_empty(self, ctx: Context) -> None:
        tensor = ctx.zeros((4, 3), DType.F32)
        nothing: tuple[Indices, ...] = ([], (), np.zeros(0, np.int64), ctx.zeros((0,), DType.I32))
        for none in nothing:
            assert tensor.rows(ctx, none).shape == (0, 3)
            assert tensor.rows(ctx, none, 1).shape == (4, 0)
        assert ctx.zeros((0, 3), DType.F32).rows(ctx, []).shape == (0, 3)
        assert ctx.zeros((4, 0), DType.F32).rows(ctx, [2, 2, 1]).shape == (3, 0)

    def test_rows_of_a_vector_are_its_elements(self, ctx: Context) -> None:
        assert_same(ctx.arange(0, 9, 1, DType.I64).rows(ctx, [8, 0, 8]), [8, 0, 8], DType.I64)

    # Writing.

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
    def test_set_rows_scatters_along_any_axis(self, ctx: Context, kind: str, axis: int) -> None:
        model = counting((4, 3, 5), DType.F32)
        tensor = ctx.from_numpy(model)
        wanted = [1, 2] if kind == "range" else [2, 0]
        shape = list(model.shape)
        shape[axis] = 2
        source = -counting(tuple(shape), DType.F32, start=1)
        assert tensor.set_rows(ctx, ctx.from_numpy(source), indices_of(ctx, kind, wanted), axis) is tensor
        np.moveaxis(model, axis, 0)[wanted] = np.moveaxis(source, axis, 0)
        assert_same(tensor, model)

    @pytest.mark.parametrize("destination", LAYOUTS)
    @pytest.mark.parametrize("source", LAYOUTS)
    def test_set_rows_between_layouts_writes_those_rows_and_nothing_else(
        self, ctx: Context, source: str, destination: str
    ) -> None:
        for axis, dtype in enumerate(self.offered((DType.F32, DType.F16, DType.BF16))):
            shape = [4, 5, 4]
            dst = LAYOUTS[destination](ctx, counting((4, 5, 4), dtype, start=9))
            shape[axis] = 3
            src = LAYOUTS[source](ctx, counting(tuple(shape), DType.F32, start=60))
            model = dst.base.to_numpy()
            where = np.moveaxis(dst.where, axis, 0)[[3, 0, 2]]
            model[where] = np.moveaxis(src.tensor.to_numpy(), axis, 0).astype(dtype.numpy)
            for kind in ("list", "tensor"):
                dst.tensor.set_rows(ctx, src.tensor, indices_of(ctx, kind, [3, 0, 2]), axis)
                assert_same(dst.base, model)

    @pytest.mark.parametrize("kind", ["list", "tensor"])
    @pytest.mark.parametrize(
        ("begin", "step", "rows"),
        [(0, 1, [2, 3, 4]), (2, 1, [0, 1, 2]), (1, 1, [3, 1, 2]), (0, 2, [1, 2, 3]), (0, 1, [2, 1, 0]),
         (3, 1, [0, 5, 4])],
    )  # fmt: skip
    def test_set_rows_from_its_own_rows_reads_them_first(
        self, ctx: Context, kind: str, begin: int, step: int, rows: list[int]
    ) -> None:
        model = counting((6, 4), DType.F32)
        tensor = ctx.from_numpy(model)
        picked = slice(begin, begin + 3 * step - step + 1, step)
        model[rows] = model[picked].copy()
        source = tensor.slice(ctx, 0, picked.start, picked.stop, step)
        tensor.set_rows(ctx, source, indices_of(ctx, kind, rows))
        assert_same(tensor, model)

    def test_set_rows_from_its_own_transpose_reads_it_first(self, ctx: Context) -> None:
        model = counting((4, 4), DType.F32)
        tensor = ctx.from_numpy(model)
        tensor.set_rows(ctx, tensor.permute(ctx, 1, 0), [3, 1, 0, 2])
        model[[3, 1, 0, 2]] = model.T.copy()
        assert_same(tensor, model)

    def test_set_rows_reads_indices_that_lie_in_its_own_storage_first(self, ctx: Context) -> None:
        tensor = ctx.from_numpy(np.array([2, 0, 1, 9], dtype=np.int32))
        picked = tensor.slice(ctx, 0, 0, 3)
        picked.set_rows(ctx, ctx.from_numpy(np.array([70, 80, 90], dtype=np.int32)), picked)
        assert_same(tensor, [80, 90, 70, 9], DType.I32)

    def test_set_rows_is_seen_through_every_view(self, ctx: Context) -> None:
        tensor = ctx.zeros((4, 3), DType.F32)
        turned, row = tensor.permute(ctx, 1, 0), tensor.slice(ctx, 0, 2, 3)
        turned.set_rows(ctx, ctx.full((3, 1), 7, DType.F32), [2], 1)
        assert_same(row, [[7, 7, 7]], DType.F32)
        tensor.slice(ctx, 0, 1, 4).set_rows(
            ctx, ctx.full((1, 3), 5, DType.F32), indices_of(ctx, "tensor", [1])
        )
        assert_same(row, [[5, 5, 5]], DType.F32)

    def test_set_rows_of_none_writes_nothing(self, ctx: Context) -> None:
        tensor = ctx.full((4, 3), 2, DType.F32)
        nothing: tuple[Indices, ...] = ([], ctx.zeros((0,), DType.I32))
        for none in nothing:
            tensor.set_rows(ctx, ctx.zeros((0, 3), DType.F32), none)
            tensor.set_rows(ctx, ctx.zeros((4, 0), DType.F32), none, 1)
        assert_same(tensor, np.full((4, 3), 2), DType.F32)

    # Refusals.

    @pytest.mark.parametrize("rows", [[4], [-1], [0, 7], np.array([-4]), [10**12], [2**40, 0]], ids=str)
    def test_a_host_index_outside_the_axis_is_refused_by_both(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 9), DType.F32))
        with unchanged(tensor, error=ml.BoundsError):
            tensor.rows(ctx, rows)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.set_rows(ctx, ctx.zeros((len(rows), 9), DType.F32), rows)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.permute(ctx, 1, 0).set_rows(ctx, ctx.zeros((9, len(rows)), DType.F32), rows, 1)

    @pytest.mark.parametrize("rows", [[1, 1], [0, 2, 0], np.array([3, 3], np.int32)], ids=str)
    def test_a_row_written_twice_is_refused(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor):
            tensor.set_rows(ctx, ctx.zeros((len(rows), 3), DType.F32), rows)

    @pytest.mark.parametrize(
        "rows", [[0.5], [[0], [1]], ["a"], [True, False], 1, None, [[0], [1, 2]]], ids=str
    )
    def test_indices_that_are_no_list_of_integers_are_refused(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor):
            tensor.rows(ctx, rows)
        with unchanged(tensor):
            tensor.set_rows(ctx, ctx.zeros((2, 3), DType.F32), rows)

    def test_an_index_tensor_is_i32_with_one_axis(self, ctx: Context) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        wrong = [ctx.zeros((2,), DType.I64), ctx.zeros((2,), DType.F32), ctx.zeros((1, 2), DType.I32),
                 ctx.zeros((), DType.I32)]  # fmt: skip
        for rows in wrong:
            with unchanged(tensor):
                tensor.rows(ctx, rows)
            with unchanged(tensor):
                tensor.set_rows(ctx, ctx.zeros((2, 3), DType.F32), rows)

    @pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2,), (2, 3, 1), (1, 3), (0, 3)], ids=str)
    def test_set_rows_refuses_a_source_of_another_shape(self, ctx: Context, shape: tuple[int, ...]) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        for kind in ("list", "tensor"):
            with unchanged(tensor, error=ml.ShapeError):
                tensor.set_rows(ctx, ctx.zeros(shape, DType.F32), indices_of(ctx, kind, [0, 2]))

    @pytest.mark.parametrize("axis", [2, -3])
    def test_rows_concat_and_repeat_refuse_an_axis_that_is_not_there(self, ctx: Context, axis: int) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor, error=ml.ShapeError):
            tensor.rows(ctx, [0], axis)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.set_rows(ctx, ctx.zeros((1, 3), DType.F32), [0], axis)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.concat(ctx, tensor, axis)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.repeat(ctx, axis, 2)

    def test_a_scalar_has_no_rows(self, ctx: Context) -> None:
        scalar = ctx.zeros((), DType.F32)
        refused(
            lambda: scalar.rows(ctx, [0]),
            lambda: scalar.set_rows(ctx, scalar, [0]),
            lambda: scalar.concat(ctx, scalar, 0),
            lambda: scalar.repeat(ctx, 0, 2),
            error=ml.ShapeError,
            keep=(scalar,),
        )

    # Concat and repeat.

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_concat_is_numpy_concatenate(self, ctx: Context, axis: int, dtype: DType) -> None:
        shapes = {0: ((2, 3), (1, 3)), 1: ((2, 3), (2, 4)), -1: ((2, 0), (2, 3))}[axis]
        first, second = counting(shapes[0], dtype), counting(shapes[1], dtype, start=30)
        result = ctx.from_numpy(first).concat(ctx, ctx.from_numpy(second), axis)
        assert_same(result, np.concatenate((first, second), axis))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_concat_and_repeat_read_strided_operands(self, ctx: Context, layout: str) -> None:
        values = counting((2, 3, 4), DType.F32)
        shown = LAYOUTS[layout](ctx, values).tensor
        assert_same(shown.concat(ctx, shown, 1), np.concatenate((values, values), 1))
        for axis in (0, 1, 2):
            reps = [1, 1, 1]
            reps[axis] = 3
            assert_same(shown.repeat(ctx, axis, 3), np.tile(values, reps))

    def test_concat_refuses_operands_that_do_not_fit(self, ctx: Context) -> None:
        tensor = ctx.zeros((2, 3), DType.F32)
        for shape, axis in (((2, 4), 0), ((3, 3), 1), ((2, 3, 1), 0), ((6,), 0)):
            with unchanged(tensor, error=ml.ShapeError):
                tensor.concat(ctx, ctx.zeros(shape, DType.F32), axis)
        with unchanged(tensor, error=ml.DTypeError):
            tensor.concat(ctx, ctx.zeros((2, 3), DType.I32), 0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_repeat_tiles_the_axis(self, ctx: Context, dtype: DType) -> None:
        """0, 1, 2, 0, 1, 2: numpy.tile, not numpy.repeat."""
        values = counting((2, 3), dtype)
        tensor: Tensor = ctx.from_numpy(values)
        for n in (0, 1, 2, 5):
            assert_same(tensor.repeat(ctx, -1, n), np.tile(values, (1, n)))
            assert_same(tensor.repeat(ctx, 0, n), np.tile(values, (n, 1)))
        assert_same(ctx.zeros((0, 2), dtype).repeat(ctx, 0, 3), np.zeros((0, 2)), dtype)

    def test_repeat_refuses_a_count_below_zero(self, ctx: Context) -> None:
        tensor = ctx.zeros((2, 3), DType.F32)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.repeat(ctx, 0, -1)
        with unchanged(tensor):
            tensor.repeat(ctx, 0, 1.5)  # type: ignore[arg-type]
