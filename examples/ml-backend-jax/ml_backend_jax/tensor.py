"""Tensors of JAX: geometry over a box that holds the array of the moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from ml.base import Storage, StridedTensor
from ml.strided import Region, contiguous_strides, find_region
from ml_backend_jax.kernels import read_any, read_box, write_any, write_box

if TYPE_CHECKING:
    from ml_backend_jax.backend import JaxBackend

__all__ = ["Box", "JaxTensor"]


class Box(Storage):
    """One allocation. A write puts a new array in the box and gives it the memory of the old one.

    ``lent`` says that someone outside holds the array: the next write then leaves it alone.
    """

    __slots__ = ("lent",)
    backend: JaxBackend
    array: Any

    def __init__(self, backend: JaxBackend, array: jax.Array, owned: bool = True) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.lent = not owned
        backend.boxes.add(self)

    def update(self, kernel: Callable[..., Any], src: JaxTensor, *operands: Any) -> None:
        """``array = kernel(array, src, ...)``, in place where nobody else needs what was there."""
        with self.backend.dispatching("write"):
            arrays = [x.read() if isinstance(x, JaxTensor) else x for x in (src, *operands)]
            if self.lent or arrays[0] is self.array:
                self.array, self.lent = self.array.copy(), False
            self.array = kernel(self.array, *arrays)


def hook(kernel: str) -> Any:
    """A hook of the base class that is one kernel, which takes the hook's arguments as they come."""

    def method(self: JaxTensor, ctx: Any, *arguments: Any) -> Any:
        return self.backend.run(kernel, self, *arguments)

    return method


class JaxTensor(StridedTensor):
    __slots__ = ()
    storage: Box
    backend: JaxBackend

    @property
    def native(self) -> Any:
        self.backend.check("native")
        with self.backend.dispatching("native"):
            array = self.read()
            self.storage.lent |= array is self.storage.array
            return array

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        with self.backend.dispatching("to_numpy"):
            if not self.backend.on_host:
                return np.array(self.read(), order="C")
            flat = np.asarray(self.storage.array).reshape(-1)[self.offset :]  # on a CPU: no copy
            steps = [stride * flat.itemsize for stride in self.strides]
            return np.array(np.lib.stride_tricks.as_strided(flat, self.shape, steps), order="C")

    def read(self) -> Any:
        """The array of the moment: to be used at once, inside ``backend.dispatching``."""
        array, shape = self.storage.array, self.shape
        if shape == array.shape and self.strides == contiguous_strides(shape):
            return array
        if 0 in shape:
            return np.zeros(shape, array.dtype)
        if (region := self.region()) is None:
            return read_any(array, self.where(), shape)
        base, start, sizes, steps, axes = region
        return read_box(array, np.array(start, np.int32), base, sizes, steps, axes, shape)

    def region(self) -> Region | None:
        return find_region(self.storage.array.shape, self.offset, self.shape, self.strides)

    def where(self) -> np.ndarray:
        return np.array([self.offset, *self.strides], np.int32 if self.storage.size < 1 << 31 else np.int64)

    def _write(self, src: Self) -> None:
        if 0 in self.shape:
            return
        region = self.region()
        if region is None or set(region.steps) > {1}:
            self.storage.update(write_any, src, self.where())
        else:
            start = np.array(region.start, np.int32)
            self.storage.update(write_box, src, start, region.base, region.sizes, region.axes)

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        if 0 not in src.shape:
            self.storage.update(write_any, src, self.where(), indices, axis)

    _gather = hook("take")
    _concat = hook("concat")
    _repeat = hook("repeat")
    _cast = hook("cast")
    _binary = hook("elementwise")
    _unary = hook("elementwise")
    _scale = hook("scale")
    _gelu = hook("gelu")
    _clamp = hook("clamp")
    _matmul = hook("matmul")
    _softmax = hook("softmax")
    _reduce = hook("reduce")
    _argsort = hook("argsort")
    _top_k = hook("top_k")
    _rms_norm = hook("rms_norm")
    _compare = hook("compare")
    _where = hook("where")
