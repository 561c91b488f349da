"""Bugs of what a storage holds and how it is seen: creation, views, copies, rows."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

import ml
from ml.base import BaseTensor
from ml.dtypes import DType
from ml.strided import contiguous_strides, extent
from ml.testing.aliasing import AliasingTests
from ml.testing.copies import CopyTests
from ml.testing.creation import CreationTests
from ml.testing.movement import MovementTests
from ml.testing.rows import RowTests

from .planting import mutant, override

# Creation and transfer.


@mutant(CreationTests)
def from_numpy_keeps_the_callers_memory(numpy: ModuleType) -> None:
    numpy.NumpyContext._from_array = lambda self, array, dtype: numpy.NumpyTensor.own(self, array, dtype)


@mutant(CreationTests)
def to_numpy_hands_out_the_storage(numpy: ModuleType) -> None:
    numpy.NumpyTensor.to_numpy = lambda self: self.native


@mutant(CreationTests)
def arange_drops_the_last_partial_step(numpy: ModuleType) -> None:
    @override(numpy.NumpyContext, "arange")
    def _(original: Any, self: Any, start: float, stop: float, step: float, dtype: DType) -> Any:
        whole = start + step * math.floor((stop - start) / step) if step else stop
        return original(self, start, whole, step, dtype)


@mutant(CreationTests)
def full_forgets_the_sign_of_zero(numpy: ModuleType) -> None:
    @override(numpy.NumpyContext, "_full")
    def _(original: Any, self: Any, shape: Any, value: float, dtype: DType) -> Any:
        return original(self, shape, value + 0.0 if value == 0 else value, dtype)


@mutant(CreationTests)
def memory_never_shrinks(numpy: ModuleType) -> None:
    kept: list[Any] = []

    @override(numpy.NumpyContext, "_allocate")
    def _(original: Any, self: Any, *args: Any) -> Any:
        kept.append(original(self, *args))
        return kept[-1]


# Movement.


@mutant(MovementTests)
def view_counts_from_the_storage(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "view")
    def _(original: Any, self: Any, ctx: Any, offset: int, *args: Any) -> Any:
        return original(self, ctx, offset - self.offset, *args)


@mutant(MovementTests)
def view_is_bound_by_what_is_shown(numpy: ModuleType) -> None:
    numpy.NumpyTensor._storage_size = lambda self: self.offset + extent(self.shape, self.strides)


@mutant(MovementTests)
def slice_ignores_its_step_beyond_the_first(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        shown = original(self, ctx, axis, start, stop, step)
        return shown._alias(shown.offset, shown.shape, self.strides)


@mutant(MovementTests)
def slice_wraps_negative_positions(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        size = self.shape[axis] if self.shape and -len(self.shape) <= axis < len(self.shape) else 0
        first, last = (int(n) + size if isinstance(n, int) and n < 0 else n for n in (start, stop))
        return original(self, ctx, axis, first, last, step)


@mutant(MovementTests)
def permute_applies_the_inverse(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "permute")
    def _(original: Any, self: Any, ctx: Any, *axes: int) -> Any:
        if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))) or not axes:
            return original(self, ctx, *axes)
        return original(self, ctx, *np.argsort([axis % len(axes) for axis in axes]).tolist())


@mutant(MovementTests)
def reshape_copies_when_it_has_to(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "reshape")
    def _(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
        try:
            return original(self, ctx, *shape)
        except ml.ShapeError:
            return original(self.contiguous(ctx), ctx, *shape)


# Aliasing.


@mutant(AliasingTests)
def a_stepped_slice_is_a_copy(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "slice")
    def _(original: Any, self: Any, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        shown = original(self, ctx, axis, start, stop, step)
        return shown.contiguous(ctx) if step > 1 else shown


@mutant(AliasingTests)
def reshape_merges_a_gap_of_one_row(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "reshape")
    def _(original: Any, self: Any, ctx: Any, *shape: int) -> Any:
        try:
            return original(self, ctx, *shape)
        except ml.ShapeError:
            steps = contiguous_strides(shape)
            if extent(shape, steps) + self.offset > self.storage.size or math.prod(shape) != math.prod(
                self.shape
            ):
                raise
            return self._alias(self.offset, shape, steps)


# Copies.


@mutant(CopyTests)
def an_overlapping_copy_trusts_numpy(numpy: ModuleType) -> None:
    """NumPy 2.4 gets ``a[0:10:2] = a[:5]`` wrong."""
    numpy.NumpyTensor.write_from = lambda self, src: np.copyto(self.native, src.native, casting="unsafe")


@mutant(CopyTests)
def an_overlapping_copy_runs_forward(numpy: ModuleType) -> None:
    def write(self: Any, src: Any) -> None:
        for index in np.ndindex(self.shape):
            self.native[index] = src.native[index].astype(self.dtype.numpy)

    numpy.NumpyTensor.write_from = write


@mutant(CopyTests)
def a_write_to_a_strided_destination_is_lost(numpy: ModuleType) -> None:
    def write(self: Any, src: Any) -> None:
        self.native.reshape(-1)[...] = src.native.reshape(-1).astype(self.dtype.numpy)

    numpy.NumpyTensor.write_from = write


@mutant(CopyTests)
def copy_broadcasts(numpy: ModuleType) -> None:
    def copy(self: Any, ctx: Any, dst: Any) -> Any:
        dst.check_writable("copy")
        try:
            np.copyto(dst.native, self.native.copy(), casting="unsafe")
        except ValueError as error:
            raise ml.ShapeError(str(error)) from error
        return dst

    numpy.NumpyTensor.copy = copy


@mutant(CopyTests)
def a_stride_0_destination_is_written(numpy: ModuleType) -> None:
    numpy.NumpyTensor.check_writable = lambda self, op: None


# Rows.


@mutant(RowTests)
def host_indices_wrap(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_indices")
    def _(original: Any, self: Any, op: str, indices: Any, size: int, distinct: bool = False) -> Any:
        if isinstance(indices, (list, np.ndarray)):
            host = np.asarray(indices, dtype=object)
            if host.ndim == 1 and all(isinstance(n, (int, np.integer)) for n in host) and size:
                indices = [int(n) + size if -size <= n < 0 else n for n in host]
        return original(self, op, indices, size, distinct)


@mutant(RowTests)
def an_index_tensor_is_read_without_its_strides(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_indices")
    def _(original: Any, self: Any, op: str, indices: Any, size: int, distinct: bool = False) -> Any:
        rows = original(self, op, indices, size, distinct)
        return rows._alias(rows.offset, rows.shape, (1,)) if isinstance(rows, BaseTensor) else rows


@mutant(RowTests)
def set_rows_reads_its_own_rows_while_writing(numpy: ModuleType) -> None:
    def scatter(self: Any, src: Any, indices: Any, axis: int) -> None:
        rows = indices.native if isinstance(indices, BaseTensor) else indices
        target, source = np.moveaxis(self.native, axis, 0), np.moveaxis(src.native, axis, 0)
        for i, row in enumerate(rows.tolist()):
            target[row] = source[i].astype(self.dtype.numpy)

    numpy.NumpyTensor._scatter = scatter


@mutant(RowTests)
def repeat_repeats_each_element(numpy: ModuleType) -> None:
    numpy.NumpyTensor._repeat = lambda self, ctx, axis, n: self.own(
        ctx, np.repeat(self.native, n, axis), self.dtype
    )


@mutant(RowTests)
def set_rows_writes_before_it_checks(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "set_rows")
    def _(original: Any, self: Any, ctx: Any, src: Any, indices: Any, axis: int = 0) -> Any:
        if isinstance(indices, list) and len(indices) == 2 and indices[0] == indices[1] and self.native.ndim:
            self.native[indices[0]] = 0
        return original(self, ctx, src, indices, axis)
