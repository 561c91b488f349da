"""JAX tensors: geometry over a box that holds the current array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from ml.base import Storage, StridedTensor
from ml.strided import contiguous_strides, find_region
from ml_backend_jax.kernels import read_any, read_box, write_any, write_box


class Box(Storage):
    """One allocation. A write puts a new array in the box and gives it the memory of the old one.

    ``lent`` says that someone outside holds the array: the next write then leaves it alone.
    """

    __slots__ = ("lent",)
    backend: Any
    array: Any

    def __init__(self, backend: Any, array: jax.Array, owned: bool = True) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.lent = not owned
        backend.boxes.add(self)

    def update(self, kernel: Callable[..., Any], src: JaxTensor, *operands: Any) -> None:
        """``array = kernel(array, src, ...)``, in place where nobody else needs what was there."""
        with self.backend.dispatching("write"):
            arrays = [x.read() if isinstance(x, JaxTensor) else x for x in (src, *operands)]
            if self.lent or any(array is self.array for array in arrays):
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
    backend: Any

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
            return jax.device_put(np.zeros(shape, array.dtype), self.backend.device)
        if box := self.box():
            return read_box(array, *box, shape)
        return read_any(array, self.at(), shape)

    def write_from(self, src: Self) -> None:
        if 0 not in self.shape:
            box = self.box()
            self.storage.update(write_box if box else write_any, src, *(box or (self.at(),)))

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        if 0 not in src.shape:
            self.storage.update(write_any, src, self.at(), indices, axis)

    def box(self) -> tuple[Any, ...] | None:
        """Where the view lies in its storage, if it is a box without gaps."""
        found = find_region(self.storage.array.shape, self.offset, self.shape, self.strides)
        if found is None or max(found.steps, default=1) > 1:
            return None
        return np.array(found.start, np.int32), found.base, found.sizes, found.axes

    def at(self) -> np.ndarray:
        return np.array([self.offset, *self.strides], np.int32 if self.storage.size < 1 << 31 else np.int64)

    # Hooks that are one kernel each.

    _gather = hook("take")
    _concat = hook("concat")
    _repeat = hook("repeat")
    _cast = hook("cast")
    _binary = _unary = hook("elementwise")
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
