"""Tensors that keep their geometry in Python, over a storage of the backend."""

from __future__ import annotations

from typing import Any, Self

from ml.base.backend import Storage
from ml.base.tensor import BaseTensor
from ml.dtypes import DType
from ml.strided import Shape, contiguous_strides


class StorageView:
    """A dtype, an offset, a shape and strides over a ``Storage``; ``native`` is built on demand.

    ``offset`` and ``strides`` count elements of ``storage.array``. Views are created without calling the
    framework, so a backend must not cache data of a storage that it replaces on a write.
    """

    __slots__ = ("_native", "backend", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, dtype: DType, offset: int, shape: Shape, strides: Shape, native: Any = None
    ) -> None:
        self.storage = storage
        self.backend = storage.backend
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.strides = strides
        self._native = native

    @classmethod
    def whole(cls, storage: Storage, dtype: DType, shape: Shape) -> Self:
        """The C-contiguous tensor over a whole storage."""
        return cls(storage, dtype, 0, shape, contiguous_strides(shape))

    def _storage_size(self) -> int:
        return self.storage.size

    def _first(self) -> int:
        return self.offset

    def _alias(self, offset: int, shape: Shape, strides: Shape) -> Self:
        return type(self)(self.storage, self.dtype, offset, shape, strides)


class StridedTensor(StorageView, BaseTensor):
    """The tensor of a framework without strides of its own: a ``StorageView`` keeps them."""

    __slots__ = ()
