"""Tensor on CuPy arrays.

A storage is a MemoryPointer, so that a strided view of any dtype is one ``cupy.ndarray`` over it.
CuPy's support of BF16 is new, so it is used only for casts from and to F32. Movement treats the bits of BF16
as integers, and computations and comparisons use F32 (products: cuBLAS).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, cast

import cupy
import numpy as np
from cupyx.scipy.special import erf

from backends.cupy.devices import Place
from backends.cupy.products import narrow_product
from backends.numpylike import ArrayTensor
from ml.base import BaseContext, Storage
from ml.dtypes import DType
from ml.strided import Shape, contiguous_strides

_BITS = np.dtype(np.uint16)


class CupyTensor(ArrayTensor):
    __slots__ = ()
    xp = cupy

    @classmethod
    def own(cls, ctx: BaseContext, array: Any, dtype: DType) -> Self:
        whole = array if array.flags.c_contiguous else cupy.ascontiguousarray(array)
        storage = Storage(ctx.backend, whole.data, whole.size, whole.nbytes, ctx.device_index)
        return cls.whole(storage, dtype, whole.shape)  # our own native: elements moved as bits are BF16

    @property
    def native(self) -> Any:
        """A cupy.ndarray that aliases the storage."""
        if self._native is None:
            itemsize = self.dtype.itemsize
            memory = self.storage.array
            self._native = cupy.ndarray(  # built once, then kept
                self.shape,
                self.dtype.numpy,
                memptr=memory + self.offset * itemsize if self.storage.size else memory,
                strides=_byte_strides(self.shape, self.strides, itemsize),
            )
        return self._native

    @property
    def place(self) -> Place:
        """The device of the storage."""
        return cast("Place", self.backend.places[self.storage.device])  # type: ignore[attr-defined]

    @property
    def device(self) -> str:
        return self.place.name

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        with self.place.work("to_numpy"):
            host: np.ndarray = cupy.asnumpy(self._bits(self.native))
        return host.view(self.dtype.numpy)

    def __dlpack__(self, **options: Any) -> Any:
        with self.place.work("dlpack"):  # the consumer waits for the stream that is current here
            return super().__dlpack__(**options)

    def moved(self, place: Place) -> Self:
        """This tensor, or a copy of it on another device of the backend."""
        if self.place is place:
            return self
        with self.place.work("move"):
            source = cupy.ascontiguousarray(self._bits(self.native))
        self.place.synchronize()
        with place.work("move", f"{source.nbytes} bytes: "):
            target = cupy.cuda.alloc(source.nbytes)
            target.copy_from_device_async(source.data, source.nbytes)
        place.synchronize()  # before the source's memory may be used again
        index = self.backend.places.index(place)  # type: ignore[attr-defined]
        return self.whole(
            Storage(self.backend, target, source.size, source.nbytes, index), self.dtype, self.shape
        )

    # Differences from NumPy.

    def _bits(self, array: Any) -> Any:
        return array.view(_BITS) if array.dtype == DType.BF16.numpy else array

    def bits(self) -> Any:
        """The array, BF16 as integers."""
        return self._bits(self.native)

    def values(self) -> Any:
        return self.wide()

    def _bridge(self, array: Any, source: DType, target: DType) -> Any:
        """CuPy's narrow floats are C++ classes, of which only the conversions from and to F32 are used. Its
        kernels are compiled with ``-ftz=true``, which flushes subnormal numbers to 0, so a float is true if
        its bits without the sign are not 0.
        """
        if target is DType.BOOL and source.is_float:
            return cupy.left_shift(array.view(np.uint32 if source is DType.F32 else _BITS), 1)
        narrow = (DType.F16, DType.BF16)
        via = source is not target and DType.F32 not in (source, target)
        return array.astype(np.float32) if via and (source in narrow or target in narrow) else array

    def _index(self, indices: Any) -> Any:
        return indices.native if isinstance(indices, CupyTensor) else cupy.asarray(indices)

    def _order(self, x: Any, axis: int) -> Any:
        return cupy.argsort(x, axis=axis)  # always stable

    def _largest(self, x: Any, k: int) -> Any:
        # A stable ascending sort of the reversed axis, read backwards: ties keep their order.
        size = x.shape[-1]
        return size - 1 - self._order(x[..., ::-1], -1)[..., : size - k - 1 if k < size else None : -1]

    def _erf(self, x: Any) -> Any:
        return erf(x)

    def _matmul(self, ctx: Any, other: Self) -> Self:
        """F16 and BF16 are read in place: see products.py."""
        left, right = self.bits(), other.bits()
        if self.dtype is DType.F32 or not (left.size and right.size):
            return super()._matmul(ctx, other)
        left = left if left.ndim > 1 else left[None]
        right = right if right.ndim > 1 else right[:, None]
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        out = cupy.ndarray((*batch, left.shape[-2], right.shape[-1]), np.float32)
        narrow_product(left, right, self.dtype, out)
        rows = () if len(self.shape) == 1 else out.shape[-2:-1]
        columns = () if len(other.shape) == 1 else out.shape[-1:]
        return self._result(ctx, out.reshape((*batch, *rows, *columns)), self.dtype)

    # Empty arrays, which CuPy refuses or treats inconsistently.

    def _reduce(self, ctx: Any, op: str, axis: int, keepdims: bool) -> Self:
        if 0 not in self.shape:
            return super()._reduce(ctx, op, axis, keepdims)
        shape = (*self.shape[:axis], *((1,) if keepdims else ()), *self.shape[axis + 1 :])
        dtype = (
            DType.I32
            if op == "argmax"
            else DType.I64
            if not self.dtype.is_float and op == "sum"
            else self.dtype
        )
        return cast("Self", ctx.zeros(shape, dtype))

    def _argsort(self, ctx: Any, axis: int) -> Self:
        return (
            super()._argsort(ctx, axis)
            if 0 not in self.shape
            else cast("Self", ctx.empty(self.shape, DType.I32))
        )

    def _top_k(self, ctx: Any, k: int) -> tuple[Self, Self]:
        if 0 not in self.shape:
            return super()._top_k(ctx, k)
        shape = (*self.shape[:-1], k)
        return cast("Self", ctx.empty(shape, self.dtype)), cast("Self", ctx.empty(shape, DType.I32))


@functools.lru_cache(maxsize=4096)
def _byte_strides(shape: Shape, strides: Shape, itemsize: int) -> Shape:
    """cuBLAS uses the stride of an axis of size 1 as a leading dimension, so it must be valid."""
    usual = contiguous_strides(shape)
    chosen = (u if size == 1 else s for size, s, u in zip(shape, strides, usual, strict=True))
    return tuple(stride * itemsize for stride in chosen)


_FAMILIES = ("_binary", "_unary", "_reduce", "_compare")
"""Methods with an argument for the operation."""


def _placed(name: str) -> Callable[..., Any]:
    """Run the method on the device of its context, after moving operands from other devices."""
    method: Callable[..., Any] = getattr(CupyTensor, name)

    @functools.wraps(method)
    def run(self: CupyTensor, ctx: Any, *args: Any) -> Any:
        place = ctx.place
        with place.work(args[0] if name in _FAMILIES else name[1:]):
            if len(ctx.backend.places) > 1:
                self, *args = (_moved(value, place) for value in (self, *args))  # type: ignore[assignment]
            return method(self, ctx, *args)

    return run


def _written(name: str) -> Callable[..., Any]:
    """Run the method on the device of the destination."""
    method: Callable[..., Any] = getattr(CupyTensor, name)

    @functools.wraps(method)
    def run(self: CupyTensor, *args: Any) -> None:
        with self.place.work(name.lstrip("_")):
            if len(self.backend.places) > 1:  # type: ignore[attr-defined]
                args = tuple(_moved(value, self.place) for value in args)
            method(self, *args)

    return run


def _moved(value: Any, place: Place) -> Any:
    return value.moved(place) if isinstance(value, CupyTensor) else value


for _name in ("write_from", "_scatter"):
    setattr(CupyTensor, _name, _written(_name))
for _name in (
    "_gather", "_concat", "_repeat", "_cast", "_binary", "_unary", "_scale", "_gelu", "_clamp", "_matmul",
    "_softmax", "_reduce", "_argsort", "_top_k", "_rms_norm", "_compare", "_where",
):  # fmt: skip
    setattr(CupyTensor, _name, _placed(_name))
