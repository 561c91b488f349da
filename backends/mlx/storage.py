"""A storage of MLX: a box that holds the array of the moment.

MLX arrays are values. A write makes a new array, and MLX reuses the memory of the old one
("donation") if, at the moment the write is scheduled, nothing else refers to that memory: no
other Python object, no node of a graph, no work in flight. Everything here serves that condition:

- a view is geometry only; its array is built when it is read, and dropped after;
- a write replaces the array in the box, so that only the graph refers to the old one;
- before a large box is written, reads of it that are pending or in flight are let finish, and so
  are earlier writes in flight: MLX would otherwise copy the whole buffer. Writes that are not
  scheduled yet chain up without a copy.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from backends.mlx.regions import Region, is_contiguous, region_of
from ml.base import Storage
from ml.errors import ClosedError, DeviceError
from ml.strided import Shape, contiguous_strides

if TYPE_CHECKING:
    from backends.mlx.backend import MlxBackend

__all__ = ["SIZE_LIMIT", "WAIT_BYTES", "Box"]

WAIT_BYTES = 1 << 20
"""A smaller box is copied in less time than it takes to wait for what is in flight."""


SIZE_LIMIT = 2**31 - 1
"""Elements of a storage: MLX counts an axis, and so a flat storage, in 32 bits."""


class Box(Storage):
    """The current array of an allocation, in the shape it was allocated in.

    ``raw`` says that the array is some operation's result, whose layout in memory MLX does not
    tell. It is put in C order once, when a strided view or a write first needs that; where it is
    so already, nothing is copied. ``borrowed``: it came through ``from_native``, and is not counted.
    ``private_at``: from this epoch on nobody else has the array's memory, if no operation has used it since.
    """

    __slots__ = ("borrowed", "nbytes", "private_at", "raw", "read_at", "shape", "written_at")

    array: Any
    backend: MlxBackend

    def __init__(self, backend: MlxBackend, array: Any, raw: bool = True, owned: bool = True) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.nbytes: int = array.nbytes
        self.shape: Shape = array.shape
        self.raw = raw
        self.borrowed = not owned
        self.read_at = self.private_at = 0
        self.written_at = backend.epoch
        backend.boxes[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        super().__del__()
        self.backend.boxes.pop(id(self), None)

    def read(self, offset: int, shape: Shape, strides: Shape) -> Any:
        """The array of a view. It aliases the buffer: to be dropped before the next write."""
        self.read_at = self.backend.epoch
        stream = self.backend.stream
        if 0 in shape:
            return mx.zeros(shape, self.array.dtype, stream=stream)
        if offset == 0 and is_contiguous(shape, strides):
            if shape == self.shape:
                return self.array
            if math.prod(shape) == self.size:
                return mx.reshape(self.array, shape, stream=stream)
        if self.raw:
            self._settle_layout()
        if math.prod(shape) > SIZE_LIMIT:  # of a repeating view; MLX would end the process
            raise DeviceError(f"read: {shape} shows {math.prod(shape)} elements; MLX counts {SIZE_LIMIT}")
        return mx.as_strided(self.array, shape, strides, offset, stream=stream)

    def put_block(self, region: Region, value: Any) -> None:
        """``self[region] = value``. ``value`` has the region's sizes, and is no alias of this buffer."""
        with self.backend.lock:
            self.prepare_write(value)
            self.array = self._with_block(region, value)
            self.backend.defer(self, value.nbytes)

    def put_layers(self, axis: int, indices: Any, value: Any) -> None:
        """``self[..., indices, ...] = value`` along an axis of the allocation."""
        with self.backend.lock:
            self.prepare_write(value)
            column = tuple(-1 if k == axis else 1 for k in range(len(self.shape)))
            layers = mx.reshape(indices, column, stream=self.backend.stream)
            self.array = mx.put_along_axis(self.array, layers, value, axis, stream=self.backend.stream)
            self.backend.defer(self, value.nbytes)

    def put_elements(self, offsets: Any, value: Any) -> None:
        """Write each element of ``value`` at its offset in the storage."""
        with self.backend.lock:
            self.prepare_write(value)
            self.array = self._with_elements(offsets, value)
            self.backend.defer(self, value.nbytes)

    def memory(self, offset: int) -> Any:
        """The array's bytes in host memory (uint8, flat); the element at ``offset`` is lost.

        MLX lets arrays share memory: a result with its operand, a value with what it was written into
        whole. Only a write of MLX's own finds out, and copies then: that of one element, before the first
        byte is touched from outside.
        """
        with self.backend.lock:
            if self.private_at <= max(self.read_at, self.written_at):
                size = (1,) * len(self.shape)
                region = region_of(self.shape, offset, size, contiguous_strides(self.shape))
                assert region is not None
                self.put_block(region, mx.zeros(region.sizes, self.array.dtype, stream=self.backend.stream))
                self.backend.drain(self.backend.epoch)
                self.private_at = self.backend.epoch
            return np.frombuffer(self.array, np.uint8)

    # The old array must not outlive the assignment in a local variable: hence functions of their own.

    def _with_block(self, region: Region, value: Any) -> Any:
        array, stream = self.array, self.backend.stream
        if region.base != self.shape:
            array = mx.reshape(array, region.base, stream=stream)
        array = mx.slice_update(array, value, region.start, region.axes, stream=stream)
        return array if region.base == self.shape else mx.reshape(array, self.shape, stream=stream)

    def _with_elements(self, offsets: Any, value: Any) -> Any:
        stream = self.backend.stream
        flat = mx.reshape(self.array, (-1,), stream=stream)
        offsets, value = (mx.reshape(x, (-1,), stream=stream) for x in (offsets, value))
        return mx.reshape(
            mx.put_along_axis(flat, offsets, value, 0, stream=stream), self.shape, stream=stream
        )

    def claim(self) -> bool:
        """Note a write where nothing has to happen before it; else False: it needs ``prepare_write``."""
        backend, written = self.backend, self.written_at
        if self.raw or self.borrowed or self.read_at > backend.drained or self.array is None:
            return False
        if backend.drained < written < backend.epoch:
            return False
        self.written_at = backend.epoch
        return True

    def prepare_write(self, value: Any) -> None:
        backend = self.backend
        if self.array is None:
            raise ClosedError(
                "write: the backend of this tensor is closed; open it again with ml.open_backend"
            )
        if self.raw:
            self._settle_layout()
        if self.borrowed:  # the write moves it to memory of our own, or the lender has let go of it
            self.borrowed = False
            backend.allocations[id(self)] = (self.device, self.nbytes)
        read, written = self.read_at > backend.drained, backend.drained < self.written_at < backend.epoch
        if (read or written) and self.nbytes >= WAIT_BYTES:
            backend.drain(self.written_at if written else 0)
            backend.drain(self.read_at, value)
        self.written_at = backend.epoch

    def _settle_layout(self) -> None:
        with self.backend.lock:
            self.array = mx.contiguous(self.array, stream=self.backend.stream)
            self.raw = False
