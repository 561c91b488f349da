"""Paddle tensors: a view is one ``as_strided``; a dtype without a kernel is computed in a wider one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import paddle
from paddle.nn import functional

from ml import DType
from ml.base import StridedTensor, translating

PADDLE = {
    DType.F32: paddle.float32, DType.F16: paddle.float16, DType.BF16: paddle.bfloat16,
    DType.I8: paddle.int8, DType.U8: paddle.uint8, DType.I32: paddle.int32, DType.I64: paddle.int64,
    DType.BOOL: paddle.bool,
}  # fmt: skip
WIDER = {
    DType.F16: paddle.float32, DType.BF16: paddle.float32, DType.I8: paddle.int32, DType.U8: paddle.int32,
    DType.BOOL: paddle.int32,
}  # fmt: skip
"""Paddle's CPU has few kernels of 16 and 8 bits. F32 is also what the contract computes F16 and BF16 in."""
ERRORS = MemoryError, RuntimeError, OSError, SystemError
"""What Paddle raises: when memory runs out, and for want of a kernel."""


@translating(*ERRORS)
class PaddleTensor(StridedTensor):
    __slots__ = ()

    # Storage.

    @property
    def native(self) -> paddle.Tensor:
        """Paddle's tensor of this view, of nine axes at most; it aliases the storage."""
        self.backend.check("native")
        return self.shown(self.offset, self.shape, self.strides)

    def shown(self, offset: int, shape: Any, strides: Any) -> paddle.Tensor:
        # Strides count elements, the offset bytes: those from where Paddle's memory begins.
        return paddle.as_strided(self.storage.array, shape, strides, offset * self.dtype.itemsize)

    def read(self) -> paddle.Tensor:
        """As native, without axes of size 1: Paddle has no more than nine."""
        kept = [i for i, size in enumerate(self.shape) if size != 1]
        return self.shown(self.offset, [self.shape[i] for i in kept], [self.strides[i] for i in kept])

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        return self.read().numpy().view(self.dtype.numpy).reshape(self.shape)  # Paddle's BF16 comes as uint16

    def write_from(self, src: Self) -> None:
        if 0 not in self.shape:
            self.read().copy_(src.converted(self.dtype), True)

    def converted(self, dtype: DType) -> paddle.Tensor:
        """A copy of ``read`` in a dtype. It shares no memory: Paddle copies forwards, whatever overlaps."""
        array = self.read()
        return array.clone() if self.dtype is dtype else cast(array, dtype)

    def _cast(self, ctx: Any, dtype: DType) -> Self:
        return ctx.own(self.converted(dtype), dtype, self.shape)

    def places(self, indices: Any, axis: int) -> paddle.Tensor:
        """Where the elements of these slices lie in the storage, in C order: I64, of one axis."""
        found = paddle.full([1], self.offset, "int64")
        for i, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = paddle.arange(size, dtype="int64")
            if i == axis:
                steps = indices.read() if isinstance(indices, PaddleTensor) else paddle.to_tensor(indices)
            steps = steps.astype("int64").reshape([1, -1])
            found = (found.reshape([-1, 1]) + steps * stride).flatten()
        return found

    def _gather(self, ctx: Any, indices: Any, axis: int) -> Self:
        shape = (*self.shape[:axis], indices.shape[0], *self.shape[axis + 1 :])
        if 0 in shape:
            return ctx.empty(shape, self.dtype)
        storage = self.shown(0, [self.storage.size], [1])
        if self.dtype is DType.F16:  # has no kernel of gather; its bits have
            storage = storage.view(paddle.int16)
        found = paddle.gather(storage, self.places(indices, axis)).view(PADDLE[self.dtype])
        return ctx.own(found, self.dtype, shape)

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        if 0 not in src.shape:
            # Into the flat storage: on a strided view, `view[:, rows] = x` damages the heap.
            storage, places = self.shown(0, [self.storage.size], [1]), self.places(indices, axis)
            storage.index_put_((places,), src.converted(self.dtype).flatten())

    # Compute.

    def wide(self) -> paddle.Tensor:
        return self.native.astype(WIDER[self.dtype]) if self.dtype in WIDER else self.native

    def _binary(self, ctx: Any, op: str, other: Self) -> Self:
        return ctx.own(BINARY[op](self.wide(), other.wide()), self.dtype)

    def _unary(self, ctx: Any, op: str) -> Self:
        return ctx.own(UNARY[op](self.wide()), self.dtype)

    def _scale(self, ctx: Any, x: float) -> Self:
        wide = self.wide()
        return ctx.own(wide * paddle.full([], x, wide.dtype), self.dtype)

    def _gelu(self, ctx: Any, tanh: bool) -> Self:
        return ctx.own(functional.gelu(self.wide().astype("float64"), approximate=tanh), self.dtype)

    def _clamp(self, ctx: Any, lo: float | None, hi: float | None) -> Self:
        wide = self.wide().clone()
        if lo is not None:
            wide = paddle.where(wide < lo, paddle.full([], lo, wide.dtype), wide)
        if hi is not None:
            wide = paddle.where(wide > hi, paddle.full([], hi, wide.dtype), wide)
        return ctx.own(wide, self.dtype)

    def _matmul(self, ctx: Any, other: Self) -> Self:
        return ctx.own(paddle.matmul(self.wide(), other.wide()), self.dtype)

    def _softmax(self, ctx: Any, axis: int) -> Self:
        wide = self.wide()
        if 0 in self.shape:
            return ctx.own(wide.clone(), self.dtype)
        shifted = wide - paddle.max(wide, axis, keepdim=True)
        weights = paddle.exp(shifted)  # which is e^-88 for whatever is less, and paddle's softmax e^-64
        weights = paddle.where(shifted < -104, paddle.zeros_like(weights), weights)  # 0 in float32
        return ctx.own(weights / paddle.sum(weights, axis, keepdim=True), self.dtype)

    def _reduce(self, ctx: Any, op: str, axis: int, keepdims: bool) -> Self:
        wide = self.wide()
        if op == "argmax":
            return ctx.own(paddle.argmax(wide, axis, keepdim=keepdims), DType.I32)
        if op == "max":
            return ctx.own(paddle.max(wide, axis, keepdim=keepdims), self.dtype)
        if self.dtype.is_float:
            return ctx.own(getattr(paddle, op)(wide.astype("float64"), axis, keepdim=keepdims), self.dtype)
        return ctx.own(paddle.sum(wide.astype("int64"), axis, keepdim=keepdims), DType.I64)

    def _argsort(self, ctx: Any, axis: int) -> Self:
        return ctx.own(paddle.argsort(self.wide(), axis, stable=True), DType.I32)

    def _top_k(self, ctx: Any, k: int) -> tuple[Self, Self]:
        order = paddle.argsort(self.wide(), -1, descending=True, stable=True)[..., :k]
        values = paddle.take_along_axis(self.wide(), order, -1)
        return ctx.own(values, self.dtype), ctx.own(order, DType.I32)

    def _rms_norm(self, ctx: Any, weight: Self | None, eps: float) -> Self:
        wide = self.wide()
        mean = (wide * wide).sum(-1, keepdim=True) / max(1, self.shape[-1])
        wide = wide / UNARY["sqrt"](mean + eps).astype("float32")
        return ctx.own(wide if weight is None else wide * weight.wide(), self.dtype)

    def _compare(self, ctx: Any, op: str, other: Self) -> Self:
        return ctx.own(COMPARE[op](self.wide(), other.wide()), DType.BOOL)

    def _where(self, ctx: Any, a: Self, b: Self) -> Self:
        return ctx.own(paddle.where(self.native, a.wide(), b.wide()), a.dtype)


def cast(array: paddle.Tensor, dtype: DType) -> paddle.Tensor:
    """``array`` in a dtype: itself, where it is in that. To F16 and BF16 by way of F32."""
    if array.dtype == PADDLE[dtype]:
        return array
    if dtype in (DType.F16, DType.BF16):
        array = array.astype(paddle.float32)
    if dtype is DType.F16:  # Paddle makes 1e-7 of 1e-27
        nothing = paddle.multiply(array, paddle.zeros([]))  # array * 0 would lose the sign of -0.0
        array = paddle.where(paddle.abs(array) < 2.0**-25, nothing, array)
    return array.astype(PADDLE[dtype])


BINARY = {"add": paddle.add, "sub": paddle.subtract, "mul": paddle.multiply, "div": paddle.divide}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": paddle.less_than, "le": paddle.less_equal, "gt": paddle.greater_than, "ge": paddle.greater_equal,
    "eq": lambda x, y: (x <= y).logical_and(x >= y),  # Paddle's equal has a tolerance
    "ne": lambda x, y: (x <= y).logical_and(x >= y).logical_not(),
}  # fmt: skip
UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": paddle.exp, "log": paddle.log, "sin": paddle.sin, "cos": paddle.cos, "tanh": paddle.tanh,
    "sigmoid": functional.sigmoid, "silu": functional.silu, "abs": paddle.abs,
    "neg": lambda x: paddle.multiply(x, paddle.full([], -1, x.dtype)),  # of 0.0, Paddle's own neg makes 0.0
    "relu": lambda x: paddle.where(x < 0, paddle.zeros_like(x), x),  # and its relu 0 of NaN
    "sqrt": lambda x: paddle.sqrt(x.astype("float64")),  # in float32 it makes NaN of infinity
    "round": lambda x: paddle.round(x) if x.dtype == paddle.float32 else x.clone(),
}  # fmt: skip
