"""One translation for frameworks with NumPy's API: NumPy itself and CuPy.

``ArrayTensor.xp`` is the module. Differences between the two (strided views of a storage, allocation) are in
their own files, and in the few hooks under "Differences".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np

from ml.base import BaseContext, BaseTensor, StorageView
from ml.dtypes import DType
from ml.errors import ShapeError
from ml.selection import largest
from ml.strided import Shape, contiguous_strides

_SQRT_2 = math.sqrt(2.0)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class ArrayTensor(StorageView, BaseTensor):
    """Compute and indexing through a NumPy-like module."""

    __slots__ = ()
    xp: ClassVar[Any] = np

    @classmethod
    def own(cls, ctx: BaseContext, array: Any, dtype: DType) -> Self:
        """Wrap a result that the framework has just allocated."""
        raise NotImplementedError

    # Differences: NumPy's variants.

    def _bits(self, array: Any) -> Any:
        """The array in a dtype for operations that only move elements; ``own`` converts it back."""
        return array

    def values(self) -> Any:
        """The elements for comparisons."""
        return self.native

    def _bridge(self, array: Any, source: DType, target: DType) -> Any:
        """The source of a cast: integers become narrow floats by way of F32."""
        return array.astype(np.float32) if source.is_integer and target in _NARROW else array

    def _overlaps(self, src: Self) -> bool:
        ours, theirs = self.storage, src.storage
        if ours is not theirs and ours.owned and theirs.owned:
            return False
        return bool(self.xp.may_share_memory(self.native, src.native))

    def _index(self, indices: Any) -> Any:
        return indices.native if isinstance(indices, ArrayTensor) else indices

    def _order(self, x: Any, axis: int) -> Any:
        """Indices of a stable ascending sort, computed on rows, as NumPy sorts arrays of at most 32 axes."""
        last = x.swapaxes(axis, -1)
        rows = last.reshape(math.prod(last.shape[:-1]), last.shape[-1])
        return self.xp.argsort(rows, axis=-1, kind="stable").reshape(last.shape).swapaxes(axis, -1)

    def _erf(self, x: Any) -> Any:
        raise NotImplementedError

    def converted(self, dtype: DType) -> Any:
        """A C-contiguous copy as ``dtype``."""
        if dtype is self.dtype:
            same = self._bits(self.native)
            return same.astype(same.dtype, order="C", copy=True)
        source = self._bridge(self.native, self.dtype, dtype)
        return source.astype(dtype.numpy, order="C", copy=True)

    # Movement.

    def write_from(self, src: Self) -> None:
        source = self._bridge(src.native, src.dtype, self.dtype)
        if source is src.native and self._overlaps(src):
            source = source.copy()  # neither framework handles every overlap (NumPy: a[0:10:2] = a[:5])
        if src.dtype is self.dtype:
            self.xp.copyto(self._bits(self.native), self._bits(source), casting="unsafe")
        else:
            self.xp.copyto(self.native, source, casting="unsafe")

    def _gather(self, ctx: BaseContext, indices: Any, axis: int) -> Self:
        taken = self.xp.take(self._bits(self.native), self._index(indices), axis=axis)
        return self.own(ctx, taken, self.dtype)

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        source = src.native
        if src.dtype is not self.dtype or self._overlaps(src):
            source = src.converted(self.dtype)
        rows = (slice(None),) * axis + (self._index(indices),)
        self._bits(self.native)[rows] = self._bits(source)

    def _concat(self, ctx: BaseContext, other: Self, axis: int) -> Self:
        pair = (self._bits(self.native), self._bits(other.native))
        return self.own(ctx, self.xp.concatenate(pair, axis=axis), self.dtype)

    def _repeat(self, ctx: BaseContext, axis: int, n: int) -> Self:
        reps = [1] * len(self.shape)
        reps[axis] = n
        return self.own(ctx, self.xp.tile(self._bits(self.native), reps), self.dtype)

    def _cast(self, ctx: BaseContext, dtype: DType) -> Self:
        return self.own(ctx, self.converted(dtype), dtype)

    # Compute: floats narrower than F32 are widened, computed, and rounded once.

    def wide(self) -> Any:
        """The elements for computations: narrow floats as F32."""
        return self.native.astype(np.float32) if self.dtype in _NARROW else self.native

    def _result(self, ctx: BaseContext, array: Any, dtype: DType) -> Self:
        return self.own(ctx, self.xp.asarray(array).astype(dtype.numpy, copy=False), dtype)

    def _binary(self, ctx: BaseContext, op: str, other: Self) -> Self:
        function = getattr(self.xp, _UFUNC[op])
        return self._result(ctx, function(self.wide(), other.wide()), self.dtype)

    def _unary(self, ctx: BaseContext, op: str) -> Self:
        return self._result(ctx, _UNARY[op](self.xp, self.wide()), self.dtype)

    def _scale(self, ctx: BaseContext, x: float) -> Self:
        wide = self.wide()
        return self._result(ctx, wide * wide.dtype.type(x), self.dtype)

    def _gelu(self, ctx: BaseContext, tanh: bool) -> Self:
        x = self.wide()
        if tanh:
            phi = self.xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
        else:
            phi = self._erf(x / _SQRT_2)
        return self._result(ctx, 0.5 * x * (1.0 + phi), self.dtype)

    def _clamp(self, ctx: BaseContext, lo: float | None, hi: float | None) -> Self:
        if lo is None and hi is None:
            return self._cast(ctx, self.dtype)
        x = self.values()
        low, high = (None if value is None else x.dtype.type(value) for value in (lo, hi))
        return self._result(ctx, _clip(self.xp, x, low, high), self.dtype)

    def _matmul(self, ctx: BaseContext, other: Self) -> Self:
        return self._result(ctx, self.xp.matmul(self.wide(), other.wide()), self.dtype)

    def _softmax(self, ctx: BaseContext, axis: int) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        x = self.wide()
        x = self.xp.exp(x - x.max(axis=axis, keepdims=True))
        x /= x.sum(axis=axis, keepdims=True, dtype=_ADDED_IN).astype(np.float32)
        return self._result(ctx, x, self.dtype)

    def _reduce(self, ctx: BaseContext, op: str, axis: int, keepdims: bool) -> Self:
        x = self.wide()
        if op == "argmax":
            return self._result(ctx, self.xp.argmax(x, axis=axis, keepdims=keepdims), DType.I32)
        if op == "sum" and not self.dtype.is_float:
            return self._result(ctx, x.sum(axis=axis, keepdims=keepdims, dtype=np.int64), DType.I64)
        if op == "max":
            return self._result(ctx, x.max(axis=axis, keepdims=keepdims), self.dtype)
        total = getattr(x, op)(axis=axis, keepdims=keepdims, dtype=_ADDED_IN)
        return self._result(ctx, total.astype(np.float32), self.dtype)

    def _argsort(self, ctx: BaseContext, axis: int) -> Self:
        return self._result(ctx, self._order(self.wide(), axis), DType.I32)

    def _largest(self, x: Any, k: int) -> Any:
        """Indices of the k largest of the last axis; ties are in index order."""
        return largest(x, k)

    def _top_k(self, ctx: BaseContext, k: int) -> tuple[Self, Self]:
        rows = math.prod(self.shape[:-1]), self.shape[-1]
        order = self._largest(self.wide().reshape(rows), k)
        taken = self.xp.take_along_axis(self._bits(self.native).reshape(rows), order, axis=-1)
        shape = (*self.shape[:-1], k)
        return self.own(ctx, taken.reshape(shape), self.dtype), self._result(
            ctx, order.reshape(shape), DType.I32
        )

    def _rms_norm(self, ctx: BaseContext, weight: Self | None, eps: float) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        x = self.wide()
        mean = (x * x).mean(axis=-1, keepdims=True, dtype=_ADDED_IN).astype(np.float32)
        x = x / self.xp.sqrt(mean + np.float32(eps))
        if weight is not None:
            x = x * weight.wide()
        return self._result(ctx, x, self.dtype)

    def _compare(self, ctx: BaseContext, op: str, other: Self) -> Self:
        function = getattr(self.xp, _COMPARE[op])
        return self._result(ctx, function(self.values(), other.values()), DType.BOOL)

    def _where(self, ctx: BaseContext, a: Self, b: Self) -> Self:
        chosen = self.xp.where(self.native, self._bits(a.native), self._bits(b.native))
        return self.own(ctx, chosen, a.dtype)


_NARROW = (DType.F16, DType.BF16)
_ADDED_IN = np.float64
"""Along any axis but the innermost, NumPy adds one by one: the error for a million equal numbers is 1%."""
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


def _clip(xp: Any, x: Any, low: Any, high: Any) -> Any:
    if low is not None:
        x = xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def element_strides(array: Any, itemsize: int) -> Shape:
    """The strides of a foreign array in elements, if the contract can express them."""
    if array.size == 0:
        return contiguous_strides(array.shape)
    axes = list(zip(array.shape, array.strides, strict=True))
    if any(size > 1 and (stride < 0 or stride % itemsize) for size, stride in axes):
        raise ShapeError(
            f"from_native: strides of {array.strides} bytes; they must be at least 0 and multiples of "
            f"{itemsize}"
        )
    return tuple(stride // itemsize if size > 1 else 1 for size, stride in axes)
