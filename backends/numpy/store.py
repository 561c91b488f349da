"""Writes K and V of one layer together, for the decode loop: two views and two copies with little
overhead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.numpylike import ArrayTensor
from ml.base import BaseBackend
from ml.dtypes import DType
from ml.protocols import Tensor
from ml.strided import overlaps_itself


class NumpyKVStore:
    """See ``ml.KVRowStore``; over two tensors (rows, heads, dim) of one backend."""

    __slots__ = ("_backend", "_key", "_key_shape", "_kind", "_rows", "_value", "_value_shape")

    def __init__(self, backend: BaseBackend, key: ArrayTensor, value: ArrayTensor) -> None:
        self._backend, self._kind = backend, type(key)
        self._key, self._value = key, value
        self._rows, self._key_shape, self._value_shape = key.shape[0], key.shape[1:], value.shape[1:]

    @classmethod
    def over(cls, backend: BaseBackend, key: ArrayTensor, value: ArrayTensor) -> NumpyKVStore | None:
        """None unless both are floats of one dtype in separate memory without repeated elements."""
        if key.dtype is not value.dtype or not key.dtype.is_float:
            return None
        for half in (key, value):
            if not half.storage.owned or overlaps_itself(half.shape, half.strides):
                return None
        return cls(backend, key, value)

    def write(self, ctx: Any, start: int, count: int, key: Any, value: Any) -> bool:
        inside = 0 <= start <= self._rows - count
        return inside and self._write(ctx, slice(start, start + count), count, key, value)

    def write_rows(self, ctx: Any, rows: Any, key: Any, value: Any) -> bool:
        if type(rows) is not self._kind or rows.backend is not self._backend or rows.dtype is not DType.I32:
            return False
        shape = rows.shape
        return len(shape) == 1 and self._write(ctx, rows.native, shape[0], key, value)

    def _write(self, ctx: Any, where: slice | np.ndarray, count: int, key: Any, value: Any) -> bool:
        backend, kind = self._backend, self._kind
        if (
            type(key) is not kind
            or type(value) is not kind
            or not key.backend is value.backend is ctx.active_backend is backend
            or backend.closed
            or count < 1
            or key.shape != (count, *self._key_shape)
            or value.shape != (count, *self._value_shape)
            or self._has(key)
            or self._has(value)
        ):
            return False
        if key.dtype is value.dtype is self._key.dtype:
            self._key.native[where] = key.native
            self._value.native[where] = value.native
            return True
        if not (key.dtype.is_float and value.dtype.is_float):
            return False
        with np.errstate(all="ignore"):
            self._key.native[where] = key.native
            self._value.native[where] = value.native
        return True

    def _has(self, tensor: ArrayTensor) -> bool:
        """Whether a tensor may overlap the memory to be written."""
        storage, ours = tensor.storage, (self._key, self._value)
        if storage.owned:
            return storage is ours[0].storage or storage is ours[1].storage
        return any(np.may_share_memory(tensor.native, own.native) for own in ours)

    def read(self, ctx: Any, start: int, count: int) -> tuple[Tensor, Tensor] | None:
        if ctx.active_backend is not self._backend or self._backend.closed:
            return None
        if not 0 <= start <= self._rows - count or count < 1:
            return None
        return self._shown(self._key, start, count), self._shown(self._value, start, count)

    def _shown(self, half: ArrayTensor, start: int, count: int) -> Tensor:
        steps, shape = half.strides, (count, *half.shape[1:])
        return self._kind(half.storage, half.dtype, half.offset + start * steps[0], shape, steps)
