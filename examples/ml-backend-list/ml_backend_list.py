"""A backend on Python lists: what a plugin must implement to store tensors, and nothing else.

A storage is one flat list of Python numbers. A tensor is an offset, a shape and strides over it,
which ``StridedTensor`` keeps. The rest is reading, writing, and declaring what is absent.
"""

from __future__ import annotations

import math
import platform
from typing import Any, Self

import numpy as np

from ml import Availability, Backend, BackendSpec, DeviceError, DeviceInfo, DType, Features, hookimpl
from ml.base import BaseBackend, BaseContext, Storage, StridedTensor
from ml.strided import Shape

__all__ = ["ListBackend", "ListContext", "ListTensor", "ml_backend"]

FEATURES = Features(absent=frozenset({"compute", "from_native"}))
"""What is left out here raises NotSupportedError by itself: the base class sees to that."""


class ListBackend(BaseBackend):
    """``open_backend("list", device="cpu", dtype=DType.F32)``."""

    features = FEATURES

    def __init__(self, device: str = "cpu", dtype: DType = DType.F32) -> None:
        if device != "cpu":
            raise DeviceError(f"open_backend: list has no device {device!r}; its one device is 'cpu'")
        super().__init__("list", (DeviceInfo("cpu", "cpu", "Python lists"),), dtype)

    def _new_context(self, max_graph_nodes: int) -> ListContext:
        return ListContext(self, max_graph_nodes)


class ListContext(BaseContext):
    """Creation. ``zeros``, ``empty``, ``arange`` and ``from_bytes`` all end in one of these."""

    def _from_array(self, array: np.ndarray, dtype: DType) -> ListTensor:
        return self.wrap(array.ravel().tolist(), array.shape, dtype)

    def _full(self, shape: Shape, value: float, dtype: DType) -> ListTensor:
        numbers = convert([value], np.array(value).dtype, dtype)
        try:
            return self.wrap(numbers * math.prod(shape), shape, dtype)
        except (MemoryError, OverflowError) as error:
            raise DeviceError(f"allocate: {shape} of {dtype!r}: too many for a list ({error})") from error

    def wrap(self, numbers: list[Any], shape: Shape, dtype: DType) -> ListTensor:
        """A tensor of new storage; Storage counts its bytes for ``Backend.memory()``."""
        storage = Storage(self.backend, numbers, len(numbers), len(numbers) * dtype.itemsize)
        return ListTensor.whole(storage, dtype, shape)


class ListTensor(StridedTensor):
    """Reading and writing. View, slice, permute, reshape, cast, concat and repeat stand on these."""

    __slots__ = ()

    @property
    def native(self) -> list[Any]:
        """The elements in C order: a flat list of its own, as ``Features`` declares no ``from_native``."""
        self.backend.check("native")
        return [self.storage.array[place] for place in self.places()]

    def to_numpy(self) -> np.ndarray:
        return np.array(self.native, self.dtype.numpy).reshape(self.shape)

    def places(self, rows: Any = None, axis: int = 0) -> list[int]:
        """Where in the storage each element lies, in C order; along ``axis`` only ``rows``, if given."""
        places = [self.offset]
        for i, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = range(size) if rows is None or i != axis else rows
            places = [place + step * stride for place in places for step in steps]
        return places

    def write_from(self, src: Self) -> None:
        self.put(self.places(), src)

    def _gather(self, ctx: ListContext, indices: Any, axis: int) -> ListTensor:
        rows = listed(indices)
        numbers = [self.storage.array[place] for place in self.places(rows, axis)]
        return ctx.wrap(numbers, (*self.shape[:axis], len(rows), *self.shape[axis + 1 :]), self.dtype)

    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        self.put(self.places(listed(indices), axis), src)

    def put(self, places: list[int], src: Self) -> None:
        numbers = convert(src.native, src.dtype.numpy, self.dtype)  # all is read before anything is written
        for place, number in zip(places, numbers, strict=True):
            self.storage.array[place] = number


def listed(indices: Any) -> list[int]:
    """Indices are a NumPy array that was checked, or a tensor of ours."""
    return indices.native if isinstance(indices, ListTensor) else indices.tolist()


def convert(numbers: list[Any], source: np.dtype, target: DType) -> list[Any]:
    """The numbers as ``target`` holds them; integers reach F16 and BF16 by way of F32."""
    host = np.array(numbers, source)
    with np.errstate(all="ignore"):  # infinity is a value
        if source.kind in "iu" and target.is_float:
            host = host.astype(np.float32)
        converted: list[Any] = host.astype(target.numpy).tolist()
    return converted


# The record: it imports nothing that may be missing, so that a missing framework is only a reason.


def probe() -> Availability:
    return Availability(True, version=platform.python_version(), devices=("cpu",))


def open_list(**options: Any) -> Backend:
    return ListBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("list", -10, (), "pip install ml-backend-list", probe, open_list, FEATURES)
