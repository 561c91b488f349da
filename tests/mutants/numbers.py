"""Bugs of what is computed: casts, arithmetic, reductions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from backends.numpylike import ArrayTensor
from ml.dtypes import DType
from ml.testing.casts import CastTests
from ml.testing.compute import ComputeTests
from ml.testing.reductions import ReductionTests

from .planting import mutant, override

# Casts.


def narrowing(numpy: ModuleType, change: Callable[[np.ndarray, DType], np.ndarray]) -> None:
    """Change an array before it is converted to another dtype."""

    @override(numpy.NumpyTensor, "_cast")
    def _(original: Any, self: Any, ctx: Any, dtype: DType) -> Any:
        if self.dtype is dtype:
            return original(self, ctx, dtype)
        with np.errstate(all="ignore"):
            return original(self.own(ctx, change(self.native.copy(), dtype), self.dtype), ctx, dtype)


@mutant(CastTests)
def f32_truncates_to_bf16(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        if dtype is DType.BF16 and array.dtype == np.float32:
            keep = ~np.isnan(array)
            array.view(np.uint32)[keep] &= 0xFFFF0000
        return array

    narrowing(numpy, change)


@mutant(CastTests)
def subnormal_f16_flushes_to_zero(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        return np.where(np.abs(array) < 2.0**-14, array * 0, array) if dtype is DType.F16 else array

    narrowing(numpy, lambda array, dtype: change(array, dtype).astype(array.dtype))


@mutant(CastTests)
def overflow_saturates_at_the_largest_f16(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        if dtype is DType.F16 and array.dtype == np.float32:
            return np.clip(array, -65504, 65504)
        return array

    narrowing(numpy, change)


@mutant(CastTests)
def floats_round_to_integers(numpy: ModuleType) -> None:
    def change(array: np.ndarray, dtype: DType) -> np.ndarray:
        return np.rint(array).astype(array.dtype) if dtype.is_integer and array.dtype.kind == "f" else array

    narrowing(numpy, change)


@mutant(CastTests)
def copy_to_bool_takes_the_lowest_bit(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "write_from")
    def _(original: Any, self: Any, src: Any) -> None:
        if self.dtype is DType.BOOL and src.dtype.is_integer:
            self.native[...] = (src.native & 1).astype(bool)
        else:
            original(self, src)


# Compute.


@mutant(ComputeTests)
def matmul_accumulates_in_the_operands_dtype(numpy: ModuleType) -> None:
    def matmul(self: Any, ctx: Any, other: Any) -> Any:
        if self.dtype is DType.F32 or self.native.ndim < 2 or self.shape[-1] < 100:
            return ArrayTensor._matmul(self, ctx, other)
        columns = other.native if other.native.ndim > 1 else other.native[:, None]
        total = np.zeros((*self.shape[:-1], columns.shape[-1]), self.dtype.numpy)
        for k in range(self.shape[-1]):
            total = total + self.native[..., k : k + 1] * columns[k]
        return self.own(ctx, total if other.native.ndim > 1 else total[..., 0], self.dtype)

    numpy.NumpyTensor._matmul = matmul


@mutant(ComputeTests)
def gelu_is_always_the_tanh_one(numpy: ModuleType) -> None:
    numpy.NumpyTensor._gelu = lambda self, ctx, tanh: ArrayTensor._gelu(self, ctx, True)


@mutant(ComputeTests)
def clamp_without_bounds_returns_its_operand(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_clamp")
    def _(original: Any, self: Any, ctx: Any, lo: Any, hi: Any) -> Any:
        return self if lo is None and hi is None else original(self, ctx, lo, hi)


@mutant(ComputeTests)
def round_takes_halves_away_from_zero(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_unary")
    def _(original: Any, self: Any, ctx: Any, op: str) -> Any:
        if op != "round" or not self.dtype.is_float:
            return original(self, ctx, op)
        x = self.wide()
        return self._result(ctx, np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x), self.dtype)


@mutant(ComputeTests)
def binary_operands_are_promoted(numpy: ModuleType) -> None:
    numpy.NumpyTensor._operand = lambda self, op, other, dtype=None: self.check_peer(op, other)


# Reductions.


@mutant(ReductionTests)
def sums_of_i32_stay_i32(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_reduce")
    def _(original: Any, self: Any, ctx: Any, op: str, axis: int, keepdims: bool) -> Any:
        if op == "sum" and self.dtype is DType.I32:
            return self.own(ctx, self.native.sum(axis=axis, keepdims=keepdims, dtype=np.int32), DType.I32)
        return original(self, ctx, op, axis, keepdims)


@mutant(ReductionTests)
def argmax_takes_the_last_of_ties(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_reduce")
    def _(original: Any, self: Any, ctx: Any, op: str, axis: int, keepdims: bool) -> Any:
        if op != "argmax" or self.native.size == 0:
            return original(self, ctx, op, axis, keepdims)
        back = np.flip(self.wide(), axis)
        last = self.shape[axis] - 1 - np.argmax(back, axis=axis, keepdims=keepdims)
        return self._result(ctx, last, DType.I32)


@mutant(ReductionTests)
def softmax_forgets_to_subtract_the_maximum(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_softmax")
    def _(original: Any, self: Any, ctx: Any, axis: int) -> Any:
        with np.errstate(all="ignore"):
            x = np.exp(self.wide())
            return self._result(ctx, x / x.sum(axis=axis, keepdims=True), self.dtype)


@mutant(ReductionTests)
def rms_norm_squares_in_the_operands_dtype(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_rms_norm")
    def _(original: Any, self: Any, ctx: Any, weight: Any, eps: float) -> Any:
        if weight is not None or 0 in self.shape or self.dtype is not DType.F16:
            return original(self, ctx, weight, eps)
        with np.errstate(all="ignore"):
            square = (self.native * self.native).astype(np.float32).mean(axis=-1, keepdims=True)
            return self._result(ctx, self.wide() / np.sqrt(square + np.float32(eps)), self.dtype)


@mutant(ReductionTests)
def argsort_is_not_stable(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_argsort")
    def _(original: Any, self: Any, ctx: Any, axis: int) -> Any:
        size = self.shape[axis]
        order = np.argsort(np.flip(self.wide(), axis), axis=axis, kind="stable")
        return self._result(ctx, size - 1 - order, DType.I32)


@mutant(ReductionTests)
def indices_are_i64(numpy: ModuleType) -> None:
    @override(numpy.NumpyTensor, "_top_k")
    def _(original: Any, self: Any, ctx: Any, k: int) -> Any:
        values, indices = original(self, ctx, k)
        return values, indices.cast(ctx, DType.I64)
