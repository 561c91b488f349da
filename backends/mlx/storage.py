"""A storage of MLX: it holds the array of the moment.

MLX arrays are values. A write makes a new array, and MLX reuses the memory of the old one
("donation") if, at the moment the write is scheduled, nothing else refers to that memory: no
other Python object, no node of a graph, no work in flight. Everything here serves that condition:

- a view is geometry only; its array is built when it is read, and dropped after;
- a write replaces the array in the storage, so that only the graph refers to the old one;
- before a write to a large storage is scheduled, reads of it in flight are let finish, and so are earlier
  writes in flight: MLX would otherwise copy the whole buffer. Nobody waits for that before the graph of
  a pass is built (``MlxWork.hold``). Writes that are not scheduled yet chain up without a copy.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Self

import mlx.core as mx
import numpy as np

from backends.mlx.regions import Region, is_contiguous, may_overlap, region_of
from backends.mlx.work import MlxWork
from ml.base import BaseBackend, Storage
from ml.errors import ClosedError, DeviceError
from ml.strided import Shape, contiguous_strides

WAIT_BYTES = 1 << 20
"""A smaller storage is copied in less time than it takes to wait for what is in flight."""


SIZE_LIMIT = 2**31 - 1
"""Elements of a storage: MLX counts an axis, and so a flat storage, in 32 bits."""


class MlxStorage(Storage):
    """The current array of an allocation, in the shape it was allocated in.

    ``raw`` says that the array is some operation's result, whose layout in memory MLX does not
    tell. It is put in C order once, when a strided view or a write first needs that; where it is
    so already, nothing is copied. ``borrowed``: it came through ``from_native``, and is not counted.
    ``private_at``: from this epoch on nobody else has the array's memory, if no operation has used it since.
    """

    __slots__ = ("borrowed", "nbytes", "private_at", "raw", "read_at", "shape", "work", "written_at")

    array: Any

    def __init__(
        self, backend: BaseBackend, work: MlxWork, array: Any, raw: bool = True, owned: bool = True
    ) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.work = work
        self.nbytes: int = array.nbytes
        self.shape: Shape = array.shape
        self.raw = raw
        self.borrowed = not owned
        self.read_at = self.private_at = 0
        self.written_at = work.epoch
        work.storages[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        super().__del__()
        if hasattr(self, "work"):  # an interrupt may come before __init__ is done
            self.work.storages.pop(id(self), None)

    @classmethod
    def around(cls, backend: BaseBackend, work: MlxWork, array: Any, raw: bool = True) -> Self:
        """A storage of a pending result; DeviceError where no memory of this machine could hold it."""
        if array.nbytes > work.limit or array.size > SIZE_LIMIT:
            # The system may promise memory that it has not, and end the process when it is touched.
            raise DeviceError(
                f"allocate: {array.nbytes} bytes for {array.shape} of {array.dtype}; "
                f"the device has {work.limit}, and MLX counts up to {SIZE_LIMIT} elements"
            )
        storage = cls(backend, work, array, raw)
        work.defer(storage)
        return storage

    def read(self, offset: int, shape: Shape, strides: Shape) -> Any:
        """The array of a view. It aliases the buffer: to be dropped before the next write."""
        self.read_at = self.work.epoch
        stream = self.work.stream
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
        found = mx.as_strided(self.array, shape, strides, offset, stream=stream)
        # MLX's reductions take axes of stride 1 for a row of their own, and write past their result.
        return mx.contiguous(found, stream=stream) if may_overlap(shape, strides) else found

    def put_block(self, region: Region, value: Any) -> None:
        """``self[region] = value``. ``value`` has the region's sizes, and is no alias of this buffer."""
        with self.work.lock:
            self.prepare_write(value)
            self.array = self._with_block(region, value)
            self.work.defer(self, value.nbytes)

    def put_layers(self, axis: int, indices: Any, value: Any) -> None:
        """``self[..., indices, ...] = value`` along an axis of the allocation."""
        with self.work.lock:
            self.prepare_write(value)
            column = tuple(-1 if k == axis else 1 for k in range(len(self.shape)))
            layers = mx.reshape(indices, column, stream=self.work.stream)
            self.array = mx.put_along_axis(self.array, layers, value, axis, stream=self.work.stream)
            self.work.defer(self, value.nbytes)

    def put_elements(self, offsets: Any, value: Any) -> None:
        """Write each element of ``value`` at its offset in the storage."""
        with self.work.lock:
            self.prepare_write(value)
            self.array = self._with_elements(offsets, value)
            self.work.defer(self, value.nbytes)

    def memory(self, offset: int) -> Any:
        """The array's bytes in host memory (uint8, flat); the element at ``offset`` is lost.

        MLX lets arrays share memory: a result with its operand, a value with what it was written into
        whole. Only a write of MLX's own finds out, and copies then: that of one element, before the first
        byte is touched from outside.
        """
        with self.work.lock:
            if self.private_at <= max(self.read_at, self.written_at):
                size = (1,) * len(self.shape)
                region = region_of(self.shape, offset, size, contiguous_strides(self.shape))
                assert region is not None
                self.put_block(region, mx.zeros(region.sizes, self.array.dtype, stream=self.work.stream))
                self.work.drain(self.work.epoch)
                self.private_at = self.work.epoch
            return np.frombuffer(self.array, np.uint8)

    # The old array must not outlive the assignment in a local variable: hence functions of their own.

    def _with_block(self, region: Region, value: Any) -> Any:
        array, stream = self.array, self.work.stream
        if region.base != self.shape:
            array = mx.reshape(array, region.base, stream=stream)
        array = mx.slice_update(array, value, region.start, region.axes, stream=stream)
        return array if region.base == self.shape else mx.reshape(array, self.shape, stream=stream)

    def _with_elements(self, offsets: Any, value: Any) -> Any:
        stream = self.work.stream
        flat = mx.reshape(self.array, (-1,), stream=stream)
        offsets, value = (mx.reshape(x, (-1,), stream=stream) for x in (offsets, value))
        return mx.reshape(
            mx.put_along_axis(flat, offsets, value, 0, stream=stream), self.shape, stream=stream
        )

    def claim(self) -> bool:
        """Note a write where nothing has to happen before it; else False: it needs ``prepare_write``."""
        work, written = self.work, self.written_at
        if self.raw or self.borrowed or self.read_at > work.drained or self.array is None:
            return False
        if work.drained < written < work.epoch:
            return False
        self.written_at = work.epoch
        return True

    def prepare_write(self, value: Any) -> None:
        """Have what reads the array finish first where MLX would copy it, and note the write of ``value``."""
        work = self.work
        if self.array is None:
            raise ClosedError(
                "write: the backend of this tensor is closed; open it again with ml.open_backend"
            )
        if self.raw:
            self._settle_layout()
        if self.borrowed:  # the write moves it to memory of our own, or the lender has let go of it
            self.borrowed = False
            self.backend.allocations[id(self)] = (self.device, self.nbytes)
        read, written = self.read_at > work.drained, work.drained < self.written_at < work.epoch
        if (read or written) and self.nbytes >= WAIT_BYTES:
            work.hold(self.written_at if written else 0)
            work.hold(self.read_at, value)
        self.written_at = work.epoch

    def _settle_layout(self) -> None:
        with self.work.lock:
            self.array = mx.contiguous(self.array, stream=self.work.stream)
            self.raw = False
