"""Tensor on MLX: geometry over a ``MlxStorage``, and one translation per operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import MLX_DTYPES, from_host, scalar
from backends.mlx.errors import translated
from backends.mlx.regions import element_offsets, region_of, row_region_of, runs_of
from backends.mlx.storage import WAIT_BYTES, MlxStorage
from ml.base import StridedTensor
from ml.dtypes import DType
from ml.strided import Shape, contiguous_strides

RUNS_LIMIT = 16
"""Rows in at most this many runs are written slice by slice, since a scatter costs more per element."""
_NARROW = (DType.F16, DType.BF16)
_SQRT_2 = math.sqrt(2.0)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class MlxTensor(StridedTensor):
    """A view without an array: reading builds one, so that keeping a tensor never causes a copy."""

    __slots__ = ()

    storage: MlxStorage

    def read(self) -> Any:
        """The current array of this view: drop it before the next write."""
        return self.storage.read(self.offset, self.shape, self.strides)

    def wrap(self, array: Any, dtype: DType | None = None) -> Self:
        """A tensor with a new storage around a result, which is lazy and in any layout."""
        storage = MlxStorage.around(self.backend, self.storage.work, array)
        shape = storage.shape
        return type(self)(
            storage, self.dtype if dtype is None else dtype, 0, shape, contiguous_strides(shape)
        )

    @property
    def native(self) -> Any:
        """A snapshot as an ``mx.array``, already scheduled, so that any thread may use it (except within
        ``MlxBackend.shared_stream``).
        """
        return self.backend.natives(self)[0]  # type: ignore[attr-defined]

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        return self.storage.work.fetch(self.read(), self.dtype)

    # Storage.

    def write_from(self, src: Self) -> None:
        if 0 in self.shape:
            return
        region = region_of(self.storage.shape, self.offset, self.shape, self.strides)
        if region is None:
            offsets = element_offsets(self.offset, self.shape, self.strides)
            self.storage.put_elements(self._index(offsets), src.value_for(self, src.shape, src.strides))
        else:
            value = src.value_for(self, region.sizes, region.order(src.strides))
            self.storage.put_block(region, value)

    def value_for(self, dst: Self, shape: Shape, strides: Shape) -> Any:
        """A view (shape, strides) of this tensor, in the dtype of ``dst`` and independent of its storage."""
        array = self.storage.read(self.offset, shape, strides)
        if self.dtype is not dst.dtype:
            return self._astype(array, dst.dtype)
        return self._apart(array) if self.storage is dst.storage else array

    def detached(self) -> Self:
        """A copy in a new storage."""
        return self.wrap(self._apart(self.read()))

    def _apart(self, array: Any) -> Any:
        """A copy in C order, by ``full``, which never returns an alias."""
        return mx.full(array.shape, array, array.dtype, stream=self.storage.work.stream)

    def _astype(self, array: Any, dtype: DType) -> Any:
        """Converted values; integers become narrow floats by way of F32, as on every backend."""
        stream = self.storage.work.stream
        if self.dtype.is_integer and dtype in _NARROW:
            array = mx.astype(array, mx.float32, stream=stream)
        return mx.astype(array, MLX_DTYPES[dtype], stream=stream)

    def _cast(self, ctx: Any, dtype: DType) -> Self:
        if dtype is not self.dtype:
            return self.wrap(self._astype(self.read(), dtype), dtype)
        if self.storage.nbytes >= WAIT_BYTES:
            return self.detached()
        # Two storages may share an array: the first write to either copies it (a small one here).
        return self.wrap(mx.contiguous(self.read(), stream=self.storage.work.stream))

    def _index(self, indices: Any) -> Any:
        if isinstance(indices, MlxTensor):
            return indices.read()
        return from_host(indices.astype(np.int32))

    def _gather(self, ctx: Any, indices: Any, axis: int) -> Self:
        stream = self.storage.work.stream
        shape = (*self.shape[:axis], indices.shape[0], *self.shape[axis + 1 :])
        if 0 in shape:
            return self.wrap(mx.zeros(shape, MLX_DTYPES[self.dtype], stream=stream))
        return self.wrap(mx.take(self.read(), self._index(indices), axis, stream=stream))

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        if 0 in src.shape:
            return
        if src.storage is self.storage:
            src = src.detached()
        if isinstance(indices, np.ndarray):
            runs = runs_of(indices)
            if len(runs) <= RUNS_LIMIT:
                for begin, end, first in runs:
                    self.part(axis, first, end - begin).write_from(src.part(axis, begin, end - begin))
                return
        self._scatter_scattered(src, self._index(indices), axis)

    def part(self, axis: int, start: int, size: int) -> Self:
        """Elements ``[start, start + size)`` of one axis, as a view."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return self._alias(self.offset + start * self.strides[axis], shape, self.strides)

    def _scatter_scattered(self, src: Self, indices: Any, axis: int) -> None:
        """Write rows that are whole layers of the storage, or else element by element."""
        storage, stream = self.storage, self.storage.work.stream
        rows = row_region_of(storage.shape, self.offset, self.shape, self.strides, axis)
        if rows is not None:
            indices = _affine(indices, rows.step, rows.first, stream)
            shape = tuple(src.shape[k] if k >= 0 else 1 for k in rows.sources)
            strides = tuple(src.strides[k] if k >= 0 else 1 for k in rows.sources)
            storage.put_layers(rows.axis, indices, src.value_for(self, shape, strides))
            return
        one = (*self.shape[:axis], 1, *self.shape[axis + 1 :])
        base = self._index(element_offsets(self.offset, one, self.strides))
        steps = _affine(mx.astype(indices, base.dtype, stream=stream), self.strides[axis], 0, stream)
        steps = mx.reshape(steps, (-1, *(1,) * (len(one) - axis - 1)), stream=stream)
        storage.put_elements(mx.add(base, steps, stream=stream), src.value_for(self, src.shape, src.strides))

    def _concat(self, ctx: Any, other: Self, axis: int) -> Self:
        return self.wrap(mx.concatenate([self.read(), other.read()], axis, stream=self.storage.work.stream))

    def _repeat(self, ctx: Any, axis: int, n: int) -> Self:
        if n == 1:
            return self._cast(ctx, self.dtype)
        if n == 0 or 0 in self.shape:
            shape = (*self.shape[:axis], self.shape[axis] * n, *self.shape[axis + 1 :])
            return self.wrap(mx.zeros(shape, MLX_DTYPES[self.dtype], stream=self.storage.work.stream))
        reps = [1] * len(self.shape)
        reps[axis] = int(n)
        return self.wrap(mx.tile(self.read(), reps, stream=self.storage.work.stream))

    # Compute.

    def wide(self, always: bool = True) -> Any:
        """The array, with narrow floats in F32: ``always``, or if the device's kernels do not widen them."""
        array = self.read()
        if self.dtype in _NARROW and (always or self.storage.work.widens):
            return mx.astype(array, mx.float32, stream=self.storage.work.stream)
        return array

    def result(self, array: Any, dtype: DType | None = None) -> Self:
        """A result rounded to ``dtype`` (None: this tensor's)."""
        target = self.dtype if dtype is None else dtype
        return self.wrap(mx.astype(array, MLX_DTYPES[target], stream=self.storage.work.stream), target)

    def _binary(self, ctx: Any, op: str, other: Self) -> Self:
        # One operation on narrow floats rounds once, as by way of F32.
        return self.wrap(_BINARY[op](self.read(), other.read(), stream=self.storage.work.stream))

    def _unary(self, ctx: Any, op: str) -> Self:
        if not self.dtype.is_float and (op == "round" or (self.dtype is DType.U8 and op != "neg")):
            return self._cast(ctx, self.dtype)  # MLX may return the operand itself
        stream = self.storage.work.stream
        if op in _EXACT:
            return self.wrap(_EXACT[op](self.read(), stream))
        on_cpu = _UNARY_ON_CPU.get(op) if self.storage.work.widens else None
        return self.result((on_cpu or _UNARY[op])(self.wide(), stream))

    def _scale(self, ctx: Any, x: float) -> Self:
        stream = self.storage.work.stream
        factor = mx.array(x, mx.float32 if self.dtype.is_float else MLX_DTYPES[self.dtype])
        return self.result(mx.multiply(self.wide(), factor, stream=stream))

    def _gelu(self, ctx: Any, tanh: bool) -> Self:
        stream, x = self.storage.work.stream, self.wide()
        if tanh:
            cubic = _affine(mx.square(x, stream=stream), 0.044715, 1.0, stream)
            inner = _affine(mx.multiply(x, cubic, stream=stream), _SQRT_2_OVER_PI, 0, stream)
            phi = mx.tanh(inner, stream=stream)
        else:
            phi = mx.erf(_affine(x, 1.0 / _SQRT_2, 0, stream), stream=stream)
        half = _affine(x, 0.5, 0, stream)
        return self.result(mx.multiply(half, _affine(phi, 1, 1.0, stream), stream=stream))

    def _clamp(self, ctx: Any, lo: float | None, hi: float | None) -> Self:
        if lo is None and hi is None:
            return self._cast(ctx, self.dtype)
        array, stream = self.read(), self.storage.work.stream
        for limit, bound in ((mx.maximum, lo), (mx.minimum, hi)):
            if bound is not None:
                array = limit(array, from_host(scalar(bound, self.dtype)), stream=stream)
        return self.wrap(array)

    def _matmul(self, ctx: Any, other: Self) -> Self:
        product = mx.matmul(self.wide(False), other.wide(False), stream=self.storage.work.stream)
        return self.result(product)

    def _softmax(self, ctx: Any, axis: int) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        return self.result(mx.softmax(self.wide(), axis, precise=True, stream=self.storage.work.stream))

    def _reduce(self, ctx: Any, op: str, axis: int, keepdims: bool) -> Self:
        dtype, stream = _reduced_dtype(op, self.dtype), self.storage.work.stream
        if op != "sum" and 0 in self.shape:  # the axis is not empty (checked), but the result is
            sizes = [1 if k == axis else size for k, size in enumerate(self.shape) if keepdims or k != axis]
            return self.wrap(mx.zeros(sizes, MLX_DTYPES[dtype], stream=stream), dtype)
        if dtype is DType.I64:
            x = mx.astype(self.read(), mx.int64, stream=stream)
        else:
            x = self._addends() if op in ("sum", "mean") else self.wide()
        return self.result(getattr(mx, op)(x, axis=axis, keepdims=keepdims, stream=stream), dtype)

    def _addends(self) -> Any:
        """The floats to sum. On the CPU, MLX adds one by one, so F64 is used to keep precision."""
        if self.storage.work.widens:
            return mx.astype(self.read(), mx.float64, stream=self.storage.work.stream)
        return self.wide()

    def _argsort(self, ctx: Any, axis: int) -> Self:
        return self.result(mx.argsort(self.read(), axis, stream=self.storage.work.stream), DType.I32)

    def _top_k(self, ctx: Any, k: int) -> tuple[Self, Self]:
        # A stable ascending sort of the reversed axis, read backwards: ties keep their order.
        stream, size, x = self.storage.work.stream, self.shape[-1], self.read()
        backwards = mx.array(np.arange(size - 1, -1, -1, dtype=np.int32))
        order = mx.argsort(mx.take(x, backwards, -1, stream=stream), -1, stream=stream)
        order = mx.take(
            order, mx.array(np.arange(size - 1, size - 1 - k, -1, dtype=np.int32)), -1, stream=stream
        )
        order = mx.subtract(
            mx.array(size - 1, mx.int32), mx.astype(order, mx.int32, stream=stream), stream=stream
        )
        return self.wrap(mx.take_along_axis(x, order, -1, stream=stream)), self.wrap(order, DType.I32)

    def _rms_norm(self, ctx: Any, weight: Self | None, eps: float) -> Self:
        if 0 in self.shape:
            return self._cast(ctx, self.dtype)
        w = None if weight is None else weight.wide(False)
        return self.result(mx.fast.rms_norm(self.wide(False), w, eps, stream=self.storage.work.stream))

    def _compare(self, ctx: Any, op: str, other: Self) -> Self:
        result = _COMPARE[op](self.read(), other.read(), stream=self.storage.work.stream)
        return self.wrap(result, DType.BOOL)

    def _where(self, ctx: Any, a: Self, b: Self) -> Self:
        result = mx.where(self.read(), a.read(), b.read(), stream=self.storage.work.stream)
        return self.wrap(result, a.dtype)


# Operations whose results may exceed MLX's sizes (int32) or memory.
for _name in (
    "_scatter", "_gather", "_concat", "_repeat", "_cast", "_binary", "_matmul", "_compare",
    "_where", "to_numpy",
):  # fmt: skip
    setattr(MlxTensor, _name, translated(_name, getattr(MlxTensor, _name)))


def _reduced_dtype(op: str, dtype: DType) -> DType:
    if op == "argmax":
        return DType.I32
    return DType.I64 if op == "sum" and not dtype.is_float else dtype


def _affine(x: Any, factor: float, term: float, stream: Any) -> Any:
    """``x * factor + term`` in the dtype of ``x``."""
    if factor != 1:
        x = mx.multiply(x, mx.array(factor, x.dtype), stream=stream)
    return x if term == 0 else mx.add(x, mx.array(term, x.dtype), stream=stream)


_BINARY: dict[str, Callable[..., Any]] = {
    "add": mx.add, "sub": mx.subtract, "mul": mx.multiply, "div": mx.divide,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": mx.equal, "ne": mx.not_equal, "lt": mx.less, "le": mx.less_equal, "gt": mx.greater,
    "ge": mx.greater_equal,
}  # fmt: skip
_EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda x, stream: mx.negative(x, stream=stream),
    "abs": lambda x, stream: mx.abs(x, stream=stream),
    "round": lambda x, stream: mx.round(x, stream=stream),
    "relu": lambda x, stream: mx.maximum(x, mx.array(0, x.dtype), stream=stream),
}
_UNARY: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda x, stream: mx.exp(x, stream=stream),
    "log": lambda x, stream: mx.log(x, stream=stream),
    "sqrt": lambda x, stream: mx.sqrt(x, stream=stream),
    "sin": lambda x, stream: mx.sin(x, stream=stream),
    "cos": lambda x, stream: mx.cos(x, stream=stream),
    "tanh": lambda x, stream: mx.tanh(x, stream=stream),
    "sigmoid": lambda x, stream: mx.sigmoid(x, stream=stream),
    "silu": lambda x, stream: mx.multiply(x, mx.sigmoid(x, stream=stream), stream=stream),
}


def _exp_on_cpu(x: Any, stream: Any) -> Any:
    """MLX's exp is infinite from 88.0 and 0 below -88.0, and loses up to five bits far from 0."""
    power = mx.power(mx.array(math.e, mx.float64), mx.astype(x, mx.float64, stream=stream), stream=stream)
    return mx.astype(power, mx.float32, stream=stream)


def _sin_on_cpu(x: Any, stream: Any) -> Any:
    """MLX's sin maps -0.0 to 0.0."""
    zero = mx.equal(x, mx.array(0, x.dtype), stream=stream)
    return mx.where(zero, x, mx.sin(x, stream=stream), stream=stream)


_UNARY_ON_CPU = {"exp": _exp_on_cpu, "sin": _sin_on_cpu}
