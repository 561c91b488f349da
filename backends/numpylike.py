"""One translation for the frameworks that speak NumPy's API: NumPy itself and CuPy.

``ArrayTensor.xp`` is the module. What the two do differently (how a strided view of a storage is
made, how memory is taken) is left to their own files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np

from ml.base import BaseContext, StridedTensor
from ml.dtypes import DType

__all__ = ["ArrayContext", "ArrayTensor"]

_SQRT_2 = math.sqrt(2.0)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class ArrayContext(BaseContext):
    """Creation on a NumPy-like framework."""

    tensor: ClassVar[type[ArrayTensor]]


class ArrayTensor(StridedTensor):
    """Compute and indexing through a NumPy-like module."""

    __slots__ = ()
    xp: ClassVar[Any] = np

    @classmethod
    def own(cls, ctx: ArrayContext, array: Any, dtype: DType) -> Self:
        """Wrap a result that the framework has just allocated."""
        raise NotImplementedError

    def _write(self, src: Self) -> None:
        source = src.native
        if src.dtype.is_integer and self.dtype in _NARROW:
            source = source.astype(np.float32)
        elif src.storage is self.storage:
            source = source.copy()  # neither framework gets every overlap right (NumPy: a[0:10:2] = a[:5])
        self.xp.copyto(self.native, source, casting="unsafe")

    def _gather(self, ctx: ArrayContext, indices: Any, axis: int) -> Self:
        return self.own(ctx, self.xp.take(self.native, _native(indices), axis=axis), self.dtype)

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        source = src.native
        if src.dtype is not self.dtype or src.storage is self.storage:
            source = _astype(source, src.dtype, self.dtype)
        self.native[(slice(None),) * axis + (_native(indices),)] = source

    def _concat(self, ctx: ArrayContext, other: Self, axis: int) -> Self:
        return self.own(ctx, self.xp.concatenate((self.native, other.native), axis=axis), self.dtype)

    def _repeat(self, ctx: ArrayContext, axis: int, n: int) -> Self:
        reps = [1] * len(self.shape)
        reps[axis] = n
        return self.own(ctx, self.xp.tile(self.native, reps), self.dtype)

    def _cast(self, ctx: ArrayContext, dtype: DType) -> Self:
        return self.own(ctx, _astype(self.native, self.dtype, dtype), dtype)

    # Compute: floats narrower than F32 are widened, computed, and rounded once.

    def _wide(self) -> Any:
        return self.native.astype(np.float32) if self.dtype in _NARROW else self.native

    def _result(self, ctx: ArrayContext, array: Any, dtype: DType) -> Self:
        return self.own(ctx, self.xp.asarray(array).astype(dtype.numpy, copy=False), dtype)

    def _binary(self, ctx: ArrayContext, op: str, other: Self) -> Self:
        function = getattr(self.xp, _UFUNC[op])
        return self._result(ctx, function(self._wide(), other._wide()), self.dtype)

    def _unary(self, ctx: ArrayContext, op: str) -> Self:
        return self._result(ctx, _UNARY[op](self.xp, self._wide()), self.dtype)

    def _scale(self, ctx: ArrayContext, x: float) -> Self:
        wide = self._wide()
        return self._result(ctx, wide * wide.dtype.type(x), self.dtype)

    def _gelu(self, ctx: ArrayContext, tanh: bool) -> Self:
        x = self._wide()
        if tanh:
            phi = self.xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
        else:
            phi = self._erf(x / _SQRT_2)
        return self._result(ctx, 0.5 * x * (1.0 + phi), self.dtype)

    def _erf(self, x: Any) -> Any:
        raise NotImplementedError

    def _clamp(self, ctx: ArrayContext, lo: float | None, hi: float | None) -> Self:
        if lo is None and hi is None:
            return self._cast(ctx, self.dtype)
        if lo is None and hi is None:
            return self._cast(ctx, self.dtype)
        bound = self.dtype.numpy.type
        low, high = (None if value is None else bound(value) for value in (lo, hi))
        return self._result(ctx, _clip(self.xp, self.native, low, high), self.dtype)

    def _matmul(self, ctx: ArrayContext, other: Self) -> Self:
        return self._result(ctx, self.xp.matmul(self._wide(), other._wide()), self.dtype)

    def _softmax(self, ctx: ArrayContext, axis: int) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        x = self._wide()
        x = self.xp.exp(x - x.max(axis=axis, keepdims=True))
        x /= x.sum(axis=axis, keepdims=True)
        return self._result(ctx, x, self.dtype)

    def _reduce(self, ctx: ArrayContext, op: str, axis: int, keepdims: bool) -> Self:
        x = self._wide()
        if op == "argmax":
            return self._result(ctx, self.xp.argmax(x, axis=axis, keepdims=keepdims), DType.I32)
        if op == "sum" and not self.dtype.is_float:
            return self._result(ctx, x.sum(axis=axis, keepdims=keepdims, dtype=np.int64), DType.I64)
        return self._result(ctx, getattr(x, op)(axis=axis, keepdims=keepdims), self.dtype)

    def _argsort(self, ctx: ArrayContext, axis: int) -> Self:
        return self._result(ctx, self.xp.argsort(self._wide(), axis=axis, kind="stable"), DType.I32)

    def _top_k(self, ctx: ArrayContext, k: int) -> tuple[Self, Self]:
        # A stable ascending sort of the reversed axis, read backwards: ties keep their order.
        size = self.shape[-1]
        order = self.xp.argsort(self._wide()[..., ::-1], axis=-1, kind="stable")
        order = size - 1 - order[..., : size - k - 1 if k < size else None : -1]
        values = self.xp.take_along_axis(self.native, order, axis=-1)
        return self._result(ctx, values, self.dtype), self._result(ctx, order, DType.I32)

    def _rms_norm(self, ctx: ArrayContext, weight: Self | None, eps: float) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        x = self._wide()
        x = x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps))
        if weight is not None:
            x = x * weight._wide()
        return self._result(ctx, x, self.dtype)

    def _compare(self, ctx: ArrayContext, op: str, other: Self) -> Self:
        return self._result(ctx, getattr(self.xp, _COMPARE[op])(self.native, other.native), DType.BOOL)

    def _where(self, ctx: ArrayContext, a: Self, b: Self) -> Self:
        return self._result(ctx, self.xp.where(self.native, a.native, b.native), a.dtype)


_NARROW = (DType.F16, DType.BF16)
_UFUNC = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "true_divide"}
_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip
_UNARY: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda xp, x: xp.negative(x),
    "exp": lambda xp, x: xp.exp(x),
    "log": lambda xp, x: xp.log(x),
    "sqrt": lambda xp, x: xp.sqrt(x),
    "sin": lambda xp, x: xp.sin(x),
    "cos": lambda xp, x: xp.cos(x),
    "tanh": lambda xp, x: xp.tanh(x),
    "sigmoid": lambda xp, x: 1.0 / (1.0 + xp.exp(-x)),
    "silu": lambda xp, x: x / (1.0 + xp.exp(-x)),
    "relu": lambda xp, x: xp.maximum(x, x.dtype.type(0)),
    "abs": lambda xp, x: xp.abs(x),
    "round": lambda xp, x: xp.rint(x) if x.dtype.kind == "f" else x.copy(),
}


def _native(indices: Any) -> Any:
    return indices.native if isinstance(indices, StridedTensor) else indices


def _astype(array: Any, source: DType, target: DType) -> Any:
    """A converted C-contiguous copy; integers reach the narrow floats by way of F32."""
    if source.is_integer and target in _NARROW:
        array = array.astype(np.float32)
    return array.astype(target.numpy, order="C", copy=True)


def _clip(xp: Any, x: Any, low: Any, high: Any) -> Any:
    if low is not None:
        x = xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)
