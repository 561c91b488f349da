"""A storage of MLX: a box that holds the array of the moment.

MLX arrays are values. A write makes a new array, and MLX reuses the memory of the old one
("donation") if, when the write is scheduled, nothing else refers to that memory: no other Python
object, no node of a graph, no work in flight. Everything here serves that condition:

- a view is geometry only, and its array is built when it is read and dropped after;
- a write replaces the array in the box, so that the graph alone refers to the old one;
- before a large box is written, the reads of it that are still pending or in flight are let
  finish (see :meth:`Box.write`). Otherwise MLX would copy the whole buffer to keep the order.
"""

from __future__ import annotations

import math
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from ml.base import Storage
from ml.strided import Shape, contiguous_strides, regular_region

if TYPE_CHECKING:
    from backends.mlx.backend import MlxBackend

__all__ = ["Box", "Region", "region_of"]

WAIT_BYTES = 1 << 18
"""A smaller box is copied faster than reads of it are waited for."""


class Box(Storage):
    """The current array of an allocation, C-contiguous in the shape it was allocated in.

    ``raw``: the array is some operation's result, whose layout in memory MLX does not tell; it
    is put in C order once, when a view first needs it (nothing is copied where it was already).
    """

    __slots__ = ("nbytes", "raw", "read_at", "shape")

    array: mx.array
    backend: MlxBackend

    def __init__(
        self, backend: MlxBackend, array: mx.array, shape: Shape, raw: bool = True, owned: bool = True
    ) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.nbytes = array.nbytes
        self.shape = shape
        self.raw = raw
        self.read_at = 0
        backend.boxes[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        self.backend.boxes.pop(id(self), None)
        super().__del__()

    def read(self, offset: int, shape: Shape, strides: Shape) -> mx.array:
        """The view's array: an alias of the buffer, to be dropped before the next write."""
        self.read_at = self.backend.epoch
        if shape == self.shape and offset == 0 and strides == contiguous_strides(shape):
            return self.array
        stream = self.backend.stream
        if 0 in shape:
            return mx.zeros(shape, self.array.dtype, stream=stream)
        if offset == 0 and math.prod(shape) == self.size and strides == contiguous_strides(shape):
            return mx.reshape(self.array, shape, stream=stream)
        if self.raw:
            self._settle_layout()
        return mx.as_strided(self.array, shape, strides, offset, stream=stream)

    def write(self, offset: int, shape: Shape, strides: Shape, value: mx.array) -> None:
        """Put ``value``, of this dtype and in the axis order of ``region_of(...)``, into the view.

        Must not be given an alias of this box's own buffer: MLX would copy the buffer whole.
        """
        region = region_of(self.shape, offset, shape, strides)
        if region is None:
            self._put_elements(_element_offsets(offset, shape, strides), value)
            return
        with self.backend.lock:
            self._before_write(value)
            stream, axes = self.backend.stream, tuple(range(len(region.base)))
            array = value if not axes else mx.reshape(value, region.sizes, stream=stream)
            if axes:
                start = mx.array(region.start, mx.int64 if self.size > _INT32 else mx.int32)
                reshaped = region.base != self.shape
                if reshaped:
                    self.array = mx.reshape(self.array, region.base, stream=stream)
                self.array = mx.slice_update(self.array, array, start, axes, stream=stream)
                if reshaped:
                    self.array = mx.reshape(self.array, self.shape, stream=stream)
            else:
                self.array = mx.reshape(array, self.shape, stream=stream)
            self.backend.defer(self, value.nbytes)
