"""rows, set_rows, concat and repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ml
from ml.dtypes import DType
from ml.protocols import Context, Indices
from ml.testing.harness import BackendCase, assert_same, each, evaluate, unchanged
from ml.testing.samples import DTYPES, LAYOUTS, Place, counting, special_values


def _strided(ctx: Context, rows: list[int]) -> Indices:
    spread = np.full((2 * len(rows) + 1,), 10**6, dtype=np.int32)
    spread[1::2] = rows
    return ctx.from_numpy(spread).slice(ctx, 0, 1, spread.size, 2)


MakeIndices = Callable[[Context, list[int]], Indices]
KINDS: dict[str, MakeIndices] = {
    "list": lambda ctx, rows: rows,
    "tensor": lambda ctx, rows: ctx.from_numpy(np.array(rows, np.int32)),
    "tuple": lambda ctx, rows: tuple(rows),
    "int64 array": lambda ctx, rows: np.array(rows, np.int64),
    "int32 array": lambda ctx, rows: np.array(rows, np.int32),
    "uint8 array": lambda ctx, rows: np.array(rows, np.uint8),
    "strided tensor": _strided,
}
"""Ways to pass the indices of rows."""
HOST_AND_TENSOR = {kind: KINDS[kind] for kind in ("list", "tensor")}
AXES = (0, 1, 2, -1, -2)
OWN_ROWS = [
    (0, 1, [2, 3, 4]), (2, 1, [0, 1, 2]), (1, 1, [3, 1, 2]), (0, 2, [1, 2, 3]), (0, 1, [2, 1, 0]),
    (3, 1, [0, 5, 4]),
]  # fmt: skip
OUTSIDE: dict[str, Any] = {"one beyond": [4], "before": [-1], "one of two": [0, 7],
    "of an array": np.array([-4]),
                           "huge": [10**12], "beyond 32 bits": [2**40, 0]}  # fmt: skip
NO_INDICES: dict[str, Any] = {"a fraction": [0.5], "two axes": [[0], [1]], "text": ["a"],
    "truth": [True, False],
                              "a number": 1, "None": None, "ragged": [[0], [1, 2]]}  # fmt: skip


MOVES = (
    "a.rows(ctx, every)", "a.rows(ctx, ctx.from_numpy(every))",
    "ctx.zeros(a.shape, D).set_rows(ctx, a, every)", "ctx.full((), True, BOOL).where(ctx, a, a)",
    "a.concat(ctx, a, 0).rows(ctx, every)", "a.repeat(ctx, 0, 2).rows(ctx, every)",
)  # fmt: skip
"""Operations that only move elements."""


class RowTests(BackendCase):
    @each(call=MOVES, dtype=DTYPES)
    def test_what_only_moves_elements_keeps_every_bit(self, ctx: Context, call: str, dtype: DType) -> None:
        """Also with hundreds of rows."""
        special = special_values(dtype)
        values = np.resize(special, max(400, len(special)))
        every = np.arange(len(values), dtype=np.int32)
        assert_same(evaluate(call, ctx=ctx, a=ctx.from_numpy(values), every=every, D=dtype), values)

    # Reading.

    @each(axis=AXES, kind=KINDS)
    def test_rows_gathers_along_any_axis(self, ctx: Context, kind: MakeIndices, axis: int) -> None:
        values = counting((4, 3, 5), DType.F32)
        for wanted in ([2, 0, 0, 1, 2], []):
            result = ctx.from_numpy(values).rows(ctx, kind(ctx, wanted), axis)
            assert_same(result, np.take(values, np.array(wanted, int), axis))
        assert_same(ctx.from_numpy(values).rows(ctx, range(3), axis), np.take(values, range(3), axis))

    @each(layout=LAYOUTS, axis=(0, 1), kind=HOST_AND_TENSOR, dtype=DTYPES)
    def test_rows_reads_views_of_any_dtype(
        self, ctx: Context, layout: Place, axis: int, kind: MakeIndices, dtype: DType
    ) -> None:
        values = counting((4, 5, 2), dtype)
        result = layout(ctx, values).tensor.rows(ctx, kind(ctx, [3, 1]), axis)
        assert_same(result, np.take(values, [3, 1], axis))
        assert result.strides == np.empty(result.shape, np.int8).strides

    def test_rows_of_vectors_and_of_the_empty(self, ctx: Context) -> None:
        assert_same(ctx.arange(0, 9, 1, DType.I64).rows(ctx, [8, 0, 8]), [8, 0, 8], DType.I64)
        assert ctx.zeros((0, 3), DType.F32).rows(ctx, []).shape == (0, 3)
        assert ctx.zeros((4, 0), DType.F32).rows(ctx, [2, 2, 1]).shape == (3, 0)

    # Writing.

    @each(axis=AXES, kind=KINDS)
    def test_set_rows_scatters_along_any_axis(self, ctx: Context, kind: MakeIndices, axis: int) -> None:
        model = counting((4, 3, 5), DType.F32)
        tensor = ctx.from_numpy(model)
        shown = tensor.permute(ctx, 2, 0, 1).permute(ctx, 1, 2, 0)
        for wanted in ([2, 0], []):
            shape = list(model.shape)
            shape[axis] = len(wanted)
            source = -counting(tuple(shape), DType.F32, start=1)
            assert shown.set_rows(ctx, ctx.from_numpy(source), kind(ctx, wanted), axis) is shown
            np.moveaxis(model, axis, 0)[wanted] = np.moveaxis(source, axis, 0)
            assert_same(tensor, model)

    @each(source=LAYOUTS, destination=LAYOUTS, into=(DType.F32, DType.F16, DType.BF16))
    def test_set_rows_between_layouts_writes_those_rows_and_nothing_else(
        self, ctx: Context, source: Place, destination: Place, into: DType
    ) -> None:
        shape, axis = [4, 5, 4], (DType.F32, DType.F16, DType.BF16).index(into)
        dst = destination(ctx, counting((4, 5, 4), into, start=9))
        shape[axis] = 3
        src = source(ctx, counting(tuple(shape), DType.F32, start=60))
        model = dst.base.to_numpy()
        where = np.moveaxis(dst.where, axis, 0)[[3, 0, 2]]
        model[where] = np.moveaxis(src.tensor.to_numpy(), axis, 0).astype(into.numpy)
        for kind in HOST_AND_TENSOR.values():
            dst.tensor.set_rows(ctx, src.tensor, kind(ctx, [3, 0, 2]), axis)
            assert_same(dst.base, model)

    @each(rows=OWN_ROWS, kind=HOST_AND_TENSOR)
    def test_set_rows_from_its_own_rows_reads_them_first(
        self, ctx: Context, kind: MakeIndices, rows: tuple[int, int, list[int]]
    ) -> None:
        begin, step, into = rows
        model = counting((6, 4), DType.F32)
        tensor = ctx.from_numpy(model)
        end = begin + 2 * step + 1
        model[into] = model[begin:end:step].copy()
        tensor.set_rows(ctx, tensor.slice(ctx, 0, begin, end, step), kind(ctx, into))
        assert_same(tensor, model)

    def test_set_rows_reads_its_own_transpose_and_indices_in_its_own_storage_first(
        self, ctx: Context
    ) -> None:
        model = counting((4, 4), DType.F32)
        tensor = ctx.from_numpy(model)
        tensor.set_rows(ctx, tensor.permute(ctx, 1, 0), [3, 1, 0, 2])
        model[[3, 1, 0, 2]] = model.T.copy()
        assert_same(tensor, model)
        empty = tensor.slice(ctx, 1, 2, 2)
        assert empty.set_rows(ctx, empty, [3, 1, 0, 2]) is empty
        whole = ctx.from_numpy(np.array([2, 0, 1, 9], dtype=np.int32))
        picked = whole.slice(ctx, 0, 0, 3)
        picked.set_rows(ctx, ctx.from_numpy(np.array([70, 80, 90], dtype=np.int32)), picked)
        assert_same(whole, [80, 90, 70, 9], DType.I32)
        itself = ctx.from_numpy(np.array([2, 0, 1], dtype=np.int32))
        itself.set_rows(ctx, ctx.from_numpy(np.array([70, 80, 90], dtype=np.int32)), itself)
        assert_same(itself, [80, 90, 70], DType.I32)

    # Refusals.

    @each(rows=OUTSIDE)
    def test_a_host_index_outside_the_axis_is_refused_by_both(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 9), DType.F32))
        with unchanged(tensor, error=ml.BoundsError):
            tensor.rows(ctx, rows)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.set_rows(ctx, ctx.zeros((len(rows), 9), DType.F32), rows)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.permute(ctx, 1, 0).set_rows(ctx, ctx.zeros((9, len(rows)), DType.F32), rows, 1)

    @each(rows={"twice": [1, 1], "apart": [0, 2, 0], "an array": np.array([3, 3], np.int32)})
    def test_a_row_written_twice_is_refused(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor):
            tensor.set_rows(ctx, ctx.zeros((len(rows), 3), DType.F32), rows)

    @each(rows=NO_INDICES)
    def test_indices_that_are_no_list_of_integers_are_refused(self, ctx: Context, rows: Any) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor):
            tensor.rows(ctx, rows)
        with unchanged(tensor):
            tensor.set_rows(ctx, ctx.zeros((2, 3), DType.F32), rows)

    @each(shape=[(2, 4), (3, 3), (2,), (2, 3, 1), (1, 3), (0, 3)], kind=HOST_AND_TENSOR)
    def test_set_rows_refuses_a_source_of_another_shape(
        self, ctx: Context, shape: tuple[int, ...], kind: MakeIndices
    ) -> None:
        tensor = ctx.from_numpy(counting((4, 3), DType.F32))
        with unchanged(tensor, error=ml.ShapeError):
            tensor.set_rows(ctx, ctx.zeros(shape, DType.F32), kind(ctx, [0, 2]))

    # Concat and repeat.

    @each(shapes=[(0, (2, 3), (1, 3)), (1, (2, 3), (2, 4)), (-1, (2, 0), (2, 3))], dtype=DTYPES)
    def test_concat_is_numpy_concatenate(self, ctx: Context, shapes: Any, dtype: DType) -> None:
        axis, *sizes = shapes
        first, second = counting(sizes[0], dtype), counting(sizes[1], dtype, start=30)
        result = ctx.from_numpy(first).concat(ctx, ctx.from_numpy(second), axis)
        assert_same(result, np.concatenate((first, second), axis))

    @each(layout=LAYOUTS, axis=(0, 1, 2))
    def test_concat_and_repeat_read_strided_operands(self, ctx: Context, layout: Place, axis: int) -> None:
        values = counting((2, 3, 4), DType.F32)
        shown = layout(ctx, values).tensor
        assert_same(shown.concat(ctx, shown, axis), np.concatenate((values, values), axis))
        assert_same(shown.repeat(ctx, axis, 3), np.concatenate([values] * 3, axis))

    @each(dtype=DTYPES, n=(0, 1, 2, 5))
    def test_repeat_tiles_the_axis(self, ctx: Context, dtype: DType, n: int) -> None:
        """0, 1, 2, 0, 1, 2: numpy.tile, not numpy.repeat."""
        values = counting((2, 3), dtype)
        tensor = ctx.from_numpy(values)
        assert_same(tensor.repeat(ctx, -1, n), np.tile(values, (1, n)))
        assert_same(tensor.repeat(ctx, 0, n), np.tile(values, (n, 1)))
        assert_same(ctx.zeros((0, 2), dtype).repeat(ctx, 0, n), np.zeros((0, 2)), dtype)
